"""The part of daskps inside a worker: its shards, and what is asked of it."""
