"""Which arguments of a run go together, and what those say that do."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from daskps import codecs
from daskps.consistency import ASP, BSP, SSP, Policy, encoded, measures_delay
from daskps.errors import ConsistencyError
from daskps.reduction import check_reduce
from daskps.store.arguments import whole

if TYPE_CHECKING:
    from collections.abc import Sequence


def described(chosen: Policy) -> str:
    """Return the name of a policy, with what it is bound to."""
    if isinstance(chosen, SSP):
        return f"ssp({chosen.staleness})"
    if measures_delay(chosen):
        _, bound, damping = encoded(chosen)
        return f"asp({'none' if bound < 0 else bound}, {damping:g})"
    return chosen.name


def rows_ahead(chosen: Policy) -> float:
    """Return how far ahead of the slowest a trainer no longer reads rows early."""
    if isinstance(chosen, SSP):
        return chosen.staleness
    return math.inf if isinstance(chosen, ASP) and not measures_delay(chosen) else 0


def may_read_ahead(chosen: Policy) -> bool:
    """Return whether a gradient may be computed from what was read a clock before.

    Not where it says what was read last.
    """
    if measures_delay(chosen):
        return False
    return isinstance(chosen, ASP) or (isinstance(chosen, SSP) and chosen.staleness > 0)


def check_run(chosen: Policy, reduce: Any) -> Policy:
    """Return a policy, with which contributions can be reduced in that way."""
    check_reduce(reduce)
    if callable(reduce):
        why = "elsewhere every push is a step of its own"
        check_rounds("a reduce function", chosen, why)
    return chosen


def check_rounds(what: str, chosen: Policy, why: str) -> None:
    """Refuse what only a policy with rounds has."""
    if not isinstance(chosen, BSP):
        raise ValueError(f"{what} needs sync='bsp', found {chosen.name!r}: {why}")


def check_verb(verb: str, *, bsp: bool, unticked: bool) -> None:
    """Refuse a trainer's `add` or `assign` where the run has no place for it.

    Parameters
    ----------
    verb : {"add", "assign"}
        What the trainer calls.
    bsp : bool
        Whether the run has rounds.
    unticked : bool
        Whether the trainer has pushed at this clock without a tick.

    Raises
    ------
    ValueError
        For `assign` without rounds.
    ConsistencyError
        For what would be of another kind than the rest of its round.
    """
    if verb == "assign" and not bsp:
        raise ValueError(
            "Trainer.assign needs sync='bsp': it takes the mean of what all trainers give "
            "in a round, and elsewhere the last one would win; use add, or assign by the "
            "store's handle"
        )
    if bsp and unticked:
        raise ConsistencyError(
            f"gradients were pushed at this clock without a tick, and {verb} is another "
            f"kind: a round has one; call tick() before it"
        )


def pulled_by(value: Any) -> codecs.Codec | None:
    """Return how weights travel to trainers, as `pull_codec` says.

    Raises
    ------
    ValueError, TypeError
        For what is no codec, and for one that needs what was sent before.
    """
    try:
        chosen = codecs.choose(value)
    except (ValueError, TypeError) as error:
        raise type(error)(f"pull_{error}") from None
    if chosen is not None and not codecs.is_plain(chosen):
        raise ValueError(
            f"pull_codec takes codecs of 16 bits alone, found {chosen.name!r}: no "
            f"weights wait for what another one leaves over; choose 'bf16', 'fp16' or "
            f"None"
        )
    return chosen


def check_averaging(
    chosen: Policy,
    reduce: Any,
    codec: codecs.Codec | None,
    pull_codec: codecs.Codec | None,
) -> None:
    """Refuse what the mean of models cannot be combined with."""
    for what, given in (("codec", codec), ("pull_codec", pull_codec)):
        if given is not None:
            raise ValueError(
                f"average='models' takes no {what}, found {what}={given.name!r}: what "
                f"travels are weights, and it would round them; leave it at None"
            )
    why = "outside a round there is nothing to average"
    check_rounds("average='models'", chosen, why)
    if reduce != "mean":
        raise ValueError("average='models' is a mean; leave reduce at 'mean'")


def goes_in_graph(codec: codecs.Codec | None) -> bool:
    """Return whether contributions that wait in the task graph may be its words."""
    return codec is None or codecs.is_plain(codec)


def check_graph(codec: codecs.Codec | None) -> None:
    """Refuse a codec whose words graph execution cannot keep and cut."""
    if codec is not None and not goes_in_graph(codec):
        raise ValueError(
            f"execution='graph' takes codecs of 16 bits alone, found "
            f"codec={codec.name!r}: no trainer stays that keeps what it leaves over, and "
            f"its words are cut where shards begin; use execution='resident'"
        )


def check_choice(what: str, value: Any, choices: Sequence[str]) -> None:
    """Refuse an argument that is none of its choices."""
    if value not in choices:
        raise ValueError(f"{what}={value!r} is not known; choose one of {choices}")


def batches_between(value: Any) -> int:
    """Return how many batches `sync_every` says; 0 for all of an epoch."""
    if value == "batch":
        return 1
    if value == "epoch":
        return 0
    if isinstance(value, str):
        raise ValueError(
            f"sync_every={value!r} is not known; choose 'batch', 'epoch' or a number "
            f"of batches"
        )
    return whole(value, "sync_every", least=1)
