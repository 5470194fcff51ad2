"""``python -m daskps.bench NAME [OPTIONS]``."""

from __future__ import annotations

import importlib
import sys

NAMES = ("graph", "kernels", "pullpush", "rounds", "snapshot", "startup")


def main() -> int:
    """Run one benchmark by name."""
    if len(sys.argv) < 2 or sys.argv[1] not in NAMES:
        print(f"usage: python -m daskps.bench {{{','.join(NAMES)}}} [OPTIONS]")
        return 2
    module = importlib.import_module(f"daskps.bench.{sys.argv[1]}")
    status: int = module.main(sys.argv[2:])
    return status


if __name__ == "__main__":
    sys.exit(main())
