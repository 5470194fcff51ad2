"""Layer 3: below the entries the only importers of distributed.

May import layers 2, 1 and 0 and ``distributed``.
"""
