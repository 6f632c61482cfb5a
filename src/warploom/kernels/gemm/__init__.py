"""Matrix products on ``mma.sync``: one generator, its configurations, ladder and reference."""
