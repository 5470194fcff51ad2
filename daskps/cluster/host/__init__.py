"""The part of daskps inside a worker: its shards, and the handlers of its messages."""
