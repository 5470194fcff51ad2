"""The part of daskps inside the scheduler: which host holds which shard."""
