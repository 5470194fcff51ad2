"""The types of `daskps.aio`: each verb has the parameters of the synchronous one."""

from abc import ABCMeta
from collections.abc import Callable, Coroutine
from typing import (
    Any,
    Concatenate,
    Generic,
    Never,
    ParamSpec,
    Self,
    TypeAlias,
    TypeVar,
)

import numpy as np

import daskps
from daskps import ParameterArray, ParameterStore, ParameterTable, Replica
from daskps.layout.arrays import Layout
from daskps.store.replica_weights import ReplicaParams
from daskps.store.typed import Either

_P = ParamSpec("_P")
_Q = ParamSpec("_Q")
_T = TypeVar("_T")
_T_co = TypeVar("_T_co", covariant=True)
_Later: TypeAlias = Coroutine[Any, Any, _T]

class _Fact(Generic[_T_co]):
    """A value that is known without a question, and cannot be set."""

    def __get__(self, of: object, owner: Any = ...) -> _T_co: ...
    def __set__(self, of: object, value: Never) -> None: ...

class _Verb(Generic[_P, _T_co]):
    """A method."""

    def __get__(self, of: object, owner: Any = ...) -> Callable[_P, _T_co]: ...

def _plain(verb: Callable[Concatenate[Any, _P], _T]) -> _Verb[_P, _T]: ...
def _awaited(verb: Callable[Concatenate[Any, _P], _T]) -> _Verb[_P, _Later[_T]]: ...
def _either(
    of_array: Callable[Concatenate[Any, _P], _T],
    of_table: Callable[Concatenate[Any, _Q], _T],
) -> Callable[[Callable[..., None]], Either[_P, _Q, _Later[_T]]]: ...
def _opening(make: Callable[_P, ParameterStore]) -> Callable[_P, _Opening]: ...
def _given(
    function: Callable[Concatenate[ParameterStore, _P], _T],
) -> Callable[Concatenate[AsyncParameterStore, _P], _T]: ...
def _trained(
    function: Callable[Concatenate[ParameterStore, _P], _T],
) -> Callable[Concatenate[AsyncParameterStore, _P], _Later[_T]]: ...
def _asked(function: Callable[_P, _T]) -> Callable[_P, _Later[_T]]: ...

class _Opening(Coroutine[Any, Any, AsyncParameterStore], metaclass=ABCMeta):
    async def __aenter__(self) -> AsyncParameterStore: ...
    async def __aexit__(self, *exc: object) -> None: ...

class AsyncParameterArray:
    name: _Fact[str]
    shape: _Fact[tuple[int, ...]]
    dtype: _Fact[np.dtype[Any]]
    ndim: _Fact[int]
    size: _Fact[int]
    nbytes: _Fact[int]
    pull = _awaited(ParameterArray.pull)
    push = _awaited(ParameterArray.push)
    add = _awaited(ParameterArray.add)
    assign = _awaited(ParameterArray.assign)
    sum: _Verb[..., _Later[Any]]
    mean: _Verb[..., _Later[Any]]
    min: _Verb[..., _Later[Any]]
    max: _Verb[..., _Later[Any]]
    norm = _awaited(ParameterArray.norm)
    dot = _awaited(ParameterArray.dot)
    to_dask_array = _awaited(ParameterArray.to_dask_array)
    __getitem__ = _awaited(ParameterArray.__getitem__)
    __len__ = _plain(ParameterArray.__len__)
    def region(self, start: int, stop: int) -> AsyncParameterArray: ...

class AsyncParameterTable:
    name: _Fact[str]
    rows: _Fact[int | None]
    dim: _Fact[int]
    dtype: _Fact[np.dtype[Any]]
    # With unbounded rows awaitables.
    n_rows: _Fact[Any]
    nbytes: _Fact[Any]
    pull = _awaited(ParameterTable.pull)
    push = _awaited(ParameterTable.push)
    add = _awaited(ParameterTable.add)
    assign = _awaited(ParameterTable.assign)
    remove = _awaited(ParameterTable.remove)
    contains = _awaited(ParameterTable.contains)
    ids = _awaited(ParameterTable.ids)
    pull_changed = _awaited(ParameterTable.pull_changed)
    to_dask_array = _awaited(ParameterTable.to_dask_array)
    __len__ = _plain(ParameterTable.__len__)

