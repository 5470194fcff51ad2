"""What single arguments of a run say."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from daskps import codecs
from daskps.consistency import ASP, SSP, Policy, encoded, measures_delay
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


def reduced_by(reduce: Any) -> str:
    """Return how contributions are reduced, in a word; refuse what is no way to.

    Raises
    ------
    ValueError, TypeError
        As :func:`daskps.reduction.check_reduce` says.
    """
    check_reduce(reduce)
    return "function" if callable(reduce) else reduce


def pulled_by(value: Any) -> codecs.Codec | None:
    """Return how weights travel to trainers, as `pull_codec` says.

    Raises
    ------
    ValueError, TypeError
        For what is no codec.
    """
    try:
        return codecs.choose(value)
    except (ValueError, TypeError) as error:
        raise type(error)(f"pull_{error}") from None


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
