"""What a training loop holds: its place among the trainers, and its verbs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from daskps import config, intake
from daskps.errors import ClockError
from daskps.targets import number, target_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from daskps.cluster.plans import Target
    from daskps.cluster.session import Session
    from daskps.version import Version

Array = np.ndarray[Any, np.dtype[Any]]


class Trainer:
    """One trainer of a run; `run` and `train` make it.

    A step is what a trainer does between two ticks of its clock. It sends one
    message to every host of the store. Calls wait for ever by default: when the run
    is cancelled they raise :class:`daskps.RunCancelledError`.

    Parameters
    ----------
    session : Session
        Its place in the run.

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
    >>> daskps.run(store, loop, [np.array([1.0]), np.array([3.0])])
    ['<daskps.Trainer 0 of 2 at clock 2>', '<daskps.Trainer 1 of 2 at clock 2>']
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self.rank = session.rank
        self.size = session.size
        self._finite = config.load().check_finite
        self._finished = False

    @property
    def clock(self) -> int:
        """Ticks of this trainer since the run began."""
        return self._session.clock

    def pull(
        self,
        names: str | Iterable[str] | None = None,
        *,
        out: Mapping[str, Array] | None = None,
        timeout: Any = None,
    ) -> dict[str, Array]:
        """Read parameters, waiting for what the run's policy demands.

        Under BSP these are exactly the parameters after the last complete round;
        under SSP the call waits for live trainers that are too many clocks behind.

        Parameters
        ----------
        names, out
            As in :meth:`daskps.ParameterStore.pull`.
        timeout : float, str or None
            Seconds or a duration such as "30s"; None waits until the run ends.

        Returns
        -------
        dict of str to ndarray
            The parameters.

        Raises
        ------
        RunCancelledError, ShardLostError, TimeoutError
            For what its name says.

        Examples
        --------
        >>> store = daskps.create({"w": np.arange(2.0)})
        >>> daskps.run(store, lambda trainer, part: trainer.pull("w")["w"], [None])
        [array([0., 1.])]
        """
        target = target_of(self._session.meta, names, out)
        self._session.read(target, config.deadline(timeout))
        found: dict[str, Array] = target.finish()
        return found

    def push(
        self,
        grads: Mapping[str, Any],
        *,
        weight: float = 1.0,
        tick: bool = True,
        timeout: Any = None,
    ) -> Version:
        """Deliver gradients; returns when they are accepted.

        Parameters
        ----------
        grads : mapping
            Name to gradient, of the parameter's shape; may be nested.
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
            What the shards are at.

        Raises
        ------
        PushRejectedError, UnknownParameterError, NoOptimizerError
            Nothing was changed and the clock stays.
        RunCancelledError, ShardLostError
            For what its name says.
        TimeoutError
            Each shard took it once or not at all and the clock stays: push again.
            Under BSP a shard that took it keeps it and takes no other for this clock.

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
        version: Version = self._deliver(grads, weight, timeout, tick=tick)
        return version

    def pushpull(
        self,
        grads: Mapping[str, Any],
        *,
        weight: float = 1.0,
        out: Mapping[str, Array] | None = None,
        timeout: Any = None,
    ) -> dict[str, Array]:
        """Push with a tick, then pull, in one message to each host.

        Parameters
        ----------
        grads, weight
            As in :meth:`push`.
        out : mapping of str to ndarray, optional
            As in :meth:`daskps.ParameterStore.pull`.
        timeout : float, str or None
            Seconds or a duration such as "30s"; None waits until the run ends.

        Returns
        -------
        dict of str to ndarray
            The parameters after this step.

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
        target = target_of(self._session.meta, None, out)
        self._deliver(grads, weight, timeout, target=target)
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
    ) -> Any:
        meta = self._live().meta
        arrays = intake.gradients(
            meta.layout, meta.optimizers, grads, finite=self._finite
        )
        return self._session.deliver(
            arrays if weight else {},
            config.deadline(timeout),
            weight=number(weight, "weight", least=0.0),
            tick=tick,
            target=target,
        )

    def _live(self) -> Session:
        """Return the session, unless nobody waits for this trainer any more."""
        if self._finished:
            raise ClockError(
                f"trainer {self.rank} has finished at clock {self.clock} and takes no "
                f"more steps; call finish() after the last one"
            )
        return self._session

    def tick(self, *, timeout: Any = None) -> Version:
        """End a step that delivers nothing more.

        Parameters
        ----------
        timeout : float, str or None
            Seconds or a duration such as "30s"; None waits until the run ends.

        Returns
        -------
        Version
            What the shards are at.

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
        version: Version = self._live().deliver({}, config.deadline(timeout))
        return version

    def barrier(self, *, timeout: Any = None) -> None:
        """Wait until every live trainer has ticked as often as this one.

        Parameters
        ----------
        timeout : float, str or None
            Seconds or a duration such as "30s"; None waits until the run ends.

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
        self._session.barrier(config.deadline(timeout))

    def finish(self) -> None:
        """Stop taking part: the others no longer wait for this trainer.

        Called when the loop returns; earlier calls are for loops that go on with
        something else. Calling it twice is fine.

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
            self._session.finish()
            self._finished = True

    def __repr__(self) -> str:
        return f"<daskps.Trainer {self.rank} of {self.size} at clock {self.clock}>"
