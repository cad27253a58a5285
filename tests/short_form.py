"""Whether the tests run in their short form; conftest.py says so before it imports them."""

whole = False
"""Whether all cases run, and all dtypes are drawn: else few of those that take long."""
