"""Tasks of Dask's that run on the worker of one executor, each a pure function."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from daskps.usercode import user_code

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from daskps.typing import Array


class Forward(NamedTuple):
    """The results of a forward, which stay on its worker."""

    outputs: list[Array]
    #: The state that the network keeps for its backward.
    saved: Any
    aux: dict[str, Array]


class Backward(NamedTuple):
    """The results of a backward, which stay on its worker."""

    grads: dict[str, Array]
    input_grads: dict[str, Array]


def forward(
    symbol: Any,
    state: tuple[Mapping[str, Array], Mapping[str, Array]],
    batch: Mapping[str, Array],
    is_train: bool,
) -> Forward:
    """Run a network forward. It may write to `aux`, its own copies."""
    params, aux = state
    changed = {name: array.copy() for name, array in aux.items()}
    with user_code("the network's forward"):
        outputs, saved = symbol.forward(
            _frozen(params), changed, _frozen(batch), is_train
        )
    return Forward([np.asarray(out) for out in outputs], saved, changed)


def backward(
    symbol: Any,
    state: tuple[Mapping[str, Array], Any, Forward],
    asked: tuple[Mapping[str, str], Sequence[Array] | None],
    before: Backward | None,
) -> Backward:
    """Run a network backward, and bring its gradients to those before.

    Raises
    ------
    ValueError
        Where a gradient is missing, or of another shape than its parameter.
    """
    params, _, ran = state
    requests, out_grads = asked
    with user_code("the network's backward"):
        grads, input_grads = symbol.backward(_frozen(params), ran.saved, out_grads)
    found = {}
    for name, request in requests.items():
        if request == "null":
            continue
        if name not in grads or np.shape(grads[name]) != params[name].shape:
            what = np.shape(grads[name]) if name in grads else "nothing"
            raise ValueError(
                f"backward gives {what} for {name!r}, which has shape {params[name].shape}"
            )
        found[name] = np.array(grads[name])
        if request == "add" and before is not None and name in before.grads:
            found[name] += before.grads[name]
    return Backward(found, dict(input_grads or {}))


def merged(
    before: tuple[Mapping[str, Array], Mapping[str, Array]] | None,
    new: tuple[Mapping[str, Array], Mapping[str, Array]],
) -> tuple[dict[str, Array], dict[str, Array]]:
    """Return parameters and auxiliary states with new ones in place of old ones."""
    params, aux = before or ({}, {})
    return {**params, **new[0]}, {**aux, **new[1]}


def with_aux(state: tuple[dict[str, Array], Any], ran: Forward) -> tuple[Any, Any]:
    """Return what a replica holds after a forward."""
    return state[0], ran.aux


def joined(state: tuple[Any, Any], ran: Forward) -> tuple[Any, Any, Forward]:
    """Return what a replica holds, with what its forward has left."""
    return (*state, ran)


def item(of: Any, number: int) -> Any:
    """Return one of several things, so that the others need not travel."""
    return of[number]


def statistics(
    stat: Callable[[Array], Any] | None,
    pattern: str,
    state: tuple[Mapping[str, Array], Mapping[str, Array]],
    ran: Forward | None,
) -> list[tuple[str, Any]]:
    """Return a number for each tensor whose name matches."""
    outputs = {f"output{i}": out for i, out in enumerate(ran.outputs if ran else ())}
    known = {**state[0], **state[1], **outputs}
    asked = [name for name in known if re.match(pattern, name)]
    with user_code("the monitor's statistic"):
        return [(name, (stat or _size)(known[name])) for name in asked]


def _size(array: Array) -> float:
    """Return the norm of an array by the root of its number of elements."""
    return float(np.linalg.norm(array.ravel()) / np.sqrt(max(array.size, 1)))


def _frozen(arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Return views that nobody can write to: other tasks see the same memory."""
    found = {}
    for name, array in arrays.items():
        found[name] = array.view()
        found[name].flags.writeable = False
    return found
