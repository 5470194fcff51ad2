"""Layer 2: a shard as a state machine over one segment, without I/O.

May import layers 1 and 0 and nothing of Dask, no asyncio, no threads, no locks. The
docstring of :mod:`daskps.cluster` has the path of a push, and the words of the code.
"""
