"""Reads and pushes of a trainer that run beside its loop, which does not wait."""
