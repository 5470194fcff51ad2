"""``python -m tests.benchmarks NAME [OPTIONS]``."""

from __future__ import annotations

import sys

from tests.benchmarks.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
