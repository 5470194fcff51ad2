"""Arrays by key: `create` makes a kvstore of one program, or of all workers of a launch.

Examples
--------
>>> from daskps.compat import mxnet
>>> kv = mxnet.kvstore.create("local")
>>> kv.init("w", np.zeros(2))
>>> kv.push("w", np.ones(2))
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from daskps import optim
from daskps.cluster.caller.link import blocking_link
from daskps.codecs import TwoBit
from daskps.compat.mxnet.keys import (
    arrays_of,
    copied,
    outs_of,
    per_key,
    row_ids_of,
)
from daskps.compat.mxnet.stores import KeyStores
from daskps.compat.mxnet.updaters import rule_of
from daskps.compat.mxnet.workers import Solo, together, told
from daskps.errors import NoOptimizerError
from daskps.store.arguments import flag, whole

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from daskps.typing import Array

__all__ = ["KVStore", "create"]

TYPES = (
    "local",
    "device",
    "dist_sync",
    "dist_device_sync",
    "dist_sync_device",
    "dist_async",
    "dist_async_device",
)


def create(name: str = "local", *, client: Any = None) -> KVStore:
    """Make a kvstore.

    Parameters
    ----------
    name : str
        "local" and "device", which are the same here, are of one program. In "dist_sync"
        a push waits at the store for those of all workers, whose sum is one update; in
        "dist_async" each push is one on arrival. These two are made by all workers of a
        :func:`daskps.compat.mxnet.launch`, in the same order. "dist_device_sync" and
        "dist_sync_device" are "dist_sync" here, and "dist_async_device" is "dist_async":
        all sums are made in main memory.
    client : distributed.Client, optional
        Of "local" and "device" outside of a launch; the current one by default.

    Returns
    -------
    KVStore
        The kvstore.

    Raises
    ------
    ValueError, TypeError
        For another name, a client where a launch has its own, and an asynchronous one.
    RuntimeError
        For a "dist" type outside of a launch.

    Examples
    --------
    >>> from daskps.compat import mxnet
    >>> mxnet.kvstore.create("device").type
    'device'
    """
    if not isinstance(name, str):
        raise TypeError(f"name is one of {', '.join(TYPES)}, found {name!r:.60}")
    if name not in TYPES:
        raise ValueError(f"name is one of {', '.join(TYPES)}, found {name!r:.60}")
    if not name.startswith("dist"):
        blocking_link("a kvstore waits for its store", client)
        return KVStore(name, Solo(), client)
    if client is not None:
        raise ValueError(
            f"{name} is of a launch, and so is its client; leave client= out"
        )
    return KVStore(name, together(), None)


class KVStore(KeyStores):
    """Arrays by key; `create` makes it.

    Keys are ints or strings, and not both. Where lists of keys are taken, values and
    outputs are lists as long. A value may be a list of arrays too, one for each device:
    they are summed; an output may be a list of arrays, which all get the same.

    Parameters
    ----------
    kind : str
        Its type.
    crew : Crew
        The workers that use it.
    client : distributed.Client, optional
        The client that makes its stores.

    Examples
    --------
    >>> from daskps.compat import mxnet
    >>> kv = mxnet.kvstore.create("local")
    >>> kv.set_optimizer(daskps.optim.SGD(0.1))
    >>> kv.init([3, 5], [np.ones(2), np.zeros(2)])
    >>> kv.push(3, np.ones(2))
    >>> out = [np.empty(2), np.empty(2)]
    >>> kv.pull([3, 5], out)
    >>> out
    [array([0.9, 0.9]), array([0., 0.])]
    """

    def __repr__(self) -> str:
        return (
            f"<daskps.compat.mxnet.kvstore.KVStore {self._kind!r}: {len(self._keys)} keys, worker "
            f"{self.rank} of {self.num_workers}>"
        )

    @property
    def type(self) -> str:
        """The name that it was created by."""
        return self._kind

    @property
    def rank(self) -> int:
        """Number of this worker, from 0."""
        return self._crew.rank

    @property
    def num_workers(self) -> int:
        """How many workers there are."""
        return self._crew.size

    @staticmethod
    def is_capable(capability: str) -> bool:
        """Return whether kvstores can do something.

        Parameters
        ----------
        capability : {"optimizer"}
            Whether an optimizer can be set, which then makes the new values of pushes.

        Returns
        -------
        bool
            True, of all types.

        Raises
        ------
        ValueError
            For another word.
        """
        if str(capability).lower() != "optimizer":
            raise ValueError(f"a capability is 'optimizer', found {capability!r:.60}")
        return True

    def barrier(self) -> None:
        """Wait for all workers that have not ended; what this one pushed is there then.

        Raises
        ------
        RunCancelledError, ShardLostError
            For what its name says.
        """
        self._crew.settle()
        self._crew.meet()

    def init(self, key: Any, value: Any) -> None:
        """Begin keys; once for each, by all workers.

        Parameters
        ----------
        key : int, str or list of them
            New ones.
        value : array_like or list of it
            The first values: worker 0's count.

        Raises
        ------
        ValueError, TypeError
            For keys that there are, or are of another type, and what are no arrays.
        """
        names = self._keys.new(key)
        arrays = dict(zip(names, arrays_of(value, names, key), strict=True))
        self._crew.settle()
        shown = ", ".join(f"{n}: {a.dtype} {a.shape}" for n, a in arrays.items())
        store = self._crew.make_store(partial(self._make, arrays), f"keys {shown}")
        self._keys.add(names, len(self._stores))
        self._stores.append(store)

    def push(self, key: Any, value: Any, priority: int = 0) -> None:
        """Add to what is stored, by the optimizer or updater, or replace it by the sum.

        It returns before that is done; this worker's pulls come after it.

        Parameters
        ----------
        key : int, str or list of them
            Keys; of "dist_sync" all workers push the same ones in the same order.
        value : array_like, or list of it, one for each device
            For a list of keys a list of those. Copied.
        priority : int
            Taken from programs for MXNet, where it is a hint what goes first. It has no
            effect here: all calls take effect in the order in which they are made, as
            "dist_sync" needs it, whose workers meet at each push.

        Raises
        ------
        NoOptimizerError
            Of "dist_async", which replaces nothing.
        ValueError, TypeError
            For unknown keys and what are no arrays of their shape.
        """
        whole(priority, "priority")
        if "_async" in self._kind and self._rule is None:
            raise NoOptimizerError(
                f"a kvstore of type {self._kind} needs set_optimizer or set_updater before a "
                "push: workers would replace each other's values"
            )
        names = self._keys.known(key)
        for name, given in zip(names, per_key(value, names, key), strict=True):
            store = self._store_of(name)
            at = store[name]
            total = copied(given, name, at.shape, at.dtype)
            self._crew.push(partial(self._deliver, store, name, total))

    def pull(
        self, key: Any, out: Any, priority: int = 0, ignore_sparse: bool = True
    ) -> None:
        """Read keys.

        Parameters
        ----------
        key : int, str or list of them
            Keys.
        out : ndarray or list of it
            Takes the values, in its own dtype; for a list of keys a list of those.
        priority : int
            Without an effect, as in :meth:`push`.
        ignore_sparse : bool
            Whether keys with row-sparse outputs are left out. There are none: outputs are
            NumPy's, so all keys are read in both cases.

        Raises
        ------
        ValueError, TypeError
            For unknown keys, arrays of another shape, and of several keys those that
            share memory.
        """
        whole(priority, "priority")
        flag(ignore_sparse, "ignore_sparse")
        names = self._keys.known(key)
        outs = outs_of(out, names, key, self._shapes(names))
        self._crew.settle()
        for name, takers in zip(names, outs, strict=True):
            found = self._store_of(name)[name].pull(timeout=None)
            for taker in takers:
                taker[...] = found

    def pushpull(
        self, key: Any, value: Any, out: Any = None, priority: int = 0
    ) -> None:
        """Push, then pull.

        Parameters
        ----------
        key, value
            As in :meth:`push`.
        out : ndarray or list of it, optional
            As in :meth:`pull`; by default `value` takes it.
        priority : int
            Without an effect, as in :meth:`push`.

        Raises
        ------
        NoOptimizerError, ValueError, TypeError
            As in the two.
        """
        out = value if out is None else out
        names = self._keys.known(key)
        outs_of(out, names, key, self._shapes(names))
        self.push(key, value, priority)
        self.pull(key, out)

    def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> None:
        """Begin keys, and read what worker 0 has given; once for each.

        Parameters
        ----------
        key, value
            As in :meth:`init`.
        out : ndarray or list of it
            As in :meth:`pull`.
        priority : int
            Without an effect, as in :meth:`push`.

        Raises
        ------
        ValueError, TypeError
            As in the two.
        """
        whole(priority, "priority")
        names = self._keys.new(key)
        arrays = arrays_of(value, names, key)
        outs_of(out, names, key, [array.shape for array in arrays])
        self.init(key, value)
        self.pull(key, out)

    def row_sparse_pull(
        self, key: Any, out: Any, priority: int = 0, row_ids: Any = None
    ) -> None:
        """Read some rows; the others of `out` are 0.

        Parameters
        ----------
        key : int, str or list of them
            Keys of arrays of one axis or more.
        out : ndarray or list of it
            Of the whole array's shape.
        priority : int
            Without an effect, as in :meth:`push`.
        row_ids : array_like of int, or for a list of keys a list of it
            The rows, in any order, more than once or none at all.

        Raises
        ------
        ValueError, TypeError, IndexError
            For unknown keys, arrays of another shape and rows that there are not.
        """
        whole(priority, "priority")
        names = self._keys.known(key)
        shapes = self._shapes(names)
        outs = outs_of(out, names, key, shapes)
        wanted = row_ids_of(row_ids, names, key, shapes)
        self._crew.settle()
        for name, takers, ids in zip(names, outs, wanted, strict=True):
            rows = self._store_of(name)[name][ids] if ids.size else None
            for taker in takers:
                taker[...] = 0
                if rows is not None:
                    taker[ids] = rows

    def set_optimizer(self, optimizer: optim.Rule) -> None:
        """Have pushes be gradients of an optimizer, beside the values; by all workers.

        Parameters
        ----------
        optimizer : Rule
            One of :mod:`daskps.optim`. Its state begins anew.

        Raises
        ------
        TypeError
            For what is none.
        """
        if not isinstance(optimizer, optim.Rule):
            raise TypeError(
                f"optimizer is a rule of daskps.optim, found {optimizer!r:.60}"
            )
        self._set_rule(optimizer)

    def set_updater(self, updater: Callable[[Any, Array, Array], Any]) -> None:
        """Have a function make the new values, where they are stored; by all workers.

        Parameters
        ----------
        updater : callable
            ``updater(key, received, stored)`` changes `stored` in place, or returns the
            new value. Each array is kept whole for it.

        Raises
        ------
        TypeError
            For what cannot be called.
        """
        if not callable(updater):
            raise TypeError(
                f"updater is a function (key, received, stored), found {updater!r:.60}"
            )
        self._set_rule(rule_of(updater))

    def set_gradient_compression(self, compression_params: Mapping[str, Any]) -> None:
        """Push two bits of each number, and keep what they do not say for the next push.

        Parameters
        ----------
        compression_params : mapping
            ``{"type": "2bit", "threshold": 0.5}``, which is the default threshold.

        Raises
        ------
        ValueError, TypeError
            For another type or a threshold that is not above 0, and for a kvstore whose
            pushes no worker gathers.
        """
        given = dict(compression_params)
        if given.pop("type", None) != "2bit" or set(given) - {"threshold"}:
            raise ValueError(
                f'compression_params are {{"type": "2bit", "threshold": 0.5}}, found '
                f"{compression_params!r:.80}"
            )
        codec = TwoBit(given.get("threshold", 0.5))
        if "_sync" not in self._kind:
            raise ValueError(
                f"gradients are compressed in a kvstore of type dist_sync, not {self._kind}"
            )
        self._codec, self._left = codec, {}

    def save_optimizer_states(self, fname: Any) -> None:
        """Write the state of the optimizer, by all workers.

        Parameters
        ----------
        fname : str or path-like
            A folder, which all Dask workers reach; the values are in it too.

        Raises
        ------
        NoOptimizerError
            Without one.
        CheckpointError
            Where it cannot be written.
        """
        self._check_rule()
        self.barrier()
        error: Exception | None = None
        if self.rank == 0:
            try:
                for number, store in enumerate(self._stores):
                    store.save(f"{fname}/{number}", timeout=None)
            except Exception as failed:  # noqa: BLE001 - raised again by all
                error = failed
        told(self._crew, error, "save_optimizer_states")

    def load_optimizer_states(self, fname: Any) -> None:
        """Go on with a state that was saved, by all workers; values stay as they are.

        Parameters
        ----------
        fname : str or path-like
            The file it was saved to, with the same keys, begun in the same order.

        Raises
        ------
        NoOptimizerError
            Without one.
        CheckpointError, LayoutError
            Where it cannot be read, or has other keys.
        """
        self._check_rule()
        self._replace(lambda i, values: partial(self._restore, f"{fname}/{i}", values))
