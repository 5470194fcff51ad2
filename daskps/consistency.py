"""Consistency policies: small values that refuse impossible settings.

A policy says two things and nothing else: when a pull may proceed, which is found out in
`shards/reads.py`, and when the pushes of a clock are complete, in `shards/rounds/`. Until
then a request waits, as data beside the shard.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


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
        if self.staleness < 0:
            raise ValueError(
                f"staleness must be 0 or more clocks, found {self.staleness}; for no "
                f'bound at all use sync="asp"'
            )


@dataclass(frozen=True, slots=True)
class ASP:
    """Asynchronous parallel: every push is applied on arrival, nobody waits.

    Examples
    --------
    >>> store = daskps.create({"w": np.zeros(1)}, optimizer=daskps.optim.SGD(1.0))
    >>> gradient = lambda params, X, y: {"w": X.mean(axis=0)}
    >>> X = np.array([[1.0], [3.0]])
    >>> daskps.train(store, gradient, X, trainers=2, sync=daskps.ASP()).weights
    {'w': array([-4.])}
    """

    name = "asp"


Policy: TypeAlias = BSP | SSP | ASP
CHOICES: dict[str, Policy] = {"bsp": BSP(), "ssp": SSP(), "asp": ASP()}


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
