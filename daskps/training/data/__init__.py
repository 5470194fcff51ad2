"""Training data: the rows that each trainer sees, and where they are."""
