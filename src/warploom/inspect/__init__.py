"""The inspect room."""
