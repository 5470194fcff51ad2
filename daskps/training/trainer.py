"""The trainer of a training loop: its place among the others, and its verbs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from daskps.cluster.caller.trainer_step import NO_MORE
from daskps.store.arguments import flag
from daskps.store.targets import (
    chosen_names,
    device_for,
    pulled,
    sign_of,
    target_of,
)
from daskps.training.verbs import Verbs

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from daskps.cluster.caller.targets import Target
    from daskps.typing import Array
    from daskps.version import Version


class Trainer(Verbs):
    """One trainer of a run; `run` and `train` make it.

    A step is what a trainer does between two ticks of its clock. It takes one call of
    every host of the store, without a message on one machine. Calls wait for ever by
    default: when the run is cancelled they raise :class:`daskps.RunCancelledError`.

    `push_async`, `pull_async` and `prefetch` return at once; one thread carries out
    what they issue, in that order, while the loop computes. Calls that wait come
    after all that was issued before, and so does the end of the loop.

    Parameters
    ----------
    session : Session
        Its place in the run.
    background : Background
        Carries out the operations that the loop does not wait for.
    chosen : Combination
        The options of the run.

    Attributes
    ----------
    rank : int
        Number of this trainer, from 0.
    size : int
        Number of trainers.

    Examples
    --------
    >>> def loop(trainer, part):
    ...     for _ in range(2):
    ...         w = trainer.pull()["w"]
    ...         trainer.push({"w": w - part})
    ...     return repr(trainer)
    >>> store = daskps.create({"w": np.zeros(1)}, optimizer=daskps.optim.SGD(1.0))
    >>> for line in daskps.run(store, loop, [np.array([1.0]), np.array([3.0])]):
    ...     print(line)
    <daskps.Trainer 0 of 2 at clock 2 of store 'session-...'>
    <daskps.Trainer 1 of 2 at clock 2 of store 'session-...'>
    """

    def pull(
        self,
        names: str | Iterable[str] | None = None,
        *,
        rows: Mapping[str, Any] | None = None,
        out: Mapping[str, Array] | None = None,
        copy: bool = True,
        device: str | None = None,
        timeout: Any = None,
    ) -> dict[str, Array]:
        """Read parameters and rows, waiting for what the run's policy demands.

        Under BSP these are exactly the parameters after the last complete round;
        under SSP the call waits for live trainers that are too many clocks behind.

        Parameters
        ----------
        names, rows, out
            As in :meth:`daskps.ParameterStore.pull`.
        copy : bool
            False avoids copies where nothing can write under a reader: under BSP a
            parameter that lies in one shard of this machine comes as a read-only
            view of the shard's memory, which stays as it is until this trainer has
            ticked twice or finished. All others are copied, and so are rows. Not
            together with `out`.
        device : str, optional
            The device of this process that the parameters go to, as in
            :meth:`daskps.ParameterStore.pull`. Not with `out`, nor with ``copy=False``.
        timeout : float, str or None
            Seconds or a duration such as "30s"; None waits until the run ends.

        Returns
        -------
        dict of str to ndarray
            The parameters, and the rows that were asked for.

        Raises
        ------
        RunCancelledError, ShardLostError, TimeoutError
            For what its name says.
        ValueError, TypeError
            For `copy=False` with `out`, for a `copy` that is no bool, and for ids that
            a table does not have.

        Examples
        --------
        >>> store = daskps.create({"w": np.arange(2.0)})
        >>> daskps.run(store, lambda trainer, part: trainer.pull("w")["w"], [None])
        [array([0., 1.])]
        """
        where = "" if device is None else device_for(device, out)
        if where and copy is not True:
            raise ValueError("a pull to a device= makes new arrays; leave copy= out")
        if copy is not True and not flag(copy, "copy"):
            return self._viewed(names, rows, out, timeout)
        seconds = None
        if timeout is not None or self._background.is_used:
            seconds = self._wait_background(timeout, "a pull")
        if self._prefetch is not None:
            now = self.clock
            ahead = self._prefetch.take(names, rows, out, now, device=where)
            if ahead is not None:
                return ahead
        if rows is not None:
            targets = pulled(self._session.meta, names, rows, out, device=where)
            self._session.read_all(targets, seconds)
            of_rows: dict[str, Array] = targets[-1].finish()
            return of_rows
        reads = self._session.reads
        found: dict[str, Array] | None = None
        if out is not None and seconds is None:
            found = reads.read(names, out, self._session.clock)
        if found is None:
            target = target_of(self._session.meta, names, out, where)
            self._session.read(target, seconds)
            if out is not None:
                reads.learn(names, out, target)
            found = target.finish()
        return found

    def _viewed(
        self, names: Any, rows: Any, out: Any, timeout: Any
    ) -> dict[str, Array]:
        """Pull without a copy where that is possible, else with one."""
        if out is not None:
            raise ValueError(
                "copy=False avoids the copy that out= asks for; give one of the two"
            )
        seconds = self._wait_background(timeout, "a pull")
        session = self._session
        chosen = chosen_names(session.meta, names)
        seen = session.reads.views(chosen, session.clock)
        if late := session.reads.late(chosen, seen):
            # A copy to wait for the round would be as large as what is seen then.
            session.read(sign_of(session.meta, late), seconds)
            seen = session.reads.views(chosen, session.clock)
        rest = [name for name in chosen if name not in seen]
        if rest or rows is not None:
            targets = pulled(session.meta, rest, rows, None)
            session.read_all(targets, seconds)
            seen |= targets[-1].finish()
        return {name: seen[name] for name in [*chosen, *(rows or ())]}

    def push(
        self,
        grads: Mapping[str, Any],
        *,
        weight: float = 1.0,
        tick: bool = True,
        timeout: Any = None,
    ) -> Version:
        """Deliver gradients; returns when they are accepted.

        Under BSP the weights change when the last trainer has delivered to the round: until
        then the version is still that of the round before.

        Parameters
        ----------
        grads : mapping
            Name to gradient, of the parameter's shape, or for rows of a table to a
            :class:`daskps.RowGrad`; may be nested.
        weight : float
            Weight of this contribution in the mean of its round; 0 sits the round
            out. Under SSP and ASP it multiplies the gradient.
        tick : bool
            Whether this ends the step. Under BSP pushes without a tick join the one
            that ticks: the same name is summed, its weight counts.
        timeout : float, str or None
            Seconds or a duration such as "30s"; None waits until the run ends.

        Returns
        -------
        Version
            The version that each shard is at.

        Raises
        ------
        PushRejectedError, UnknownParameterError, NoOptimizerError
            Nothing was changed and the clock stays.
        RunCancelledError, ShardLostError
            For what its name says. The death of a shard's worker is none where others can
            map its memory: what was accepted stays, and pushes of a BSP step that has not
            ticked are sent again.
        TimeoutError
            Each shard took it once or not at all, and the clock stays. Under BSP, push
            again: with a tick, a shard that took it keeps it and takes no other for
            this clock; without, it counts only if it is pushed again. Under SSP and
            ASP it is a push of its own: pushed again, it counts twice where it was
            taken.

        Examples
        --------
        >>> def loop(trainer, part):
        ...     return int(trainer.push({"w": part})), trainer.clock
        >>> store = daskps.create({"w": np.zeros(2)}, optimizer=daskps.optim.SGD(1.0))
        >>> daskps.run(store, loop, [np.array([1.0, 2.0])])
        [(1, 1)]
        >>> store["w"].pull()
        array([-1., -2.])
        """
        if tick is not True:
            tick = flag(tick, "tick")
        return self._deliver(grads, weight, timeout, tick=tick)

    def pushpull(
        self,
        grads: Mapping[str, Any],
        *,
        weight: float = 1.0,
        rows: Mapping[str, Any] | None = None,
        out: Mapping[str, Array] | None = None,
        device: str | None = None,
        timeout: Any = None,
    ) -> dict[str, Array]:
        """Push with a tick, then pull, in one call of each host.

        Parameters
        ----------
        grads, weight
            As in :meth:`push`.
        rows, out, device
            As in :meth:`daskps.ParameterStore.pull`; rows need not be those that are
            pushed.
        timeout : float, str or None
            Seconds or a duration such as "30s"; None waits until the run ends.

        Returns
        -------
        dict of str to ndarray
            The parameters after this step, and the rows that were asked for.

        Raises
        ------
        PushRejectedError, RunCancelledError, ShardLostError, TimeoutError
            As in :meth:`push`.

        Examples
        --------
        >>> def loop(trainer, part):
        ...     return trainer.pushpull({"w": part})["w"]
        >>> store = daskps.create({"w": np.zeros(1)}, optimizer=daskps.optim.SGD(1.0))
        >>> daskps.run(store, loop, [np.array([1.0]), np.array([3.0])])
        [array([-2.]), array([-2.])]
        """
        reads, rest = self._session.reads, []
        target = reads.target(None, out) if out is not None and rows is None else None
        if target is None:
            where = "" if device is None else device_for(device, out)
            target, *rest = pulled(self._session.meta, None, rows, out, device=where)
            if out is not None and rows is None:
                reads.learn(None, out, target)
        self._deliver(grads, weight, timeout, target=target)
        if rest:  # of more rows than one call reads
            self._session.read_all(rest, None)
        found: dict[str, Array] = target.finish()
        return found

    def _deliver(
        self,
        grads: Mapping[str, Any],
        weight: float,
        timeout: Any,
        *,
        tick: bool = True,
        target: Target | None = None,
    ) -> Version:
        """Check a step and have the session deliver it; return the version."""
        # Under BSP gradients are looked at before they are added to others.
        if self._session.bsp:
            given = self._checked_step(grads, weight)
        else:
            given = self._to_deliver(grads, weight, tick, timeout)
        seconds = None
        if timeout is not None or self._background.is_used:
            seconds = self._wait_background(timeout, "a push")
        if self._prefetch is not None:
            self._overtaken()
        return self._session.deliver(given, seconds, tick=tick, target=target)

    def tick(self, *, timeout: Any = None) -> Version:
        """End a step that delivers nothing more.

        Parameters
        ----------
        timeout : float, str or None
            Seconds or a duration such as "30s"; None waits until the run ends.

        Returns
        -------
        Version
            The version that each shard is at.

        Raises
        ------
        ClockError
            If this trainer has finished.
        RunCancelledError, ShardLostError, TimeoutError
            As in :meth:`push`; after a TimeoutError the clock stays: tick again.

        Examples
        --------
        Two gradients, one step:

        >>> def loop(trainer, part):
        ...     trainer.push({"w": part}, tick=False)
        ...     trainer.push({"b": np.array(1.0)}, tick=False)
        ...     trainer.tick()
        ...     return trainer.clock
        >>> params = {"w": np.zeros(2), "b": 0.0}
        >>> store = daskps.create(params, optimizer=daskps.optim.SGD(1.0))
        >>> daskps.run(store, loop, [np.ones(2)])
        [1]
        >>> store.pull()
        {'w': array([-1., -1.]), 'b': array(-1.)}
        """
        session = self._live()
        seconds = self._wait_background(timeout, "a tick")
        self._overtaken()
        version: Version = session.deliver(NO_MORE, seconds)
        return version

    def barrier(self, *, timeout: Any = None) -> None:
        """Wait until every trainer that has not ended has called it as often.

        Clocks do not matter, and do not change. All that the trainers pushed before,
        `push_async` included, is in the parameters then, under every policy. It takes a
        message of each trainer to the scheduler.

        Where the run is resumable a trainer that was started again passes at once what
        its predecessor has passed at the same clock: let a resumable loop call it
        before the push that ends the step, as :meth:`allreduce`.

        Parameters
        ----------
        timeout : float, str or None
            Seconds or a duration such as "30s"; None waits until the run ends.

        Raises
        ------
        TimeoutError
            Naming the trainers that have not called it. The next call of this trainer
            is the same barrier.
        ClockError
            If this trainer has finished.
        ValueError
            Under BSP in a resumable run, where another trainer waits for it at another
            clock.
        RunCancelledError, ShardLostError
            For what its name says.

        Examples
        --------
        >>> def loop(trainer, part):
        ...     trainer.push({"w": part})
        ...     trainer.barrier()
        ...     return trainer.pull()["w"]
        >>> store = daskps.create({"w": np.zeros(1)}, optimizer=daskps.optim.SGD(1.0))
        >>> daskps.run(store, loop, [np.array([1.0]), np.array([3.0])], sync="asp")
        [array([-4.]), array([-4.])]
        """
        session = self._live()
        seconds = self._wait_background(timeout, "a barrier")
        self._overtaken()
        session.barrier(seconds)

    def finish(self) -> None:
        """Stop taking part: the others no longer wait for this trainer.

        Called when the loop returns; earlier calls are for loops that go on with
        something else. Calling it twice is fine.

        Raises
        ------
        RunCancelledError, ShardLostError
            For what its name says.

        Examples
        --------
        >>> def loop(trainer, part):
        ...     for _ in range(part):
        ...         trainer.push({"w": np.ones(1)})
        ...     trainer.finish()
        ...     return trainer.clock
        >>> store = daskps.create({"w": np.zeros(1)}, optimizer=daskps.optim.SGD(1.0))
        >>> daskps.run(store, loop, [1, 3])
        [1, 3]
        """
        if not self._finished:
            self._wait_background(None, "its end")
            self._overtaken()
            self._session.finish()
            self._finished = True

    def __repr__(self) -> str:
        return (
            f"<daskps.Trainer {self.rank} of {self.size} at clock {self.clock} of "
            f"store {self._session.meta.name!r}>"
        )