class _Parameter(AsyncParameterArray, AsyncParameterTable):
    nbytes: _Fact[Any]
    # An array's verbs and a table's take other arguments: none overrides both.
    @_either(ParameterArray.pull, ParameterTable.pull)
    def pull(self) -> None: ...  # type: ignore[override]
    @_either(ParameterArray.push, ParameterTable.push)
    def push(self) -> None: ...  # type: ignore[override]
    @_either(ParameterArray.add, ParameterTable.add)
    def add(self) -> None: ...  # type: ignore[override]
    @_either(ParameterArray.assign, ParameterTable.assign)
    def assign(self) -> None: ...  # type: ignore[override]

class AsyncParameterStore:
    uid: _Fact[str]
    name: _Fact[str]
    layout: _Fact[Layout]
    names: _Fact[list[str]]
    placement: _Fact[tuple[str, ...]]
    device: _Fact[str | None]
    nbytes: _Fact[int]
    optimizer: _Fact[dict[str, str]]
    version: _Fact[_Later[int]]
    versions: _Fact[_Later[tuple[int, ...]]]
    bound: _Verb[[], Self]
    to_json = _plain(ParameterStore.to_json)
    visualize = _plain(ParameterStore.visualize)
    pull_async = _plain(ParameterStore.pull_async)
    push_async = _plain(ParameterStore.push_async)
    pull = _awaited(ParameterStore.pull)
    push = _awaited(ParameterStore.push)
    add = _awaited(ParameterStore.add)
    assign = _awaited(ParameterStore.assign)
    pushpull = _awaited(ParameterStore.pushpull)
    apply = _awaited(ParameterStore.apply)
    scale_lr = _awaited(ParameterStore.scale_lr)
    view = _awaited(ParameterStore.view)
    snapshot = _awaited(ParameterStore.snapshot)
    stats = _awaited(ParameterStore.stats)
    drain = _awaited(ParameterStore.drain)
    reshard = _awaited(ParameterStore.reshard)
    # Two results each, by their arguments.
    aggregate: _Verb[..., _Later[Any]]
    save: _Verb[..., _Later[Any]]
    close = _awaited(ParameterStore.close)
    delete = _awaited(ParameterStore.delete)
    __contains__ = _plain(ParameterStore.__contains__)
    __iter__ = _plain(ParameterStore.__iter__)
    __len__ = _plain(ParameterStore.__len__)
    def __init__(self, uid: str, name: str) -> None: ...
    def __getitem__(self, name: str) -> _Parameter: ...
    def replica(
        self, *, every: int = ..., elastic: float | None = ..., timeout: Any = ...
    ) -> _Later[AsyncReplica]: ...
    async def __aenter__(self) -> Self: ...
    async def __aexit__(self, *exc: object) -> None: ...

class AsyncReplica:
    params: _Fact[ReplicaParams]
    steps: _Fact[int]
    step = _awaited(Replica.step)
    sync = _awaited(Replica.sync)
    sync_async = _plain(Replica.sync_async)
    async def __aenter__(self) -> Self: ...
    async def __aexit__(self, *exc: object) -> None: ...

create = _opening(daskps.create)
open = _opening(daskps.open)  # noqa: A001 - as daskps.open
restore = _opening(daskps.restore)
delete = _asked(daskps.delete)
list_stores = _asked(daskps.list_stores)
predict = _given(daskps.predict)

def progress(
    store: AsyncParameterStore | str,
    *,
    client: Any = None,
    file: Any = None,
    timeout: Any = None,
) -> _Later[None]: ...

train = _trained(daskps.train)
run = _trained(daskps.run)
