"""What a trainer does beside its loop: reads and pushes that do not wait."""
