"""Benchmarks: what daskps costs, each figure beside another side in the same run.

Run ``python -m tests.benchmarks NAME`` in a checkout; ``--help`` lists the names. The
extra ``bench`` installs what ours is set beside; what is missing is left out.
"""
