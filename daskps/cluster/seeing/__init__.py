"""Numbers of stores for people: what hosts report."""
