"""Consistency policies: small values that refuse impossible settings.

A policy says two things and nothing else: when a pull may proceed, which is found out in
`shards/parked.py`, and when the pushes of a clock are complete, in `shards/rounds/`. Until
then a request waits, as data beside the shard.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Updates that a delay may be bound to: far more than a run has.
MOST_STALENESS = 2**31


@dataclass(frozen=True, slots=True)
class BSP:
    """Bulk synchronous parallel: one optimizer step per round of all trainers.

    A pull reads exactly the last complete round (Valiant, "A bridging model for
    parallel computation", CACM 33(8), 1990).

    Examples
    --------
    >>> store = daskps.create({"w": np.zeros(1)}, optimizer=daskps.optim.SGD(1.0))
    >>> gradient = lambda params, X, y: {"w": X.mean(axis=0)}
    >>> X = np.array([[1.0], [3.0]])
    >>> daskps.train(store, gradient, X, trainers=2, sync=daskps.BSP()).weights
    {'w': array([-2.])}
    """

    name = "bsp"


@dataclass(frozen=True, slots=True)
class SSP:
    """Stale synchronous parallel: a pull waits for trainers too far behind.

    Ho et al., "More effective distributed ML via a stale synchronous parallel
    parameter server", NIPS 2013.

    Parameters
    ----------
    staleness : int
        How many clocks the slowest live trainer may be behind the one that pulls.

    Examples
    --------
    >>> store = daskps.create({"w": np.zeros(1)}, optimizer=daskps.optim.SGD(1.0))
    >>> gradient = lambda params, X, y: {"w": X.mean(axis=0)}
    >>> X = np.array([[1.0], [3.0]])
    >>> daskps.train(store, gradient, X, trainers=2, sync=daskps.SSP(1)).weights
    {'w': array([-4.])}
    """

    staleness: int = 3
    name = "ssp"

    def __post_init__(self) -> None:
        if isinstance(self.staleness, bool) or not isinstance(self.staleness, int):
            raise TypeError(
                f"staleness is a number of clocks (int), found {self.staleness!r}"
            )
        if not 0 <= self.staleness < 2**63:  # a word of a shard has it
            raise ValueError(
                f"staleness must be from 0 to {2**63 - 1} clocks, found "
                f'{self.staleness}; for no bound at all use sync="asp"'
            )


@dataclass(frozen=True, slots=True)
class ASP:
    """Asynchronous parallel: every push is applied on arrival, nobody waits.

    With one of its parameters each push says which version of a shard its trainer has
    pulled last. The *delay* of a push is how many updates the shard has applied since
    then, the trainer's own ones too; 0 where the trainer has pulled nothing of it yet.

    Parameters
    ----------
    max_staleness : int, optional
        Gradients of a larger delay, in updates, are not applied, shard by shard: the
        push is acknowledged, its clock ticks, and ``TrainResult.stats.dropped`` counts
        it. By default all are applied.
    damping : float
        Gradients are multiplied by ``(1 + delay) ** -damping``; 0 leaves them as they
        are, 1 is the rule of Zhang et al., "Staleness-aware async-SGD for distributed
        deep learning", IJCAI 2016.

    Examples
    --------
    >>> store = daskps.create({"w": np.zeros(1)}, optimizer=daskps.optim.SGD(1.0))
    >>> gradient = lambda params, X, y: {"w": X.mean(axis=0)}
    >>> X = np.array([[1.0], [3.0]])
    >>> daskps.train(store, gradient, X, trainers=2, sync=daskps.ASP()).weights
    {'w': array([-4.])}

    Two pushes of one trainer that has pulled once: the second has a delay of 1.

    >>> def loop(trainer, part):
    ...     trainer.pull()
    ...     trainer.push({"w": part})
    ...     trainer.push({"w": part})
    >>> store = daskps.create({"w": np.zeros(1)}, optimizer=daskps.optim.SGD(1.0))
    >>> run = daskps.run(store, loop, [np.ones(1)], sync=daskps.ASP(damping=1.0))
    >>> store["w"].pull()
    array([-1.5])
    """

    max_staleness: int | None = None
    damping: float = 0.0
    name = "asp"

    def __post_init__(self) -> None:
        most, power = self.max_staleness, self.damping
        if most is not None:
            if isinstance(most, bool) or not isinstance(most, int):
                raise TypeError(
                    f"max_staleness is a number of updates (int) or None, found {most!r}"
                )
            if not 0 <= most <= MOST_STALENESS:
                raise ValueError(
                    f"max_staleness must be from 0 to {MOST_STALENESS} updates, found "
                    f"{most}; None is for no bound"
                )
        if isinstance(power, bool) or not isinstance(power, (int, float)):
            raise TypeError(f"damping is a number, found {power!r}")
        if not 0 <= power < math.inf:
            raise ValueError(
                f"damping must be a finite number of at least 0, found {power!r}"
            )

    @property
    def measures_delay(self) -> bool:
        """Whether pushes say how old the parameters are that they come from."""
        return self.max_staleness is not None or self.damping > 0


Policy: TypeAlias = BSP | SSP | ASP
#: A policy as it travels: its name, its bound (-1 for none) and its damping.
Code: TypeAlias = tuple[str, int, float]
CHOICES: dict[str, Policy] = {"bsp": BSP(), "ssp": SSP(), "asp": ASP()}


def measures_delay(chosen: Policy) -> bool:
    """Whether the trainers of a policy say with a push what they have read."""
    return isinstance(chosen, ASP) and chosen.measures_delay


def encoded(chosen: Policy) -> Code:
    """Return a policy as it travels."""
    if isinstance(chosen, SSP):
        return chosen.name, chosen.staleness, 0.0
    if isinstance(chosen, BSP):
        return chosen.name, 0, 0.0
    most = chosen.max_staleness
    return chosen.name, -1 if most is None else most, float(chosen.damping)


def decoded(code: Sequence[Any]) -> Policy:
    """Return the policy that :func:`encoded` has made this of.

    Raises
    ------
    ValueError, TypeError
        For what it makes of none.
    """
    name, bound, damping = code
    if name == "ssp":
        return SSP(bound)
    if name == "asp":
        return ASP(None if bound == -1 else bound, damping)
    return policy(name)


def policy(sync: str | Policy) -> Policy:
    """Return the policy for a name or a policy.

    Parameters
    ----------
    sync : {"bsp", "ssp", "asp"} or BSP, SSP, ASP
        "ssp" has a staleness of 3 clocks.

    Returns
    -------
    BSP, SSP or ASP
        The policy.

    Raises
    ------
    ValueError
        For an unknown name, listing the choices.
    TypeError
        For anything that is neither a name nor a policy.
    """
    if isinstance(sync, (BSP, SSP, ASP)):
        return sync
    if not isinstance(sync, str):
        raise TypeError(
            f"sync is one of {sorted(CHOICES)} or a policy such as SSP(3), found "
            f"{sync!r}"
        )
    if sync not in CHOICES:
        raise ValueError(f"sync={sync!r} is not known; choose one of {list(CHOICES)}")
    return CHOICES[sync]
