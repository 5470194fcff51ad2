"""Layer 5: what daskps costs, each figure beside a peer in the same run.

Run ``python -m daskps.bench NAME`` with one of `graph`, `kernels`, `pullpush`, `rounds`,
`snapshot`, `startup`, `train`. The extra ``bench`` installs all peers; those that are
not installed are left out.
"""
