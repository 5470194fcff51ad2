"""``python -m daskps.cli``."""

import sys

from daskps.cli import main

sys.exit(main())
