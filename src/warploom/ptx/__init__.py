"""PTX that others wrote, as Programs: parser, symbols and types, control flow, instructions."""
