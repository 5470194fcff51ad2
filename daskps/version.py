"""Versions: of the package, and of what a push leads to."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from operator import itemgetter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

try:
    VERSION = version("daskps")
except PackageNotFoundError:
    VERSION = "0+unknown"

_version_of = itemgetter(1)


class Version(int):
    """The largest shard version of a call, with the version of each shard it touched.

    Attributes
    ----------
    pairs : tuple of (int, int)
        Shard and version.

    Examples
    --------
    >>> v = Version.of([(0, 3), (1, 4)])
    >>> v, v.pairs
    (4, ((0, 3), (1, 4)))
    """

    pairs: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, pairs: Iterable[tuple[int, int]]) -> Version:
        """Return the version of some (shard, version) pairs; 0 for none.

        Parameters
        ----------
        pairs : iterable of (int, int)
            Shard and version.

        Returns
        -------
        Version
            The largest version, with its pairs.

        Examples
        --------
        >>> Version.of([(0, 3), (1, 4)])
        4
        """
        found = tuple(pairs)
        version = cls(max(map(_version_of, found), default=0))
        version.pairs = found
        return version
