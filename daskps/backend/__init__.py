"""The memory that shards are in: the host's, or that of a device."""
