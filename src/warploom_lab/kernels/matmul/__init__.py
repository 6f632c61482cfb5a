"""The ladder of matrix products."""
