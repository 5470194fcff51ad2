"""Messages that tell the directory and the hosts of a run that begins."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from daskps.cluster.protocol.wellformed import MOST, check
from daskps.consistency import decoded
from daskps.errors import NotEnoughWorkersError, ProtocolError
from daskps.limits import check_trainers

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

#: Characters of the name of a codec.
_MOST_NAME = 200


@dataclass(frozen=True)
class Who:
    """The facts about a run that the directory is told."""

    client: str
    size: int
    restartable: bool
    gated: bool
    graph: bool
    #: Text for a client that goes on with its epochs, for whom the directory keeps it.
    described: str
    #: The workers its trainers may be on; all, where it names none.
    workers: Sequence[str] = ()


@dataclass(frozen=True)
class Begin:
    """The facts about a run that begins, for the hosts."""

    #: As `encoded` has made it.
    policy: tuple[str, int, float]
    n_ranks: int
    reduce: bytes
    reset: bool
    #: The name of the run's codec in messages, and the codec pickled; empty for none.
    codec: tuple[str, bytes]
    #: Where in the store's epochs it begins, as `Epochs`; None where it has none.
    epochs: tuple[int, int, int] | None


def none_left(workers: Sequence[str]) -> NotEnoughWorkersError:
    """Return what a run ends with when no worker is left that its trainers may be on."""
    return NotEnoughWorkersError(
        f"none of the workers that workers= names is left ({list(workers[:8])}); start "
        f"the run again with others"
    )


def check_begin(begin: Mapping[str, Any]) -> None:
    """Refuse the beginning of a run that no host could make.

    Raises
    ------
    ProtocolError, LayoutError, ValueError
        Naming what is wrong with it.
    """
    check(Begin, begin, "the beginning of a run")
    check_trainers(begin["n_ranks"], graph=False)
    try:
        decoded(begin["policy"])
    except (ValueError, TypeError) as error:
        raise ProtocolError(f"a run of no policy: {error}") from None
    if (epochs := begin["epochs"]) is not None and (
        min(epochs) < 0 or epochs[0] + epochs[2] > MOST
    ):
        raise ProtocolError(f"a run that begins at epochs {tuple(epochs)}")
    if len(name := begin["codec"][0]) > _MOST_NAME:
        raise ProtocolError(f"a run with codec {name!r:.60}")
