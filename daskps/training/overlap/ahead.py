"""The half of a trainer that does not wait: operations under way beside its loop."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from daskps import config
from daskps.backend import checked
from daskps.cluster.caller.device_arrays import put
from daskps.cluster.caller.routes import LOOK_LATER_NBYTES, FiniteCheck
from daskps.cluster.caller.trainer_step import TrainerStep
from daskps.cluster.protocol.deadline import Deadline
from daskps.errors import ClockError
from daskps.store import intake
from daskps.store.arguments import flag, number, whole
from daskps.store.intake import RepeatedGradients
from daskps.store.targets import (
    chosen_names,
    device_for,
    given_ids,
    pulled,
    target_of,
)
from daskps.training.row_ids import row_batches

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from daskps.cluster.caller.row_routes import RowBatch
    from daskps.cluster.caller.session import Session
    from daskps.cluster.caller.shard_map import StoreMap
    from daskps.cluster.caller.targets import Target
    from daskps.combination import Combination
    from daskps.training.overlap.background import Background, Operation
    from daskps.typing import Array


class _Begun(NamedTuple):
    """A read under way."""

    names: frozenset[str]
    #: Ids by the names of tables.
    rows: Mapping[str, Array]
    clock: int
    operation: Operation
    #: The device that it goes to.
    device: str = ""

    def is_for(
        self, names: list[str], rows: Mapping[str, Array], clock: int, device: str
    ) -> bool:
        """Return whether it reads what a pull at a clock asks for."""
        return (
            (self.clock, self.device) == (clock, device)
            and self.names == frozenset(names)
            and self.rows.keys() == rows.keys()
            and all(np.array_equal(ids, self.rows[name]) for name, ids in rows.items())
        )


class _Prefetch:
    """The read ahead of one trainer and the arrays it goes to.

    Parameters
    ----------
    meta : StoreMap
        The store.
    """

    def __init__(self, meta: StoreMap) -> None:
        self._meta = meta
        self._ahead: _Begun | None = None
        #: Arrays that no caller has, to be used again; rows are others each time.
        self._kept: dict[frozenset[str], Target] = {}

    def start(
        self,
        background: Background,
        names: Any,
        rows: Any,
        deadline: Deadline,
        *,
        device: str,
    ) -> None:
        """Begin to read; a read begun before is of no use any more."""
        chosen, ids = frozenset(chosen_names(self._meta, names)), {}
        targets: list[Target] = []
        if rows is not None:
            ids = given_ids(self._meta, rows)
            targets = pulled(self._meta, names, ids, None, device=device)
        elif device:
            targets = pulled(self._meta, sorted(chosen), None, None, device=device)
        elif kept := self._kept.get(chosen):
            targets = [kept]
        else:
            whole = len(chosen) == len(self._meta.layout.parameters)
            targets = [target_of(self._meta, None if whole else sorted(chosen), None)]
        self._ahead = None
        operation = background.read(targets, deadline)
        # It may be filled again while it still is: reads come one after the other.
        self._kept = {} if ids or device else {chosen: targets[0]}
        self._ahead = _Begun(chosen, ids, background.clock, operation, device)

    def drop(self) -> None:
        """Forget what was read: it is no longer what a pull would read."""
        self._ahead = None

    def take(
        self,
        names: Any,
        rows: Any,
        out: Mapping[str, Array] | None,
        clock: int,
        *,
        device: str,
    ) -> dict[str, Array] | None:
        """Return what was read ahead, if it is what a pull at this clock asks for."""
        if (ahead := self._ahead) is None:
            return None
        ids = {} if rows is None else given_ids(self._meta, rows)
        if names is None and out:
            names = [name for name in out if name not in ids]
        chosen = chosen_names(self._meta, names)
        if not ahead.is_for(chosen, ids, clock, device):
            return None
        # As any other pull it is refused for an `out` that does not fit.
        target = None if out is None else pulled(self._meta, names, rows, out)[-1]
        self._ahead = None
        if ahead.operation.exception() is not None:
            # Heard of before; the pull reads for itself.
            return None
        values = ahead.operation.result()
        if target is None:
            # They are the caller's now.
            self._kept.clear()
            return {name: values[name] for name in [*chosen, *ids]}
        found: dict[str, Array] = target.finish()
        for name, array in found.items():
            put(array, values[name])
        return found


class Ahead:
    """Pulls and pushes of a trainer that are carried out while its loop goes on.

    Parameters
    ----------
    session : Session
        Its place in the run.
    background : Background
        Carries out the operations that the loop does not wait for.
    chosen : Combination
        The options of the run.
    """

    def __init__(
        self,
        session: Session,
        background: Background,
        chosen: Combination,
    ) -> None:
        self._session, self._background = session, background
        self.rank = session.rank
        self.size = session.size
        self._finite = config.load().check_finite
        meta = session.meta
        #: The store, where gradients of its device may stay there.
        self._near = meta if meta.device and session.codec is None else None
        self._gradients = RepeatedGradients(
            meta.layout, meta.optimizers, finite=self._finite, near=self._near
        )
        self._chosen = chosen
        self._finished = False
        self._prefetch: _Prefetch | None = None

    @property
    def clock(self) -> int:
        """Ticks of this trainer since the run began.

        The tick of a `push_async` counts from the call on, unless it fails.
        """
        return self._background.clock

    def pull_async(
        self,
        names: str | Iterable[str] | None = None,
        *,
        rows: Mapping[str, Any] | None = None,
        out: Mapping[str, Array] | None = None,
        device: str | None = None,
        timeout: Any = None,
    ) -> Operation:
        """Start a pull and return its future.

        Operations of one trainer take effect in the order in which it issued them: a
        pull that was issued after a push with a tick reads the next clock.

        Parameters
        ----------
        names, rows, out, device
            As in :meth:`daskps.ParameterStore.pull`. `out` belongs to the pull until
            it is done.
        timeout : float, str or None
            Seconds from now or a duration such as "30s"; None waits until the run
            ends.

        Returns
        -------
        Future
            Like one of `concurrent.futures`, and awaitable; it cannot be cancelled.
            It raises the errors of :meth:`pull`. Where one operation fails, those
            issued after it fail with the same error and are not carried out; where
            nobody asks a future for it, the trainer's next call raises it. A callback
            runs in the thread that carries out the operations: it may issue more, but
            waiting for one raises RuntimeError.

        Raises
        ------
        UnknownParameterError, ValueError, TypeError
            For names, ids or an `out` that do not fit.

        Examples
        --------
        >>> def loop(trainer, part):
        ...     future = trainer.pull_async("w")
        ...     square = part**2  # meanwhile
        ...     return future.result()["w"] + square
        >>> store = daskps.create({"w": np.arange(2.0)})
        >>> daskps.run(store, loop, [3])
        [array([ 9., 10.])]
        """
        deadline = self._deadline(timeout, "a pull")
        meta = self._session.meta
        ids = None if rows is None else given_ids(meta, rows)
        where = device_for(device, out)
        targets = pulled(meta, names, ids, out, device=where)
        return self._background.read(targets, deadline)

    def push_async(
        self,
        grads: Mapping[str, Any],
        *,
        weight: float = 1.0,
        tick: bool = True,
        priority: int = 0,
        copy: bool = True,
        timeout: Any = None,
    ) -> Operation:
        """Start a push and return its future.

        This call checks the gradients and raises what is wrong before it returns.

        Parameters
        ----------
        grads, weight, tick
            As in :meth:`push`.
        priority : int
            Among pushes without a tick that wait side by side the one with the higher
            priority is sent first; pushes of the same parameter keep their order. It
            changes when something travels, never at which clock it counts.
        copy : bool
            Whether the arrays are copied before this returns, and are the caller's
            again. False gives them to the push until it is done: a change of theirs
            before then may change what is sent.
        timeout : float, str or None
            Seconds from now or a duration such as "30s"; None waits until the run
            ends.

        Returns
        -------
        Future
            Like one of `concurrent.futures`, and awaitable; it cannot be cancelled.
            Its result is the Version of :meth:`push`; errors as in
            :meth:`pull_async`. After an error the clock is what was accepted.

        Raises
        ------
        PushRejectedError, UnknownParameterError, NoOptimizerError
            Nothing was changed and the clock stays.

        Examples
        --------
        Each layer's gradient is on its way while the next one is computed; the
        gradient that the next step needs first goes first:

        >>> def loop(trainer, part):
        ...     for layer, name in enumerate(["w2", "w1"]):
        ...         grad = np.full(2, float(layer))  # computed here
        ...         trainer.push_async({name: grad}, tick=False, priority=layer)
        ...     trainer.tick()
        ...     return trainer.pull()
        >>> params = {"w1": np.zeros(2), "w2": np.zeros(2)}
        >>> store = daskps.create(params, optimizer=daskps.optim.SGD(1.0))
        >>> daskps.run(store, loop, [None])
        [{'w1': array([-1., -1.]), 'w2': array([0., 0.])}]
        """
        deadline, ends = self._deadline(timeout, "a push"), flag(tick, "tick")
        given = self._checked_step(grads, weight)
        first = whole(priority, "priority")
        if copy is True or flag(copy, "copy"):
            given = given.copied()
        self._overtaken()
        brings = {*given.arrays, *(one.split.table.index for one in given.rows)}
        return self._background.submit(
            partial(self._session.deliver, given, tick=ends),
            deadline,
            tick=ends,
            passing=None if ends else frozenset(brings),
            priority=first,
        )

    def prefetch(
        self,
        names: str | Iterable[str] | None = None,
        *,
        rows: Mapping[str, Any] | None = None,
        device: str | None = None,
        timeout: Any = None,
    ) -> None:
        """Start to read what the next `pull` of the same names and rows will return.

        That pull waits for the rest of the read, if anything is left of it, and hands
        over what was read, or copies it to `out`. It is used only at the clock at
        which it was issued, and only by a pull of the same names and ids. Under BSP it
        is what any pull at that clock reads. Under SSP and ASP it is as old as this
        call, permitted at this clock; a push, a tick or a barrier after it makes it
        void, so that a trainer always finds its own steps. A pull with ``copy=False``
        looks at the shards itself and leaves it.

        Parameters
        ----------
        names : str or iterable of str, optional
            Names of parameters; all by default.
        rows : mapping of str to array_like of int, optional
            Ids of rows by the names of tables, as in
            :meth:`daskps.ParameterStore.pull`.
        device : str, optional
            That of the pull.
        timeout : float, str or None
            Seconds from now or a duration such as "30s"; None waits until the run
            ends. As any other error, a TimeoutError is raised by the next call.

        Raises
        ------
        UnknownParameterError, ValueError, TypeError
            For names or ids that do not fit. All other errors are raised by the next
            call.

        Examples
        --------
        >>> def loop(trainer, part):
        ...     out = trainer.pull()
        ...     for step in range(2):
        ...         trainer.push_async({"w": out["w"] - part})
        ...         trainer.prefetch()
        ...         batch = step + 1  # made ready here
        ...         trainer.pull(out=out)
        ...     return out["w"]
        >>> store = daskps.create({"w": np.zeros(1)}, optimizer=daskps.optim.SGD(1.0))
        >>> daskps.run(store, loop, [np.array([1.0]), np.array([3.0])])
        [array([2.]), array([2.])]
        """
        deadline = self._deadline(timeout, "a prefetch")
        if self._prefetch is None:
            self._prefetch = _Prefetch(self._session.meta)
        where = checked(device)
        self._prefetch.start(self._background, names, rows, deadline, device=where)

    # -- for the verbs that wait ---------------------------------------------

    def _wait_background(self, timeout: Any, what: str) -> float | None:
        """Wait for all that was issued before; return the seconds that are left."""
        seconds = None if timeout is None else config.deadline(timeout)
        return self._background.settle(seconds, what)

    def _overtaken(self) -> None:
        """Drop a read ahead that a pull would no longer get; its clock may say so."""
        if self._prefetch is not None and not self._session.bsp:
            self._prefetch.drop()

    def _checked_step(self, grads: Mapping[str, Any], weight: float) -> TrainerStep:
        """Return gradients as they are sent, or refuse them."""
        if self._finished:
            self._live()
        rows: Sequence[RowBatch] = ()
        meta = self._session.meta
        if meta.layout.tables:
            grads, named = intake.parted(meta.layout, grads)
            rows = row_batches(meta, named, self._chosen, finite=self._finite)
        arrays = self._gradients.take(grads)
        if type(weight) is not float or weight != 1.0:
            weight = number(weight, "weight", least=0.0)
        return TrainerStep(arrays, weight, rows) if weight else TrainerStep({}, weight)

    def _to_deliver(
        self, grads: Mapping[str, Any], weight: float, tick: bool, timeout: Any
    ) -> TrainerStep:
        """As :meth:`_checked_step`; the owner may look at the numbers of large gradients.

        Only where nothing comes between that a refused push would leave undone.
        """
        session = self._session
        if not (
            self._finite
            and tick
            and timeout is None
            and type(weight) is float
            and weight == 1.0
            and session.looks_later
            and self._near is None
            and self._prefetch is None
            and self._background.quiet
            and not self._finished
        ):
            return self._checked_step(grads, weight)
        layout, optimizers = session.meta.layout, session.meta.optimizers
        if layout.tables and intake.parted(layout, grads)[1]:
            return self._checked_step(grads, weight)
        try:
            found = intake.gradients(layout, optimizers, grads, finite=False)
        except Exception:  # noqa: BLE001  (an array before it may have NaN)
            return self._checked_step(grads, weight)
        look = FiniteCheck(partial(intake.look, layout, found))
        if sum(array.nbytes for array in found.values()) < LOOK_LATER_NBYTES:
            look()
        return TrainerStep(found, weight, look=look)

    def _live(self) -> Session:
        """Return the session, unless nobody waits for this trainer any more."""
        if self._finished:
            raise ClockError(
                f"trainer {self.rank} has finished at clock {self.clock} and takes no "
                f"more steps; call finish() after the last one"
            )
        return self._session

    def _deadline(self, timeout: Any, what: str) -> Deadline:
        where = f"{what} of trainer {self.rank} at clock {self.clock}"
        return Deadline(config.deadline(timeout), where)
