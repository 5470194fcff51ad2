"""Which rows a trainer sees, and where they are."""
