"""The lang room."""
