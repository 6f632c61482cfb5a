"""Attention forward: configuration, generator, ladder and reference."""
