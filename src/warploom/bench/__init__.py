"""Measurements that can be made again: environment, timing, baselines, ladders and the tables made of them."""
