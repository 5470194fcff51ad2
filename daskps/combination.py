"""The only place that says which choices go together, and which do not.

Wherever one choice forbids another one, :func:`find_refusal` is asked: by `train` and
`run`, by verbs of trainers and handles, and where "auto" looks whether the task graph
would be refused. `docs/combinations.md` has a line for each pair that is.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING

from daskps import codecs
from daskps.consistency import BSP, Policy
from daskps.errors import PushRejectedError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from daskps.codecs import Codec

#: Verbs whose arrays are gradients: what a run says of its codec is about these.
GRADIENTS = ("train", "push", "pushpull")


@dataclass(frozen=True)
class Combination:
    """Choices made together, as far as one of them can forbid another one.

    Parameters
    ----------
    verb : str
        "train" for the gradients of `train`; "push", "pushpull", "add", "assign",
        "pull" or "allreduce" of a trainer of `run`; "aggregate" of a store.
    policy : BSP, SSP or ASP
        Of the run.
    execution : {"auto", "resident", "graph"}
        Of `train`.
    reduce : {"mean", "sum", "function"}
        How contributions of a round become one.
    codec, pull_codec : Codec or None
        How gradients travel, and how weights do.
    sync_every : int
        Batches between two synchronisations; 0 for all of an epoch.
    average : {"gradients", "models"}
        Of what a round forms the mean.
    table : str
        The table of which rows are given; "" for arrays alone.
    monitored : bool
        Whether a `Monitor` watches the run.
    """

    verb: str
    policy: Policy = field(default_factory=BSP)
    execution: str = "resident"
    reduce: str = "mean"
    codec: Codec | None = None
    pull_codec: Codec | None = None
    sync_every: int = 1
    average: str = "gradients"
    table: str = ""
    monitored: bool = False

    @property
    def has_rounds(self) -> bool:
        """Whether what trainers deliver is combined in rounds."""
        return isinstance(self.policy, BSP)

    @cached_property
    def takes_rows(self) -> bool:
        """Whether rows of tables may be given."""
        return find_refusal(replace(self, table="any")) is None


def check_together(of: Combination) -> None:
    """Refuse what does not go together.

    Parameters
    ----------
    of : Combination
        The choices.

    Raises
    ------
    ValueError
        As :func:`find_refusal` returns it.
    """
    if (error := find_refusal(of)) is not None:
        raise error


def check_rows(of: Combination, tables: Iterable[str]) -> None:
    """Refuse rows of tables, by the name of the first one, where arrays alone go.

    Parameters
    ----------
    of : Combination
        The other choices.
    tables : iterable of str
        The names of tables.

    Raises
    ------
    PushRejectedError
        The error names the choice that they do not go with.
    """
    if not of.takes_rows:
        for name in tables:
            check_together(replace(of, table=name))


def find_refusal(of: Combination) -> ValueError | None:
    """Return why a combination is refused; None where it is not.

    Parameters
    ----------
    of : Combination
        The choices.

    Returns
    -------
    ValueError or None
        For rows of tables a :class:`daskps.PushRejectedError`, which is one.
    """
    if text := next(chain(_clashes(of), _clashes_with_monitor(of)), None):
        return ValueError(text)
    if of.table and (text := next(_clashes_with_rows(of), None)):
        return PushRejectedError(
            f"rows of table {of.table[:60]!r} do not go with {text}"
        )
    return None


def _clashes(of: Combination) -> Iterator[str]:
    """Say which choices of a run do not go together."""
    if not of.has_rounds:
        for what, why in _of_rounds(of):
            yield f"{what} needs sync='bsp', found {of.policy.name!r}: {why}"
    if of.pull_codec and (why := codecs.why_not_plain("pull_codec", of.pull_codec)):
        yield why
    if of.execution == "graph" and of.codec and not codecs.is_plain(of.codec):
        yield (
            f"execution='graph' takes codecs of 16 bits alone, found "
            f"codec={of.codec.name!r}: no trainer stays that keeps what it leaves over, "
            f"and its words are cut where shards begin; use execution='resident'"
        )
    if of.average == "models":
        for what, codec in (("codec", of.codec), ("pull_codec", of.pull_codec)):
            if codec is not None:
                yield (
                    f"average='models' takes no {what}, found {what}={codec.name!r}: "
                    f"what travels are weights, and it would round them; leave it at None"
                )
        if of.reduce != "mean":
            yield "average='models' is a mean; leave reduce at 'mean'"


def _clashes_with_monitor(of: Combination) -> Iterator[str]:
    """Say what a `Monitor` does not go with."""
    if of.monitored and of.execution == "graph":
        yield (
            "a Monitor takes no execution='graph': no trainer stays that works its "
            "statistics out; use execution='resident'"
        )
    if of.monitored and of.reduce == "function":
        yield (
            "a Monitor takes no reduce function: it reduces gradients once more, and "
            "has no whole contributions stacked; leave reduce at 'mean' or 'sum'"
        )


def _of_rounds(of: Combination) -> Iterator[tuple[str, str]]:
    """Say which choices need rounds, and why."""
    if of.reduce == "function":
        yield "a reduce function", "elsewhere every push is a step of its own"
    if of.execution == "graph":
        yield (
            "execution='graph'",
            "a round of the task graph is a synchronous one; use execution='resident'",
        )
    if of.average == "models":
        yield "average='models'", "outside a round there is nothing to average"
    if of.verb == "assign":
        yield (
            "Trainer.assign",
            "it takes the mean of what all trainers give in a round, and elsewhere the "
            "last one would win; use add, or assign by the store's handle",
        )


def _clashes_with_rows(of: Combination) -> Iterator[str]:
    """Say what takes arrays alone, and what to do instead."""
    if of.reduce == "function" and of.verb in (*GRADIENTS, "add"):
        yield (
            "a reduce function, which gets whole contributions stacked; leave reduce at "
            "'mean' or 'sum'"
        )
    if of.codec is not None and of.verb in GRADIENTS:
        if not of.codec.takes_rows:
            yield (
                "codec=, which would leave something over for each row; use a codec of "
                "16 bits or Int8, or leave it at None"
            )
        if of.execution == "graph":
            yield (
                "codec= in the task graph, where sums of rows travel as they are; use "
                "execution='resident', or leave codec at None"
            )
    if of.sync_every != 1:
        yield (
            "sync_every=, which has a copy of all parameters updated between two "
            "synchronisations; leave sync_every at 'batch'"
        )
    if of.average == "models":
        yield (
            "average='models', which has a copy of all parameters; leave average at "
            "'gradients'"
        )
    if of.verb == "assign":
        yield (
            "Trainer.assign, whose mean is that of all trainers which name a parameter, "
            "and not of those which name a row; add differences, or assign rows by the "
            "store's handle outside of the run"
        )
    if of.verb == "aggregate":
        yield (
            "aggregate, which takes no rows; sum them yourself, or push them with "
            "store.push"
        )
