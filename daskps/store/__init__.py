"""Layer 4: what a user holds.

May import layers 3, 1 and 0 and ``dask``, but neither ``daskps.shards`` nor
``distributed``.
"""
