"""Breaks of one line each, and the tests that must catch them.

``python -m tests.mutants`` applies each to a copy of the package and runs its tests.
"""
