"""Measurements that can be made again: environment, timing, peers, ladders and the tables made of them."""
