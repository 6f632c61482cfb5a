"""The tune room."""
