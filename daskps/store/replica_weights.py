"""A copy of a store's arrays that goes its own way, and what two such copies exchange.

Arithmetic alone: who sends what, and when, is in :mod:`daskps.store.replica`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from daskps.errors import PushRejectedError

if TYPE_CHECKING:
    from daskps.typing import Array

#: Arrays by the names of parameters.
ArraysByName = dict[str, "Array"]


class ReplicaParams(Mapping[str, "Array"]):
    """Arrays by name, which stay the same arrays: an assignment writes to them.

    Parameters
    ----------
    arrays : dict of str to ndarray
        The arrays.
    """

    def __init__(self, arrays: ArraysByName) -> None:
        self._arrays = arrays

    def __getitem__(self, name: str) -> Array:
        return self._arrays[name]

    def __setitem__(self, name: str, value: Any) -> None:
        if value is (array := self._arrays[name]):  # by `params["w"] += 1`
            return
        given = np.asarray(value)
        if given.shape != array.shape:
            raise ValueError(
                f"parameter {name!r} has shape {array.shape}, found {given.shape}"
            )
        np.copyto(array, given, casting="same_kind")

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def __repr__(self) -> str:
        return repr(self._arrays)


class Exchange:
    """One sync under way: the replica at its beginning, deltas sent, values received.

    Parameters
    ----------
    sent : dict of str to ndarray
        The replica when the sync began; its own memory.
    deltas : dict of str to ndarray
        Added to the store by the sync. Once they are complete they stay as they are.
    is_complete : bool
        Whether `deltas` are complete: elastic averaging has to read the store first.
    """

    def __init__(
        self, sent: ArraysByName, deltas: ArraysByName, *, is_complete: bool
    ) -> None:
        self.sent, self.deltas, self.is_complete = sent, deltas, is_complete
        #: Values of the store after it has added the deltas.
        self.found: Mapping[str, Array] | None = None
        #: Whether no shard will ever apply it.
        self.is_refused = False


class ReplicaWeights:
    """The replica's own arrays, beside what the store held when they last met.

    Parameters
    ----------
    params : dict of str to ndarray
        The values of the store; they become the replica's own.
    elastic : float, optional
        The share of the difference by which replica and store move towards each other.
    """

    def __init__(self, params: ArraysByName, elastic: float | None = None) -> None:
        self.params, self._share = ReplicaParams(params), elastic
        self._base = _copies(params)

    def begin(self) -> Exchange:
        """Return a sync of what the replica is now.

        Raises
        ------
        PushRejectedError
            For changes that cannot be sent; nothing has begun.
        """
        deltas = {}
        for name, base in self._base.items():
            w = self.params[name]
            if self._is_elastic(w) or np.array_equal(w, base):
                continue
            if base.dtype == bool:
                raise PushRejectedError(
                    f"parameter {name!r} is bool, of which a replica can send no "
                    f"difference; assign it by the store's handle"
                )
            deltas[name] = _difference(w, base)
        sent = _copies(self.params)
        return Exchange(sent, deltas, is_complete=self._share is None)

    def _is_elastic(self, array: Array) -> bool:
        return self._share is not None and array.dtype.kind == "f"

    def meet(self, exchange: Exchange, center: Mapping[str, Array]) -> None:
        """Say by how much replica and store are to move towards each other.

        Parameters
        ----------
        exchange : Exchange
            Gets a (w - s) of all parameters of floats.
        center : mapping of str to ndarray
            The values of the store.
        """
        for name, w in exchange.sent.items():
            if self._is_elastic(w):
                moved = exchange.deltas[name] = _difference(w, center[name])
                moved *= self._share
        exchange.is_complete = True

    def end(self, exchange: Exchange) -> None:
        """Take over the values that a sync has brought; steps done meanwhile stay."""
        for name, found in (exchange.found or {}).items():
            w, sent = self.params[name], exchange.sent[name]
            if self._is_elastic(w):
                w -= exchange.deltas[name]
                continue
            if np.array_equal(w, sent):
                np.copyto(w, found)
            else:
                np.add(found, _difference(w, sent), out=w)
            np.copyto(self._base[name], found)


def _difference(some: Array, others: Array) -> Array:
    with np.errstate(all="ignore"):  # what is not finite is refused when it is sent
        return np.subtract(some, others, out=np.empty_like(some))


def _copies(arrays: Mapping[str, Array]) -> ArraysByName:
    return {name: array.copy() for name, array in arrays.items()}
