"""What holds for every test."""

import gc

gc.set_threshold(10_000, 50, 100)  # traced Programs stay: to walk through millions of their objects took a quarter
