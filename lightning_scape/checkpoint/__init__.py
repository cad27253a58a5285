"""What is saved, and how it comes back whole."""
