"""Checkpoints on disk: names, arrays, their chunks and the manifest."""
