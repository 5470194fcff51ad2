"""What an asynchronous client gets from `create` and `open`: a store to await."""

from __future__ import annotations

import inspect
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Generator

    from daskps.store.store import ParameterStore

_AWAIT = (
    "this store is still being made by an asynchronous client; write "
    "store = await daskps.create(...), or async with daskps.create(...) as store"
)


class Opening(Coroutine[Any, Any, "ParameterStore"]):
    """A store under way: awaited it is the store, in ``async with`` it is closed too.

    Parameters
    ----------
    work : coroutine
        Returns the store.
    """

    def __init__(self, work: Coroutine[Any, Any, ParameterStore]) -> None:
        self._work = work
        self._store: ParameterStore | None = None

    def __await__(self) -> Generator[Any, None, ParameterStore]:
        return self._work.__await__()

    def send(self, value: Any) -> Any:
        """Go on, as a coroutine does."""
        return self._work.send(value)

    def throw(self, *error: Any) -> Any:
        """Go on with an error, as a coroutine does."""
        return self._work.throw(*error)

    def close(self) -> None:
        """Give up, as a coroutine does."""
        self._work.close()

    async def __aenter__(self) -> ParameterStore:
        self._store = await self._work
        return await self._store.__aenter__()

    async def __aexit__(self, *exc: object) -> None:
        if self._store is not None:
            await self._store.__aexit__(*exc)

    if not TYPE_CHECKING:

        def __enter__(self) -> Any:
            raise TypeError(_AWAIT)

        def __exit__(self, *exc: object) -> None: ...

        def __getitem__(self, name: str) -> Any:
            raise TypeError(_AWAIT)

        def __getattr__(self, name: str) -> Any:
            text = f"{type(self).__name__!r} object has no attribute {name!r}"
            if not name.startswith("_"):
                text += f": {_AWAIT}"
            raise AttributeError(text, name=name, obj=self)


def opening(found: Any) -> Any:
    """Return a store as it is, and the awaitable of one as an `Opening`."""
    return Opening(found) if inspect.iscoroutine(found) else found
