"""``python -m daskps.bench NAME [OPTIONS]``."""

from __future__ import annotations

import sys

from daskps.bench.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
