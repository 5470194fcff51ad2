"""Rounds in the task graph: windows of them, their tasks, what these share."""
