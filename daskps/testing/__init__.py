"""A seeded simulator of a cluster with daskps: one thread, virtual time, real code.

See :mod:`daskps.testing.simulate` for how to use it.
"""
