"""The limits of a store and a run, checked by arithmetic before anything is built.

A client checks first and tells its user; the scheduler checks again, for messages come
from others too: building the answer to an absurd request would keep it from everybody.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from daskps.errors import LayoutError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

#: Shards of a store.
MOST_SHARDS = 16_384
#: Parameters of a store.
MOST_PARAMETERS = 32_768
#: Pieces of a store: a parameter has one in each shard that it meets.
MOST_PIECES = 131_072
#: Axes of a parameter, as of an ndarray.
MOST_DIMENSIONS = 64
#: Bytes of one copy of all values: more than a process can address.
MOST_NBYTES = 2**47
#: Bytes of a row of an unbounded table.
MOST_ROW_NBYTES = 2**32
#: Bytes of all names of parameters together.
MOST_NAMES_NBYTES = 16 * 2**20
#: Rows, and their bytes, that one call reads of a table in one shard.
MOST_ROWS = 65_536
MOST_ROWS_NBYTES = 2**26
#: Runs of elements that one call reads of one shard's arrays, or one for each of its
#: pieces.
MOST_RANGES = 1024
#: Rows of a table that one step changes in one shard: it must be able to take them
#: back.
MOST_PUSHED_ROWS = 131_072
#: Rows that one step of a removal names. Every shard has room to take so many back from
#: its creation on, about 640 bytes each: rows are removed where memory is short.
MOST_REMOVED_ROWS = 1024
#: Bytes of the name of a store.
STORE_NAME_NBYTES = 200
#: Resident trainers of a run.
MOST_TRAINERS = 1024
#: Parts of a run in the task graph.
MOST_PARTS = 16_384


def check_shards(shards: Any) -> None:
    """Refuse a number of shards that no store can have.

    Raises
    ------
    LayoutError
        Naming it and the limit.
    """
    if type(shards) is not int or not 1 <= shards <= MOST_SHARDS:
        found = f"{shards:,}" if isinstance(shards, int) else repr(shards)
        raise LayoutError(
            f"shards must be at least 1 and at most {MOST_SHARDS:,}, found {found}; "
            f"leave shards= out for one per server"
        )


def check_parameters(
    parameters: Iterable[tuple[str, Any, str]],
    n: int,
    shards: int,
    tables: Sequence[tuple[str, int, int, str]] = (),
) -> None:
    """Refuse parameters and tables that are too many, or too large.

    Parameters
    ----------
    parameters : iterable of (name, shape, dtype)
        Those of a store.
    n : int
        How many there are.
    shards : int
        Into how many shards they are cut.
    tables : sequence of (name, rows, dim, dtype)
        Tables of the store.

    Raises
    ------
    LayoutError
        Naming what is too large and the limit.
    """
    n += len(tables)
    which = "parameters and tables" if tables else "parameters"
    if n > MOST_PARAMETERS:
        raise LayoutError(
            f"{n:,} {which} are more than the {MOST_PARAMETERS:,} that a store may "
            f"have; put small ones of a kind together into one array"
        )
    dtypes, names, nbytes = set[str](), 0, 0
    for name, rows, dim, dtype in tables:
        names += len(name.encode("utf-8", "surrogatepass"))
        # One that is unbounded has 0 of them here, and addresses for many.
        if not rows and (long := dim * np.dtype(dtype).itemsize) > MOST_ROW_NBYTES:
            raise LayoutError(
                f"a row of table {name[:60]!r} has {long:,} bytes, more than the "
                f"{MOST_ROW_NBYTES:,} of an unbounded table; give it a number of rows, "
                f"or make them shorter"
            )
        nbytes += rows * dim * np.dtype(dtype).itemsize
    for name, shape, dtype in parameters:
        if any(type(length) is not int or length < 0 for length in shape):
            raise LayoutError(
                f"parameter {name[:60]!r} has the shape {shape!r:.60}; a shape has whole "
                f"numbers of 0 or more"
            )
        if len(shape) > MOST_DIMENSIONS:
            raise LayoutError(
                f"parameter {name[:60]!r} has {len(shape):,} axes, more than the "
                f"{MOST_DIMENSIONS} of an ndarray"
            )
        dtypes.add(dtype)
        names += len(name.encode("utf-8", "surrogatepass"))
        nbytes += math.prod(shape) * np.dtype(dtype).itemsize
    for found, most, what in (
        (
            n + (len(dtypes) + len(tables)) * shards,
            MOST_PIECES,
            "pieces that parameters and shards make",
        ),
        (names, MOST_NAMES_NBYTES, "bytes of names"),
        (nbytes, MOST_NBYTES, "bytes of values"),
    ):
        if found > most:
            raise LayoutError(
                f"{n:,} {which} in {shards:,} shards come to {found:,} {what}, more "
                f"than the {most:,} that a store may have"
            )


def check_placed(placed: Iterable[tuple[Sequence[int], Sequence[int]]], n: int) -> None:
    """Refuse parameters that are placed in more ways than a layout has room for.

    Parameters
    ----------
    placed : iterable of (shards, indices)
        Shards, and the parameters and tables that are cut over these.
    n : int
        How many parameters and tables there are.

    Raises
    ------
    LayoutError
        Naming what they come to and the limit.
    """
    # Parameters cut over the same shards are cut as one vector for each of the 12
    # dtypes.
    found = n + sum(
        len(indices) + len(shards) * min(len(indices), 12) for shards, indices in placed
    )
    if found > MOST_PIECES:
        raise LayoutError(
            f"parameters that are placed come to {found:,} pieces, more than the "
            f"{MOST_PIECES:,} that a store may have; place them on fewer servers"
        )


def check_trainers(size: Any, *, graph: bool) -> None:
    """Refuse trainers that an execution has no room for.

    Parameters
    ----------
    size : int
        How many.
    graph : bool
        Whether the rounds may be tasks of the graph.

    Raises
    ------
    LayoutError
        Naming their number and the limits.
    """
    most = MOST_PARTS if graph else MOST_TRAINERS
    if type(size) is not int or not 1 <= size <= most:
        found = f"{size:,}" if isinstance(size, int) else repr(size)
        raise LayoutError(
            f"trainers={found} is not possible: a shard has room for 1 to "
            f"{MOST_TRAINERS:,} resident trainers, the task graph takes "
            f"{MOST_PARTS:,}; give each more of the data"
        )
