"""Pytrees of JAX in stores, and functions of `jax.value_and_grad` in `daskps.train`.

The paths of a pytree are the names of its parameters, joined with "/": keys of dicts,
places in lists and tuples, fields of named tuples and dataclasses. A tree of the same
structure, with any leaves, is the way back.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from jax import numpy as jnp
from jax import tree_util

import daskps

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

__all__ = ["create", "flatten", "pull", "train", "unflatten"]


def flatten(tree: Any) -> dict[str, Any]:
    """Return the leaves of a pytree by their paths.

    Parameters
    ----------
    tree : pytree
        Of arrays, :class:`daskps.ArraySpec` and :class:`daskps.TableSpec`.

    Returns
    -------
    dict of str to object
        In the order that JAX has them.

    Raises
    ------
    LayoutError
        For a leaf without a path, and for two with the same one.

    Examples
    --------
    >>> flatten({"layers": [{"w": 1.0}, {"w": 2.0}], "scale": (3.0,)})
    {'layers/0/w': 1.0, 'layers/1/w': 2.0, 'scale/0': 3.0}
    """
    found: dict[str, Any] = {}
    for path, leaf in tree_util.tree_flatten_with_path(tree)[0]:
        name = "/".join(_text(key) for key in path)
        if not name or name in found:
            why = f"two leaves are at {name!r}" if name else "a leaf has no path"
            raise daskps.LayoutError(
                f"{why}, and names of parameters are paths; give each a key of its own, "
                f"such as {{'w': array}}"
            )
        found[name] = leaf
    return found


def unflatten(values: Mapping[str, Any], like: Any) -> Any:
    """Return values as nested as a pytree.

    Parameters
    ----------
    values : mapping of str to array
        By paths, such as ``TrainResult.weights``; where there are more, these are left
        out.
    like : pytree
        Of the structure that is wanted, with any leaves.

    Returns
    -------
    pytree
        With the values as they are.

    Raises
    ------
    UnknownParameterError
        For a path without a value.

    Examples
    --------
    >>> unflatten({"w": 1.0, "b/0": 2.0}, {"b": (0,), "w": 0})
    {'b': (2.0,), 'w': 1.0}
    """
    names = flatten(like)
    if missing := [name for name in names if name not in values]:
        raise daskps.UnknownParameterError(
            f"there is no value for {missing[:8]} of the pytree; there are "
            f"{[*values][:8]}"
        )
    leaves = [values[name] for name in names]
    return tree_util.tree_unflatten(tree_util.tree_structure(like), leaves)


def create(tree: Any, **options: Any) -> daskps.ParameterStore:
    """Create a store of the leaves of a pytree.

    Parameters
    ----------
    tree : pytree
        Of arrays, :class:`daskps.ArraySpec` and :class:`daskps.TableSpec`.
    **options
        As in :func:`daskps.create`, such as `optimizer`.

    Returns
    -------
    ParameterStore
        A handle; with an asynchronous client an awaitable of one.

    Raises
    ------
    LayoutError, StoreExistsError, NotEnoughWorkersError
        As :func:`daskps.create`; a LayoutError also for other leaves.

    Examples
    --------
    >>> store = create({"layers": [{"w": jnp.zeros(2)}, {"w": jnp.ones(3)}]})
    >>> pull(store, {"layers": [{"w": 0}, {"w": 0}]})
    {'layers': [{'w': Array([0., 0.], dtype=float32)}, {'w': Array([1., 1., 1.], dtype=float32)}]}
    """
    return daskps.create(flatten(tree), **options)


def pull(source: Any, like: Any, **options: Any) -> Any:
    """Read a pytree from a store, or in the loop of a trainer.

    Parameters
    ----------
    source : ParameterStore or Trainer
        Where to read.
    like : pytree
        Of the structure that is wanted, with any leaves.
    **options
        As in the `pull` of `source`.

    Returns
    -------
    pytree
        Of JAX arrays; with an asynchronous client an awaitable of one.

    Raises
    ------
    UnknownParameterError
        For a path that the store does not have.
    StoreClosedError, ShardLostError, TimeoutError
        As the `pull` of `source`.

    Examples
    --------
    >>> store = create({"w": jnp.zeros(2)}, optimizer=daskps.optim.SGD(0.5))
    >>> _ = store.push({"w": jnp.ones(2)})
    >>> pull(store, {"w": 0})["w"].tolist()
    [-0.5, -0.5]
    """
    found = source.pull([*flatten(like)], **options)
    return _later(found, like) if inspect.isawaitable(found) else _nested(found, like)


async def _later(found: Awaitable[Any], like: Any) -> Any:
    return _nested(await found, like)


def _nested(values: Mapping[str, Any], like: Any) -> Any:
    """Return copies of values as JAX arrays, nested as a pytree."""
    return unflatten({name: jnp.array(value) for name, value in values.items()}, like)


def train(
    store: Any,
    function: Callable[..., Any],
    X: Any,
    y: Any = None,
    *,
    like: Any,
    has_aux: bool = False,
    **options: Any,
) -> daskps.TrainResult:
    """Train a pytree by a function of `jax.value_and_grad`, as :func:`daskps.train`.

    Parameters
    ----------
    store : ParameterStore
        Of the pytree, see :func:`create`.
    function : callable
        ``function(tree, X_batch, y_batch)``, or ``function(tree, X_batch)`` without `y`,
        returns ``(loss, gradients)`` as `jax.value_and_grad` of a mean loss over the
        batch does; gradients are a pytree as the parameters are.
    X, y
        As in :func:`daskps.train`.
    like : pytree
        Of the structure of the parameters, with any leaves.
    has_aux : bool, default False
        Whether it returns ``((loss, aux), gradients)``; `aux` is left out. For
        statistics that the store is to have write a loop for :func:`daskps.run` with
        :meth:`daskps.Trainer.leave`.
    **options
        As in :func:`daskps.train`.

    Returns
    -------
    TrainResult
        ``unflatten(result.weights, like)`` are the weights as a pytree; with an
        asynchronous client an awaitable of one.

    Raises
    ------
    Exception
        As :func:`daskps.train`.

    Examples
    --------
    >>> import jax
    >>> def loss(tree, X, y):
    ...     return ((X @ tree["w"] + tree["b"] - y) ** 2).mean()
    >>> tree = {"w": jnp.zeros(3), "b": jnp.zeros(())}
    >>> store = create(tree, optimizer=daskps.optim.SGD(0.1))
    >>> X = np.random.default_rng(0).normal(size=(64, 3)).astype("f4")
    >>> how = dict(like=tree, epochs=20, batch_size=16)
    >>> result = train(store, jax.jit(jax.value_and_grad(loss)), X, X.sum(1), **how)
    >>> result.history[-1].loss < 0.01
    True
    """
    # Structure alone: the arrays would travel to each trainer.
    structure = tree_util.tree_map(lambda _: 0, like)
    gradient = _Gradient(function, structure, has_aux)
    return daskps.train(store, gradient, X, y, **options)


class _Gradient:
    """A function of `jax.value_and_grad` as `daskps.train` calls it."""

    def __init__(self, function: Callable[..., Any], like: Any, has_aux: bool) -> None:
        self._function, self._like, self._has_aux = function, like, has_aux

    def __call__(self, params: Mapping[str, Any], X: Any, y: Any) -> tuple[Any, Any]:
        """Return the loss of a batch, and gradients by name."""
        # `params` are valid until it returns, and JAX may use their memory later.
        tree = _nested(params, self._like)
        batch = (X,) if y is None else (X, y)
        loss, grads = self._function(tree, *batch)
        return loss[0] if self._has_aux else loss, flatten(grads)


def _text(key: Any) -> str:
    """Return one part of a path."""
    for kind in ("key", "idx", "name"):
        if hasattr(key, kind):
            return str(getattr(key, kind))
    return str(key)
