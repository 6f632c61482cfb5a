"""The ladder of attention forward."""
