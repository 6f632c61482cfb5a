"""Barriers of CTAs and clusters, and mbarriers: who has come, who waits, and what they learn."""
