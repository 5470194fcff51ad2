"""Close and delete: the end of a handle, and with it maybe of its store."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Self

from daskps import config
from daskps.cluster.caller.scheduler_lost import scheduler_named
from daskps.errors import SchedulerLostError
from daskps.store.handle import DEFAULT, Handle, nothing
from daskps.store.usage_errors import why_shut


class Closable(Handle):
    """A handle that can be closed, by itself or at the end of a ``with``."""

    def close(self, *, timeout: Any = DEFAULT) -> None:
        """Free a session store, or detach from a named one.

        When this returns, the workers have freed a session store's memory, but for
        those that do not answer at once: there is room for the next store.

        Parameters
        ----------
        timeout : float, str or None
            Seconds or a duration such as "30s"; None waits for ever.

        Returns
        -------
        None
            With an asynchronous client an awaitable. Closing twice is fine.

        Raises
        ------
        TimeoutError
            If the directory does not answer; the handle is closed all the same.

        Examples
        --------
        >>> store = daskps.create({"w": np.zeros(2)})
        >>> store.close()
        >>> try:
        ...     store.pull()
        ... except daskps.StoreClosedError:
        ...     print("closed")
        closed
        """
        meta, link = self._meta_if_known(), self._link
        # Its client is gone, and took the session store along.
        is_gone = link is not None and not link.live
        if self._closed or is_gone or (meta is not None and not meta.session):
            self._shut("close")
            # The client may be closed, and its event loop with it.
            return nothing() if link is not None and link.asynchronous else None  # type: ignore[return-value]
        return self._end("close", timeout)

    def _shut(self, method: str) -> None:
        """Refuse all verbs from now on, and let go of the shards' memory.

        A mapping would keep what the owners free.
        """
        meta = self._meta_if_known()
        is_session = None if meta is None else meta.session
        self._closed = self._closed or why_shut(method, self.name, is_session)
        if self._link is not None:
            self._link.views.pop(meta.uid if meta else self.uid, None)
        if self._shards is not None:
            self._shards.close()

    def delete(self, *, timeout: Any = DEFAULT) -> None:
        """Free the store on all workers, even where others use it.

        Parameters
        ----------
        timeout : float, str or None
            Seconds or a duration such as "30s"; None waits for ever.

        Returns
        -------
        None
            With an asynchronous client an awaitable.

        Raises
        ------
        StoreNotFoundError, StoreClosedError, SchedulerLostError
            If it is gone already.

        Examples
        --------
        >>> store = daskps.create({"w": np.zeros(2)}, name="old")
        >>> store.delete()
        >>> "old" in [info.name for info in daskps.list_stores()]
        False
        """
        return self._end("delete", timeout)

    def _end(self, method: str, timeout: Any) -> None:
        seconds = config.deadline(timeout)
        link = self._bind()
        self._shut(method)
        # Waiting for a silent host is not what it times out by.
        wait = {} if seconds is None else {"wait_seconds": min(60, seconds / 2)}

        async def end() -> None:
            what = f"the {method} of {self.name!r}"
            try:
                if link.live:
                    work = partial(link.directory, method, uid=self.uid, **wait)
                    async with scheduler_named(link, what):
                        await link.within(work, seconds, what)
            except SchedulerLostError:
                if method == "delete":  # else it has come about by itself
                    raise
            finally:
                # Also where nobody answered: the workers go on with the request.
                # That of a handle that was pickled is with the client.
                if hold := self._hold or link.holds.get(self._origin):
                    hold.release()

        return link.run(end)

    def __enter__(self) -> Self:
        if self._link is not None and self._link.asynchronous:
            raise TypeError(
                f"store {self.name!r} belongs to an asynchronous client; use async "
                f"with, which can await its end"
            )
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    if not TYPE_CHECKING:  # see `daskps.aio`

        async def __aenter__(self) -> Self:
            return self

        async def __aexit__(self, *exc: object) -> None:
            await self.close()
