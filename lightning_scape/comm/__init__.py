"""Messages between ranks."""
