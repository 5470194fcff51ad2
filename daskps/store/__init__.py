"""Layer 4: handles that users hold, of stores, arrays, tables and snapshots.

May import layers 3, 1 and 0 and ``dask``, but neither ``daskps.shards`` nor
``distributed``.
"""
