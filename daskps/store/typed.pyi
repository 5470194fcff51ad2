"""The type of `store["name"]`: only the store knows whether it is a table."""

from collections.abc import Callable
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, overload

from daskps.store.array import ParameterArray
from daskps.store.table import ParameterTable

P = ParamSpec("P")
Q = ParamSpec("Q")
T = TypeVar("T")

class Either(Generic[P, Q, T]):
    """A verb that is called as one of an array or as one of a table."""

    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T: ...
    @overload
    def __call__(self, *args: Q.args, **kwargs: Q.kwargs) -> T: ...

def either(
    of_array: Callable[Concatenate[Any, P], T],
    of_table: Callable[Concatenate[Any, Q], T],
) -> Callable[[Callable[..., None]], Either[P, Q, T]]: ...

class Parameter(ParameterArray, ParameterTable):
    """An array or a table, with the attributes of both."""

    @either(ParameterArray.pull, ParameterTable.pull)
    def pull(self) -> None: ...
    @either(ParameterArray.push, ParameterTable.push)
    def push(self) -> None: ...
    @either(ParameterArray.add, ParameterTable.add)
    def add(self) -> None: ...
    @either(ParameterArray.assign, ParameterTable.assign)
    def assign(self) -> None: ...
