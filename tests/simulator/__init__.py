"""A seeded simulator of a cluster with daskps: one thread, virtual time, real code.

See :mod:`tests.simulator.simulate` for how to use it.
"""
