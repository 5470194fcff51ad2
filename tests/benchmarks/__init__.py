"""Benchmarks: what daskps costs, each figure beside a peer in the same run.

Run ``python -m tests.benchmarks NAME`` in a checkout; ``--help`` lists the names. The
extra ``bench`` installs all peers; those that are not installed are left out.
"""

import os
from pathlib import Path

_PLACES = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
#: For processes that are started as programs: no installation has this package.
ENVIRON = {"PYTHONPATH": os.pathsep.join(filter(None, _PLACES))}
