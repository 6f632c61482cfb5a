"""The cuda room."""
