"""Names of types that are used everywhere."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

#: An array of whatever dtype and shape.
Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
