"""The emulate room."""
