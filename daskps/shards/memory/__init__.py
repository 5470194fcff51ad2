"""The memory of a shard: its format, who may act on it, how changes take effect."""
