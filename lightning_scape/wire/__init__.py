"""How values are packed for a message."""
