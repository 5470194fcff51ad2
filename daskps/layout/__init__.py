"""Where every element of every parameter lives, and on which worker."""
