"""Layer 5: what daskps costs, each figure beside a peer in the same run.

Run ``python -m daskps.bench NAME``; ``python -m daskps.bench --help`` lists the names.
The extra ``bench`` installs all peers; those that are not installed are left out.
"""
