"""What a checkpoint has on disk: names, arrays, their chunks and the manifest."""
