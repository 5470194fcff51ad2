"""``python -m tests.simulator``, from a checkout: see :mod:`tests.simulator.simulate`."""

from __future__ import annotations

import sys

from tests.simulator.simulate import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
