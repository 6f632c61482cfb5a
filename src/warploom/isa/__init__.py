"""The isa room."""
