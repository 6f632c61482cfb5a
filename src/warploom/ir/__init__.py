"""The ir room."""
