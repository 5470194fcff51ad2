"""The base of all front-ends: one program in every trainer, which knows where it is."""

from __future__ import annotations

import copy
import pickle
import uuid
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

import daskps
from daskps.cluster.caller.link import blocking_link
from daskps.errors import DaskPSError, RunCancelledError, SchedulerLostError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from daskps.store.store import ParameterStore
    from daskps.training.trainer import Trainer
    from daskps.typing import Array

#: Two trainers may share a process, and one may outlive another in its thread.
_PARTICIPANT: ContextVar[Participant] = ContextVar("daskps_compat_participant")
#: How long a trainer waits for a store that the first one has just made, in seconds.
OPEN_SECONDS = 60.0
#: How many bytes an error may take that is told to the others.
_ERROR_NBYTES = 4096


class Participant:
    """One trainer of a launch, as its program sees it.

    Parameters
    ----------
    system : str
        The system whose words the program uses.
    name : str
        The launch, of which the names of its stores are made.
    trainer : Trainer
        Its place among the others, in a run of a store of the launch's own.
    """

    def __init__(self, system: str, name: str, trainer: Trainer) -> None:
        self.system, self.name, self.trainer = system, name, trainer
        #: Objects that the front-end keeps for this trainer.
        self.kept: dict[str, Any] = {}
        #: Names of stores that are this trainer's alone.
        self.own: list[str] = []
        self._n_stores = 0

    @property
    def rank(self) -> int:
        """Number of this trainer, from 0."""
        return self.trainer.rank

    @property
    def size(self) -> int:
        """Number of trainers."""
        return self.trainer.size

    def join(self, what: str) -> Array:
        """Wait until all trainers that have not ended are here too; return which are.

        Parameters
        ----------
        what : str
            The purpose, the same in all trainers.

        Returns
        -------
        ndarray of bool, shape (size,)
            True for trainers that are here.

        Raises
        ------
        ValueError
            In all trainers, where another one waits for another purpose: each would
            wait for the other.
        """
        return self.gather({what: _NOTHING})[1]

    def gather(self, arrays: Mapping[str, Array]) -> tuple[dict[str, Array], Array]:
        """Return the sums of the arrays of all trainers that have not ended, and which.

        Parameters
        ----------
        arrays : mapping
            Named by what the trainers are doing.

        Returns
        -------
        sums : dict of str to ndarray
            Along the tree of the ranks.
        there : ndarray of bool, shape (size,)
            True for trainers that have brought something.

        Raises
        ------
        ValueError
            In all trainers, where they do not bring the same.
        """
        mine = np.zeros(self.size, "u1")
        mine[self.rank] = 1
        try:
            found = self.trainer.allreduce({**arrays, _THERE: mine}, "sum")
        except ValueError as error:
            said, is_theirs, _ = str(error).partition("; all trainers must")
            if not is_theirs:
                raise
            raise ValueError(
                f"{said}; what {self.system}.launch runs makes the same calls in all of "
                f"its trainers, in the same order"
            ) from error
        there: Array = found.pop(_THERE) > 0
        return found, there

    def meet(self, what: str = "a barrier") -> Array:
        """Wait until all that have not ended have come as far, call by call.

        As :meth:`join`, and a tick.
        """
        self.trainer.tick()
        return self.join(what)

    def make_store(
        self, make: Callable[[str], ParameterStore], what: str
    ) -> ParameterStore:
        """Have rank 0 make a store, and open it in all others: they all call it.

        Parameters
        ----------
        make : callable
            ``make(name) -> store``.
        what : str
            The name of the thing, the same for all: trainers with another one are
            refused.

        Returns
        -------
        ParameterStore
            It is deleted when the launch ends.

        Raises
        ------
        ValueError
            In all trainers, where they do not ask for the same.
        RuntimeError
            In all trainers, where rank 0 has ended.
        Exception
            In all trainers, what rank 0 has met.
        """
        name = f"{self.name}/{self._n_stores}"
        self._n_stores += 1
        store: ParameterStore | None = None
        error: Exception | None = None
        if self.rank == 0:
            try:
                store = make(name)
            except Exception as failed:  # noqa: BLE001 - raised again below
                error = failed
        try:
            told, there = self.gather({what: pack_error(error)})
        except Exception:
            # The launch may be over already, and have freed what there was by then.
            if store is not None:
                with suppress(Exception):
                    store.delete()
            raise
        if error is not None:
            raise error
        raise_packed(told[what], what)
        if not there[0]:
            raise RuntimeError(
                f"trainer 0 has ended, and it is the one that makes {what}; have it go on "
                f"until all trainers have what they need"
            )
        if store is None:
            store = daskps.open(name, wait=OPEN_SECONDS)
        return store


#: A payload for meetings where only the presence of a trainer counts, and its name.
_NOTHING = np.zeros(1, "u1")
_THERE = "trainers"


