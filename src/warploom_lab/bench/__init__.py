"""Measurements that can be made again: environment, baselines, ladders, profiles and the tables made of them."""
