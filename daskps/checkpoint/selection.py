"""The part of a checkpoint that a store takes, under other names and dtypes too.

A store may have more parameters, or the same under other names: values go by the names
that the store has, and a whole restore takes all as they are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from daskps.checkpoint.manifest import StoredTable
from daskps.errors import LayoutError, UnknownParameterError
from daskps.layout.arrays import FLOATS
from daskps.layout.spans import is_slot

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from daskps.checkpoint.arrays import StoredArray
    from daskps.checkpoint.manifest import Manifest, StoredParameter
    from daskps.layout.arrays import Layout


#: Names that a message shows.
_SHOWN = 20
#: A :class:`TakenEntry` as it comes to a host.
EntryWords: TypeAlias = tuple[int, str, str, bool]


class TakenEntry(NamedTuple):
    """A parameter or table of a checkpoint as a store has it."""

    #: Its index in the checkpoint.
    stored: int
    name: str
    dtype: str
    #: Whether its optimizer state comes along.
    keeps: bool = True


def take(manifest: Manifest, names: Any, rename: Any, dtype: Any) -> list[TakenEntry]:
    """Return what a restore takes.

    Parameters
    ----------
    manifest : Manifest
        Of the checkpoint.
    names : list of str, optional
        Patterns of its names; all by default.
    rename : mapping of str to str, optional
        Patterns, and the names in their place; the first that matches holds. Each ``*``
        there stands for what the same one of the pattern has matched.
    dtype : dtype or mapping of str to dtype, optional
        Of all that is of floats, or by patterns of the new names.

    Raises
    ------
    UnknownParameterError
        For a pattern that matches nothing, with the names that there are.
    LayoutError
        For two of one name, and for a dtype that cannot be.
    TypeError
        For a pattern or a name that is no str, and for a `rename` that is no mapping.
    """
    every = manifest.members
    chosen = [of.name for of in every]
    if names is not None:
        _check_patterns("names=", names, chosen)
        chosen = [n for n in chosen if any(fnmatchcase(n, p) for p in names)]
    renamed = _renamed(chosen, {} if rename is None else rename)
    found: Mapping[str, str] | str | None = None
    if isinstance(dtype, Mapping):
        found = {pattern: np.dtype(of).name for pattern, of in dtype.items()}
        _check_patterns("dtype=", found, renamed.values())
    elif dtype is not None:
        found = np.dtype(dtype).name
    return [
        TakenEntry(i, renamed[of.name], _dtype(of, renamed[of.name], found))
        for i, of in enumerate(every)
        if of.name in renamed
    ]


def _check_patterns(what: str, patterns: Iterable[Any], names: Iterable[str]) -> None:
    names = [*names]
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise TypeError(
                f"{what} takes patterns, which are str, found {pattern!r:.60}"
            )
        if not any(fnmatchcase(name, pattern) for name in names):
            shown, more = ", ".join(map(repr, names[:_SHOWN])), len(names) - _SHOWN
            raise UnknownParameterError(
                f"{what} {pattern!r:.60} matches nothing in the checkpoint, which has "
                f"{shown}{f' and {more} more' if more > 0 else ''}"
            )


def _renamed(names: Sequence[str], rename: Any) -> dict[str, str]:
    """Return the new name of each."""
    is_mapping = isinstance(rename, Mapping)
    if not (is_mapping and all(isinstance(to, str) for to in rename.values())):
        raise TypeError(
            f"rename is a mapping of patterns to names, which are str, found "
            f"{rename!r:.60}; pass {{'encoder/*': 'body/*'}}"
        )
    _check_patterns("rename=", rename, names)
    found = {name: _new_name(name, rename) for name in names}
    before: dict[str, str] = {}
    for name, new in found.items():
        if (other := before.setdefault(new, name)) != name:
            raise LayoutError(
                f"{other!r:.60} and {name!r:.60} would both be {new!r:.60}; choose "
                f"other names in rename=, or leave one out by names="
            )
    return found


def _new_name(name: str, rename: Mapping[str, str]) -> str:
    for pattern, to in rename.items():
        if (match := re.fullmatch(_expression(pattern), name, re.DOTALL)) is None:
            continue
        if to.count("*") > len(match.groups()):
            raise LayoutError(
                f"rename= has more stars in {to!r:.60} than in {pattern!r:.60}: each "
                f"stands for what that of the pattern has matched"
            )
        head, *rest = to.split("*")
        return head + "".join(a + b for a, b in zip(match.groups(), rest, strict=False))
    return name


def _expression(pattern: str) -> str:
    """Return a shell pattern as a regular expression with a group for each star."""
    parts = re.split(r"(\*|\?|\[!?[^]]+\])", pattern)
    of = {"*": "(.*)", "?": "."}
    return "".join(
        of.get(part) or part.replace("[!", "[^", 1) if i % 2 else re.escape(part)
        for i, part in enumerate(parts)
    )


def _dtype(
    of: StoredParameter | StoredTable,
    name: str,
    asked: Mapping[str, str] | str | None,
) -> str:
    """Return the dtype that something has in the store."""
    may = of.dtype in FLOATS and not (isinstance(of, StoredTable) and of.unbounded)
    if isinstance(asked, Mapping):
        wanted = next((d for p, d in asked.items() if fnmatchcase(name, p)), of.dtype)
    else:  # one for all is for those that may have it
        wanted = asked if asked and may else of.dtype
    if wanted != of.dtype and not (may and wanted in FLOATS):
        raise LayoutError(
            f"{name!r:.60} is {of.dtype} in the checkpoint, and cannot be {wanted}: dtype= "
            f"is for arrays and tables of n rows of floats"
        )
    return wanted


class Selection:
    """The values that are read of a checkpoint for a store, by the indices of the store.

    Parameters
    ----------
    manifest : Manifest
        Of the checkpoint.
    taken : iterable of TakenEntry, optional
        Of it; all as it is by default.
    layout : Layout
        Of the store, with more perhaps.
    """

    def __init__(
        self, manifest: Manifest, taken: Iterable[EntryWords] | None, layout: Layout
    ) -> None:
        if taken is None:
            taken = take(manifest, None, None, None)
        index = {name: i for i, name in enumerate(layout.names)}
        every = manifest.members
        at = {stored: (index[name], keeps) for stored, name, _, keeps in taken}
        #: The saved description of each.
        self.members: dict[int, StoredParameter | StoredTable] = {
            new: every[stored]
            if keeps
            else replace(every[stored], steps=0, lr_factor=1.0)
            for stored, (new, keeps) in at.items()
        }
        #: That of each table of the store, None of a new one.
        self.tables: list[Any] = [self.members.get(of.index) for of in layout.tables]
        self.arrays: list[StoredArray] = []
        for array in manifest.arrays:
            mine = tuple(
                replace(member, index=at[member.index][0])
                for member in array.members
                if member.index in at
                and (at[member.index][1] or not is_slot(array.area))
            )
            if mine:
                self.arrays.append(replace(array, members=mine))
