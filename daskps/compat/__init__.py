"""Front-ends in the words of older systems; each is imported by its name."""
