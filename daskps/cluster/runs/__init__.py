"""Runs as their client starts them, and the tasks of their trainers."""
