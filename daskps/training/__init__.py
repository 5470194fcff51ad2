"""Layer 4: training loops over a store.

May import layers 3, 1 and 0 and ``dask``, but neither ``daskps.shards`` nor
``distributed``.
"""
