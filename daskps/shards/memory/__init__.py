"""The memory of a shard: its format, the processes that may use it, its changes."""
