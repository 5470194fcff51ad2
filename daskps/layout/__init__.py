"""The place of every element of every parameter: its shard, and the shard's worker."""
