"""From the arrays and rows of a step to operations on what a shard holds."""
