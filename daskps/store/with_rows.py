"""What goes with rows of tables and what takes arrays alone: said here, and only here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from daskps.errors import PushRejectedError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


class Alone(NamedTuple):
    """Something that takes arrays alone."""

    #: Whether that is so with a value of it.
    refuses: Callable[[Any], bool]
    #: What it is in words, and what to do instead.
    words: str
    way_out: str


#: By what a caller says: the arguments of `train` and `run`, and verbs.
ALONE: Mapping[str, Alone] = {
    "reduce": Alone(
        callable,
        "a reduce function, which gets whole contributions stacked",
        "leave reduce at 'mean' or 'sum'",
    ),
    "codec": Alone(
        lambda codec: codec is not None and not codec.takes_rows,
        "codec=, which would leave something over for each row",
        "use a codec of 16 bits or Int8, or leave it at None",
    ),
    "graph": Alone(
        bool,
        "codec= in the task graph, where sums of rows travel as they are",
        "use execution='resident', or leave codec at None",
    ),
    "sync_every": Alone(
        lambda every: every != 1,
        "sync_every=, which has a copy of all parameters updated between two "
        "synchronisations",
        "leave sync_every at 'batch'",
    ),
    "average": Alone(
        lambda average: average != "gradients",
        "average='models', which has a copy of all parameters",
        "leave average at 'gradients'",
    ),
    "assign": Alone(
        bool,
        "Trainer.assign, whose mean is that of all trainers which name a parameter, and "
        "not of those which name a row",
        "add differences, or assign rows by the store's handle outside of the run",
    ),
    "aggregate": Alone(
        bool,
        "aggregate, which takes no rows",
        "sum them yourself, or push them with store.push",
    ),
}


def find_clash(**how: Any) -> str:
    """Return what of all that was chosen takes arrays alone; "" where nothing does.

    Parameters
    ----------
    **how : object
        Values by the names in `ALONE`.
    """
    return next((what for what in how if ALONE[what].refuses(how[what])), "")


def refusal(table: str, what: str) -> PushRejectedError:
    """Return why rows of a table do not go with something in `ALONE`."""
    _, words, way_out = ALONE[what]
    return PushRejectedError(
        f"rows of table {table[:60]!r} do not go with {words}; {way_out}"
    )
