"""Layer 5: what daskps costs, each figure beside a bare peer in the same run.

Run ``python -m daskps.bench NAME`` with one of `graph`, `kernels`, `pullpush`, `rounds`,
`snapshot`, `startup`.
"""
