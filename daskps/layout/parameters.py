"""One dense parameter, and the run of its elements that one shard has."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from daskps.layout.vectors import Vector


@dataclass(frozen=True, slots=True)
class Parameter:
    """One dense parameter and its place in a flat vector."""

    index: int
    name: str
    shape: tuple[int, ...]
    dtype: str
    #: Position in its flat vector, in elements.
    offset: int
    #: The shards that it is cut over, ascending; None for all.
    shards: tuple[int, ...] | None = None

    @property
    def vector(self) -> Vector:
        """The flat vector that it is in, with all that are cut as it is."""
        return Vector(self.dtype, self.shards)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Number of bytes of one copy of the values."""
        return self.size * np.dtype(self.dtype).itemsize


@dataclass(frozen=True, slots=True)
class Piece:
    """The run of one parameter's elements that one shard owns."""

    parameter: Parameter
    shard: int
    #: Start and stop within the C-order elements of the parameter.
    start: int
    stop: int
    #: Start within what the shard has of the dtype, in elements.
    local: int

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.stop - self.start
