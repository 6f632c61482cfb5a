"""Attention forward: configuration, generator and reference."""
