"""From a handle or a trainer to the shards of its store, and back."""
