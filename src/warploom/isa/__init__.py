"""The instructions: each defined once, with its PTX, fragment maps, NumPy meaning and effects side by side."""
