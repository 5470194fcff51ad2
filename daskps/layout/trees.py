"""Parameters in mappings, lists and tuples: their names, and the way back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias, TypeGuard

import numpy as np

from daskps.errors import LayoutError

#: A tree of parameters, named by the keys of mappings and the places in the others.
Tree: TypeAlias = Mapping[str, Any] | list[Any] | tuple[Any, ...]

#: Levels of nested mappings and lists; a deeper tree is a mistake.
MOST_LEVELS = 100


#: Said of a future: its result is elsewhere, or not there yet.
NO_RESULT = (
    "is a Future; give what it stands for, by client.gather(...) or .result(), or make it "
    "an argument of a task"
)


def is_future(value: Any) -> bool:
    """Whether something is a future, of Dask or of Python."""
    return callable(getattr(value, "add_done_callback", None))


class Leaf:
    """A stand-in for an array: a list of it is a tree."""

    __slots__ = ()


def flatten(
    params: Any, prefix: str = "", above: tuple[Any, ...] = ()
) -> dict[str, Any]:
    """Flatten a tree into one mapping, joining names and places with "/".

    Parameters
    ----------
    params : mapping, list or tuple
        A tree, see :func:`is_tree`.
    prefix : str
        The text before the names.
    above : tuple
        The trees that `params` lies in.

    Returns
    -------
    dict of str to object
        The leaves, in their order.

    Raises
    ------
    LayoutError
        For a name that is empty or given twice, and a tree that contains itself or has
        too many levels.
    TypeError
        For a name that is no str.
    """
    if above:
        _check_nesting(params, prefix, above)
    flat: dict[str, Any] = {}
    # A dict, as nearly always, without a call more.
    for key, value in params.items() if type(params) is dict else _items(params):
        if not isinstance(key, str):
            raise TypeError(
                f"parameter names are str, found {key!r} of type "
                f"{type(key).__name__}; convert it with str(...)"
            )
        if not key:
            raise LayoutError(
                f"an empty parameter name under {prefix!r}; name it, for example 'w'"
            )
        name = f"{prefix}{key}"
        # Arrays first: an abstract class takes ten times as long to say no.
        is_leaf = isinstance(value, (np.ndarray, Leaf)) or not is_tree(value)
        below = (
            {name: value} if is_leaf else flatten(value, f"{name}/", (*above, params))
        )
        for leaf, leaf_value in below.items():
            if leaf in flat:
                raise LayoutError(
                    f"parameter {leaf!r} is given twice, nested and with '/' in its "
                    f"name; rename one of them"
                )
            flat[leaf] = leaf_value
    return flat


def is_tree(value: Any) -> TypeGuard[Tree]:
    """Whether parameters lie in something: a mapping, or a list or tuple of arrays.

    A list or tuple of numbers alone is an array to NumPy, and so it is here.
    """
    if isinstance(value, (list, tuple)):
        return holds_arrays(value)
    return isinstance(value, Mapping)


def holds_arrays(values: list[Any] | tuple[Any, ...]) -> bool:
    """Whether there is an array, or what a parameter is made of, somewhere in a list.

    Not where there is text too: pairs of names and arrays are what a dict is made of.
    """
    seen, left, found = {id(values)}, [values], False
    while left:
        values = left.pop()
        kinds = set(map(type, values))
        if any(issubclass(kind, (str, bytes)) for kind in kinds):
            return False
        found = found or any(_is_array(kind) for kind in kinds)
        lists = tuple(k for k in kinds if issubclass(k, (list, tuple)))
        for value in values if lists else ():
            # Once each: what contains itself would never end.
            if isinstance(value, lists) and id(value) not in seen:
                seen.add(id(value))
                left.append(value)
    return found


def _is_array(kind: type) -> bool:
    return (
        hasattr(kind, "__dask_graph__")
        or issubclass(kind, (Leaf, Mapping))
        or (hasattr(kind, "__array__") and not issubclass(kind, np.generic))
    )


def _items(tree: Tree) -> Iterable[tuple[Any, Any]]:
    if isinstance(tree, (list, tuple)):
        return ((str(place), value) for place, value in enumerate(tree))
    return tree.items()


def _check_nesting(params: Tree, prefix: str, above: tuple[Any, ...]) -> None:
    """Refuse a tree that would never end, or hardly."""
    if any(params is tree for tree in above):
        raise LayoutError(
            f"the {_kind(params)} under {prefix[:60]!r} contains itself; give each "
            f"parameter a name of its own"
        )
    if len(above) > MOST_LEVELS:
        raise LayoutError(
            f"parameters are nested more than {MOST_LEVELS} levels deep, under "
            f"{prefix[:60]!r}; use fewer levels, or names with '/' in them"
        )


def _kind(tree: Tree) -> str:
    return "mapping" if isinstance(tree, Mapping) else type(tree).__name__


def unflatten(params: Mapping[str, Any], *, like: Any = None) -> Any:
    """Return parameters in the tree that their names were made of.

    A store knows its parameters by flat names: those in mappings, lists and tuples are
    joined with "/", the places in lists and tuples counted from 0. This is the way back.

    Parameters
    ----------
    params : mapping of str to object
        Flat names to values, as :meth:`ParameterStore.pull` returns them and a gradient
        function gets them.
    like : mapping, list or tuple, optional
        A tree of the same names, whose mappings, lists and (named) tuples are made again.
        Without it, names that are the places 0 to n - 1, all of them, become a list.

    Returns
    -------
    dict or list, or of the type of `like`
        The tree; the values are those of `params`, not copies.

    Raises
    ------
    LayoutError
        If a name is both a value and a level above one, or the names are not those of
        `like`.
    TypeError
        If `params` is no mapping, or a name no str.

    Examples
    --------
    >>> daskps.unflatten({"dense/0/w": 1, "dense/0/b": 2, "dense/1/w": 3, "scale": 4})
    {'dense': [{'w': 1, 'b': 2}, {'w': 3}], 'scale': 4}
    >>> daskps.unflatten({"0": 1, "1": 2}, like=(np.zeros(2), np.zeros(3)))
    (1, 2)
    """
    if not isinstance(params, Mapping):
        raise TypeError(
            f"params is a mapping of flat names to values, found "
            f"{type(params).__name__}; pass what pull() returns"
        )
    if like is not None:
        return _as(like, params)
    tree: dict[str, Any] = {}
    for name, value in params.items():
        if not isinstance(name, str):
            raise TypeError(f"parameter names are str, found {name!r:.60}")
        *above, last = name.split("/")
        level = tree
        for key in above:
            below = level.setdefault(key, _Level())
            if not isinstance(below, _Level):
                raise _twice(name)
            level = below
        if last in level:
            raise _twice(name)
        level[last] = value
    return _listed(tree)


class _Level(dict[str, Any]):
    """A level of a tree that is built, not a value of it."""


def _twice(name: str) -> LayoutError:
    return LayoutError(
        f"{name[:60]!r} and a name above or below it both have a value, which no tree "
        f"can have; rename one of them"
    )


def _listed(level: dict[str, Any]) -> Any:
    """Return a level as a list where its names are places, else as a dict."""
    of = {n: _listed(v) if isinstance(v, _Level) else v for n, v in level.items()}
    places = [str(place) for place in range(len(of))]
    if of and all(place in of for place in places):
        return [of[place] for place in places]
    return of


def _as(like: Any, params: Mapping[str, Any]) -> Any:
    """Return values in the tree that `like` is."""
    if not is_tree(like):
        raise LayoutError(
            f"like is a mapping, list or tuple of arrays, found {type(like).__name__}"
        )
    names = flatten(like)
    if missing := [name for name in names if name not in params]:
        raise LayoutError(f"`like` has {missing[:8]}, which params has not")
    if extra := [name for name in params if name not in names]:
        raise LayoutError(f"params has {extra[:8]}, which `like` has not")
    return _filled(like, params, "")


def _filled(like: Any, params: Mapping[str, Any], prefix: str) -> Any:
    if not is_tree(like):
        return params[prefix[:-1]]
    of = {k: _filled(v, params, f"{prefix}{k}/") for k, v in _items(like)}
    if isinstance(like, list):
        return [*of.values()]
    if isinstance(like, tuple):
        # Named ones are made of their fields.
        fields = hasattr(like, "_fields")
        return type(like)(*of.values()) if fields else tuple(of.values())
    return of
