"""Row reductions of a matrix product that is never written."""
