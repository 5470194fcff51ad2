"""Lists of futures or delayed objects as training data: one part per trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from dask.delayed import Delayed

from daskps.cluster import upstream
from daskps.cluster.runs.parts import DataPart, asked, beside, placed
from daskps.training.data.dataframes import RowNames, array_of, is_table, row_names
from daskps.training.data.rows import (
    NOT_ALIKE,
    check_some,
    is_column,
    n_rows,
    no_column,
    why_unusable,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from daskps.cluster.caller.link import Link


def listed(data: Any) -> list[Any] | None:
    """Return data as a list if it is one with futures or delayed objects."""
    if isinstance(data, np.ndarray) and data.dtype == object and data.ndim == 1:
        data = data.tolist()  # as `to_delayed().ravel()` returns them
    if isinstance(data, (list, tuple)) and any(map(_is_part, data)):
        return list(data)
    return None


def _is_part(value: Any) -> bool:
    return isinstance(value, Delayed) or upstream.is_future(value)


def check_listed(
    X: Any, y: Any, trainers: int | None, split: Mapping[str, Any]
) -> None:
    """Refuse lists that are not one part for each trainer."""
    size = None
    for name, data in (("X", X), ("y", y)):
        if name == "y" and data is None:
            continue
        given = listed(data)
        if given is None:
            raise TypeError(
                f"X and y are lists of futures or delayed parts both or neither; "
                f"{name} is {type(data).__name__}"
            )
        for i, part in enumerate(given):
            if not _is_part(part):
                raise TypeError(
                    f"part {i} of {name} is {type(part).__name__}, others are futures "
                    f"or delayed; make all of them one or the other"
                )
        if size is not None and len(given) != size:
            raise ValueError(f"X has {size} parts and y {len(given)}; give as many")
        size = len(given)
    if trainers not in (None, size):
        raise ValueError(
            f"trainers={trainers} for {size} parts; each part is one trainer's, so "
            f"leave trainers out"
        )
    if split["scheme"] != "contiguous" or split["weights"] is not None:
        raise ValueError(
            f"scheme={split['scheme']!r} and weights={split['weights']} deal rows out, "
            f"but a list of futures or delayed parts is dealt out already; leave them "
            f"out, or give a dask array"
        )


async def from_list(
    link: Link, X: list[Any], y: list[Any] | None, only: Sequence[str] = ()
) -> list[DataPart]:
    """Take each element as one trainer's part."""
    names = [f"part {i} of X" for i in range(len(X))]
    names += [f"part {i} of y" for i in range(len(y or ()))]
    futures = _futures(link, [*X, *(y or ())])
    try:
        looked, held = await asked(link, futures, _look)
    except Exception as error:
        for name, future in zip(names, futures, strict=True):
            if future.status in ("cancelled", "error"):
                error.add_note(
                    f"raised by {name}, the data of trainer {name.split()[1]}"
                )
                break
        raise
    _check_looked(names, looked, len(X))
    heights = [one.length for one in looked[: len(X)]]
    check_some(sum(heights))
    # Of a table it makes an array on its worker, once and not in every round.
    futures = [
        beside(link.client, held, array_of, future, name) if one.is_table else future
        for name, future, one in zip(names, futures, looked, strict=True)
    ]
    blocks = [(future,) for future in futures]
    columns = [blocks[i : i + len(X)] for i in range(0, len(blocks), len(X))]
    parts = [DataPart(*row) for row in zip(heights, *columns, strict=True)]
    return await placed(link, parts, only)


def _check_looked(names: Sequence[str], looked: Sequence[_Look], n: int) -> None:
    """Refuse what has no rows, and labels that are not those of the first `n`."""
    for name, one in zip(names, looked, strict=True):
        if one.wrong:
            raise TypeError(f"{name} {one.wrong}")
    for i, (of, labels) in enumerate(zip(looked, looked[n:], strict=False)):
        if of.length != labels.length:
            raise ValueError(
                f"part {i} has {of.length} rows of X and {labels.length} of y; they must "
                f"be as many"
            )
        if labels.is_column:
            raise no_column(f"part {i} of y")
        have_names = None not in (of.row_names, labels.row_names)
        if have_names and of.row_names != labels.row_names:
            raise ValueError(f"part {i} of y {NOT_ALIKE}")


def _futures(link: Link, given: list[Any]) -> list[Any]:
    """Return a future for each; all delayed ones in one graph share what they share."""
    return [
        upstream.chunk_futures(part)[0][0]
        if isinstance(part, Delayed)
        else upstream.own(link.client, part)
        for part in upstream.persist(link.client, given)
    ]


class _Look(NamedTuple):
    """Facts about a part, as its worker sees it."""

    length: int
    #: Why it cannot be trained on, or "".
    wrong: str
    is_table: bool
    is_column: bool
    row_names: RowNames | None


def _look(part: Any) -> _Look:
    table, wrong = is_table(part), why_unusable(part)
    length = 0 if wrong else _length(part)
    if length < 0:
        wrong = (
            f"is {type(part).__name__}, which has no rows; each must be an array, and "
            f"features and labels are two lists"
        )
    return _Look(length, wrong, table, is_column(part), row_names(part))


def _length(part: Any) -> int:
    """Return the rows of a part, -1 where it has none."""
    try:
        # Of a tuple, a dict or a string the length is not that of an axis; columns of
        # pyarrow's have one without a shape.
        if hasattr(part, "shape") or isinstance(part, list) or is_table(part):
            return int(n_rows(part))
    except (TypeError, ValueError):
        pass
    return -1
