"""Cuts: moments at which all shards contain the same steps of every producer."""