def pack_error(error: Exception | None) -> Array:
    """Return an error as bytes for an all-reduce; zeros for none.

    All trainers raise the same then: whose error is heard of first does not matter.
    """
    packed = np.zeros(_ERROR_NBYTES, "u1")
    if error is not None:
        try:
            # Fails for one that takes other arguments.
            bare = copy.copy(error).with_traceback(None)
            # Dask has errors pickled with their tracebacks, and those of their causes,
            # which are longer than this array.
            bare.__cause__ = bare.__context__ = None
            data = pickle.dumps(bare)
            pickle.loads(data)
        except Exception:  # noqa: BLE001 - a user's, whatever it raises
            data = b""
        if not 0 < len(data) <= _ERROR_NBYTES:
            told = f"{type(error).__name__}: {error}"[: _ERROR_NBYTES // 8]
            data = pickle.dumps(DaskPSError(told))
        packed[: len(data)] = np.frombuffer(data, "u1")
    return packed


def raise_packed(packed: Array, what: str) -> None:
    """Raise what another trainer has met, if anything.

    Raises
    ------
    Exception
        That, with a note of where.
    """
    if packed.any():
        error: Exception = pickle.loads(packed.tobytes())
        error.add_note(f"met by another trainer, for {what}")
        raise error


def here(system: str) -> Participant:
    """Return the trainer that this code runs in.

    Raises
    ------
    RuntimeError
        Outside of a launch of this front-end.
    """
    found = _PARTICIPANT.get(None)
    if found is None or found.system != system:
        raise RuntimeError(
            f"this is no trainer of daskps.compat.{system}; call it in the program "
            f"that {system}.launch runs, in a thread of your own within "
            f"contextvars.copy_context().run"
        )
    return found


def name_of_ones_own() -> str | None:
    """Return the name for a store that one trainer makes, freed with its program.

    Returns
    -------
    str or None
        None outside of a launch: a store of the session frees itself.
    """
    found = _PARTICIPANT.get(None)
    if found is None:
        return None
    found.own.append(f"{found.name}/{uuid.uuid4().hex}")
    return found.own[-1]


def launch(
    system: str,
    body: Callable[[Participant, Any], Any],
    parts: Sequence[Any],
    *,
    store: ParameterStore | None = None,
    workers: Any = None,
    client: Any = None,
    timeout: Any = None,
) -> list[Any]:
    """Run a program in trainers, and free what they have made.

    Parameters
    ----------
    system : str
        The front-end.
    body : callable
        ``body(participant, part)``; within it :func:`here` finds the participant.
    parts : sequence
        The part that each trainer is given.
    store : ParameterStore, optional
        A store whose BSP run the trainers are in, which stays; by default one of the
        launch's own, in which nobody waits for others.
    workers : str or iterable of str, optional
        Addresses of the workers that trainers may be on; all by default.
    client : distributed.Client, optional
        The client; the current one by default.
    timeout : float, str or None
        Seconds or a duration for all of it; None for none.

    Returns
    -------
    list
        The result of each program, by rank.

    Raises
    ------
    TypeError
        With an asynchronous client.
    ValueError
        Without a client.
    RunCancelledError
        If a trainer was lost with its worker.
    SchedulerLostError
        If the scheduler is gone, and all stores with it.
    Exception
        The error of a program, with its rank in a note.
    """
    blocking_link(f"{system}.launch waits for its trainers", client)
    name = f"{system}-{uuid.uuid4().hex}"
    clock, has_scheduler = store, True
    if clock is None:
        clock = daskps.create({"clock": np.zeros(1)}, client=client)
    try:
        loop = partial(_run, partial(Participant, system, name), body)
        # No tick of theirs is a round, so a bar would count nothing anybody knows.
        found: list[Any] = daskps.run(
            clock,
            loop,
            parts,
            workers=workers,
            sync="asp" if store is None else "bsp",
            callbacks=(),
            timeout=timeout,
        )
    except RunCancelledError as error:
        # Its advice is for users that call `run` themselves.
        said = str(error).partition("; use on_trainer_lost")[0]
        raise RunCancelledError(
            f"{said}; what its program knew is gone: call {system}.launch again"
        ) from error
    except SchedulerLostError:
        has_scheduler = False  # its stores went with it: nobody is left to free them
        raise
    finally:
        if has_scheduler and clock is not store:
            with suppress(Exception):  # what the programs raised says more
                clock.close()
        if has_scheduler:
            _free(name, client)
    return found


def _run(
    make: Callable[[Trainer], Participant],
    body: Callable[[Participant, Any], Any],
    trainer: Trainer,
    part: Any,
) -> Any:
    """Call a program in its trainer's task."""
    with _taking_part(make(trainer)) as participant:
        return body(participant, part)


@contextmanager
def _taking_part(participant: Participant) -> Iterator[Participant]:
    token = _PARTICIPANT.set(participant)
    try:
        yield participant
    finally:
        _PARTICIPANT.reset(token)
        for name in participant.own:
            with suppress(Exception):  # it may never have been made
                daskps.open(name).delete()


def _free(name: str, client: Any) -> None:
    """Delete the stores that the trainers of a launch have made, as far as that goes."""
    with suppress(Exception):
        for info in daskps.list_stores(client=client):
            if info.name.startswith(f"{name}/"):
                with suppress(Exception):  # the others go all the same
                    daskps.open(info.name, client=client).delete()
