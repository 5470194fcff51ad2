"""From the arrays of a step to operations on the weights: dense parameters."""
