"""The workers of a program, and what they do together; a program alone is one of one."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from daskps.compat import launch as base
from daskps.compat.behind import Behind, behind
from daskps.store.arguments import whole

if TYPE_CHECKING:
    from collections.abc import Callable

    from daskps.compat.launch import Participant
    from daskps.store.store import ParameterStore
    from daskps.typing import Array

_SYSTEM = "mxnet"


def launch(
    main: Callable[[], Any],
    n_workers: int,
    *,
    workers: Any = None,
    client: Any = None,
    timeout: Any = None,
) -> list[Any]:
    """Run a program in workers that share kvstores; here they are trainers.

    Parameters
    ----------
    main : callable
        ``main()``, which makes kvstores of the types "dist_sync" and "dist_async".
    n_workers : int
        How many.
    workers : str or iterable of str, optional
        Addresses of the Dask workers that run `main`; all by default.
    client : distributed.Client, optional
        The client; the current one by default.
    timeout : float, str or None
        Seconds or a duration for all of it; None for none.

    Returns
    -------
    list
        The results of `main`, by worker.

    Raises
    ------
    ValueError, TypeError
        For arguments that cannot be.
    Exception
        The error of `main`.

    Examples
    --------
    >>> from daskps.compat import mxnet
    >>> def main():
    ...     kv = mxnet.kvstore.create("dist_sync")
    ...     kv.init(3, np.zeros(2))
    ...     kv.push(3, np.full(2, kv.rank + 1.0))
    ...     out = np.empty(2)
    ...     kv.pull(3, out)
    ...     return out.tolist()
    >>> mxnet.launch(main, 2)
    [[3.0, 3.0], [3.0, 3.0]]
    """
    if not callable(main):
        raise TypeError(f"main is a function main(), found {main!r:.60}")
    parts = [None] * whole(n_workers, "n_workers", 1)
    body = partial(_work, main)
    return base.launch(
        _SYSTEM, body, parts, workers=workers, client=client, timeout=timeout
    )


def _work(main: Callable[[], Any], here: Participant, part: Any) -> Any:
    """Call the program of one worker, and wait for what it has pushed."""
    del part
    with behind("daskps-mxnet") as pushes:
        here.kept["pushes"] = pushes
        return main()


class Crew(Protocol):
    """The workers that use one kvstore."""

    rank: int
    size: int

    def push(self, act: Callable[[], Any]) -> None:
        """Carry out a push, maybe a little later."""

    def settle(self) -> None:
        """Wait for all pushes of this worker."""

    def meet(self) -> None:
        """Wait for all workers."""

    def gather(self, arrays: dict[str, Array]) -> tuple[dict[str, Array], Array]:
        """Return the sums of what all workers bring, and which of them are there."""

    def make_store(
        self, make: Callable[[str | None], ParameterStore], what: str
    ) -> ParameterStore:
        """Have one of them make a store, which all have then."""


class Together:
    """All workers of a launch.

    Parameters
    ----------
    here : Participant
        This one.
    """

    def __init__(self, here: Participant) -> None:
        self._here, self._pushes = here, here.kept["pushes"]
        self.rank, self.size = here.rank, here.size

    def push(self, act: Callable[[], Any]) -> None:
        """Carry out a push behind the program."""
        pushes: Behind = self._pushes
        pushes.do(act)

    def settle(self) -> None:
        """Wait for all pushes of this worker."""
        self._pushes.settle()

    def meet(self) -> None:
        """Wait for all workers that have not ended."""
        self._here.meet()

    def gather(self, arrays: dict[str, Array]) -> tuple[dict[str, Array], Array]:
        """Return the sums, and which workers have not ended."""
        return self._here.gather(arrays)

    def make_store(
        self, make: Callable[[str | None], ParameterStore], what: str
    ) -> ParameterStore:
        """Have worker 0 make a store."""
        return self._here.make_store(make, what)


class Solo:
    """A program without others, on a client or in a launch."""

    rank, size = 0, 1

    def push(self, act: Callable[[], Any]) -> None:
        """Carry out a push."""
        act()

    def settle(self) -> None:
        """Do nothing: all pushes are done."""

    def meet(self) -> None:
        """Do nothing: nobody else is there."""

    def gather(self, arrays: dict[str, Array]) -> tuple[dict[str, Array], Array]:
        """Return what there is."""
        return arrays, np.ones(1, bool)

    def make_store(
        self, make: Callable[[str | None], ParameterStore], what: str
    ) -> ParameterStore:
        """Make a store of one's own."""
        del what
        return make(base.name_of_ones_own())


def together() -> Together:
    """Return the workers of this launch.

    Raises
    ------
    RuntimeError
        Outside of one.
    """
    return Together(base.here(_SYSTEM))


def told(crew: Crew, error: Exception | None, what: str) -> None:
    """Say whether it went well, and raise everywhere where it did not.

    Raises
    ------
    Exception
        The given error, or the one that the failed worker has met.
    """
    met, _ = crew.gather({what: base.pack_error(error)})
    if error is not None:
        raise error
    base.raise_packed(met[what], what)
