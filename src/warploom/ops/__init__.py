"""The ops room."""
