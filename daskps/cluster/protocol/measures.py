"""Measures of a parameter's elements, and those that a shard says as they are."""

from __future__ import annotations

from typing import NamedTuple

from daskps.kernels.measures import BLOCK, whole_blocks


class Measuring(NamedTuple):
    """One number of the elements [start, start + n) of a parameter."""

    #: One of `daskps.kernels.measures.KINDS`.
    kind: str
    #: Index of the parameter.
    parameter: int
    start: int
    n: int
    #: Dtype of what they are multiplied by; "" for nothing.
    other: str = ""


class Share(NamedTuple):
    """The part of these elements that a shard has, numbered from the first of them."""

    start: int
    stop: int
    #: The blocks that it has alone.
    first: int
    end: int

    @classmethod
    def of(cls, asked: Measuring, start: int, stop: int) -> Share:
        """Return the share of a shard that has elements [start, stop) of the parameter."""
        lo = max(0, start - asked.start)
        hi = min(asked.n, stop - asked.start)
        lo = min(lo, max(hi, 0))
        return cls(lo, max(lo, hi), *whole_blocks(lo, max(lo, hi), asked.n))

    @property
    def whole(self) -> slice:
        """Elements of the blocks that it has alone."""
        at = min(self.first * BLOCK, self.stop)
        return slice(at, max(at, min(self.end * BLOCK, self.stop)))

    @property
    def cut(self) -> tuple[slice, slice]:
        """Elements before these and behind them, of blocks that others have too."""
        return slice(self.start, self.whole.start), slice(self.whole.stop, self.stop)
