"""Errors of handles that are used as arrays or dicts in memory, or after their end.

Python's own words, such as "unsupported operand", do not say where the values are nor
which verb was meant. All of it is out of a type checker's sight, which therefore finds
these mistakes before they are made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T", bound=type)

_BINARY = {
    "add": "+",
    "sub": "-",
    "mul": "*",
    "matmul": "@",
    "truediv": "/",
    "floordiv": "//",
    "mod": "%",
    "pow": "**",
}
_COMPARISONS = {"lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_UNARY = {
    "neg": "-{}",
    "pos": "+{}",
    "abs": "abs({})",
    "float": "float({})",
    "int": "int({})",
}


def refuses_arithmetic(cls: T) -> T:
    """Have the operators of a parameter's class say where the values are.

    Those with an array on the other side stay NumPy's, which pulls the parameter.
    """
    forms = {
        name: f"{{}} {sign} ..." for name, sign in (_BINARY | _COMPARISONS).items()
    }
    forms |= {f"r{name}": f"... {sign} {{}}" for name, sign in _BINARY.items()}
    for name, form in (forms | _UNARY).items():
        setattr(cls, f"__{name}__", _operator(cls, form))
    return cls


def _operator(cls: type, form: str) -> Callable[..., Any]:
    def operator(self: Any, *others: Any) -> Any:
        for other in others:
            if hasattr(type(other), "__array__") and not isinstance(other, cls):
                return NotImplemented
        parameter = f"store[{self.name!r}]"
        raise TypeError(
            f"the values of parameter {self.name!r} are on the workers: "
            f"{form.format(parameter + '.pull()')} computes with a copy of them, and "
            f"{parameter}.add(...) or .assign(...) changes them"
        )

    return operator


def lacks(of: Any, attribute: str, advice: str = "") -> AttributeError:
    """Return what Python says where an object lacks an attribute, and some advice."""
    text = f"{type(of).__name__!r} object has no attribute {attribute!r}{advice}"
    return AttributeError(text, name=attribute, obj=of)


def no_array_attribute(array: Any, attribute: str) -> AttributeError:
    """Return what to say where a parameter lacks an attribute."""
    # Not of a private one: `copy` and `pickle` ask for those before there is a name.
    if attribute.startswith("_") or not hasattr(np.ndarray, attribute):
        return lacks(array, attribute)
    call = attribute + "()" * callable(getattr(np.ndarray, attribute))
    parameter = f"store[{array.name!r}]"
    return lacks(
        array,
        attribute,
        f": its values are on the workers. {parameter}.pull().{call} takes a copy "
        f"of them, {parameter}.to_dask_array().{call} works where they are",
    )


def no_store_attribute(store: Any, attribute: str, names: Any) -> AttributeError:
    """Return what to say where a store lacks an attribute.

    `names` are those of its parameters, None where this handle has not met its store.
    """
    if attribute.startswith("_"):
        return lacks(store, attribute)
    advice = ""
    below = next((n for n in names or () if n.startswith(f"{attribute}/")), None)
    if names is None or attribute in names:
        advice = f"; a parameter of that name is store[{attribute!r}]"
    elif below is not None:
        advice = f"; parameters below that name are read as store[{below!r}]"
    return lacks(store, attribute, advice)


def not_a_row(name: str, *, read: bool) -> TypeError:
    """Return what to say to those who index a table, or make an array of it."""
    if read:
        return TypeError(
            f"{name!r} is a table: store[{name!r}].pull(ids) reads the rows of these "
            f"ids, .to_dask_array() all of them where they are"
        )
    return TypeError(
        f"store[{name!r}][...] = value writes nothing to the workers; use "
        f"store[{name!r}].assign(ids, values), or .add(ids, deltas)"
    )


def why_shut(method: str, name: str, is_session: bool | None) -> str:
    """Return why a handle takes no calls any more, and what its user can still do."""
    if method == "delete":
        return f"store {name!r} was deleted by this handle; create it again"
    closed = f"this handle of store {name!r} was closed"
    another = f"daskps.open({name!r}) gives another handle"
    if is_session is None:
        return f"{closed}; if the store was given a name {another}"
    if is_session:
        return f"{closed}, which freed the store; create it again"
    return f"{closed}; {another}"
