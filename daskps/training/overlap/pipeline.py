"""Steps of `train` that are delivered while something else is done."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from daskps.cluster.wire.deadline import Deadline
from daskps.training.overlap.operation import Push

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from daskps.cluster.caller.routes import Computed, Target
    from daskps.cluster.caller.session import Session
    from daskps.training.overlap.background import Background
    from daskps.training.overlap.operation import Operation
    from daskps.typing import Array


class Pipeline:
    """Deliveries of one trainer, one at a time under way.

    Parameters
    ----------
    session : Session
        Its place in the run.
    background : Background
        What carries them out.
    """

    def __init__(self, session: Session, background: Background) -> None:
        self._session, self._background = session, background
        self._under_way: Operation | None = None
        #: What is filled next, and what may be under way.
        self._copies: tuple[dict[int, Array], dict[int, Array]] = ({}, {})

    @contextmanager
    def delivering(
        self, found: Computed, weight: float, target: Target
    ) -> Iterator[None]:
        """Deliver and read `target` while the block runs; its end waits for both."""
        self._under_way = self._submit(found.arrays, found.kind, weight, target)
        yield
        self.settle()

    def deliver(self, found: Computed, weight: float, target: Target) -> None:
        """Begin to deliver a step and to read `target`, once the one before is done.

        The arrays are copied: the user's function may write to them at the next step.
        """
        copies, others = self._copies
        for index, array in found.arrays.items():
            if index not in copies:
                copies[index] = np.empty_like(array)
            np.copyto(copies[index], array)
        arrays = {index: copies[index] for index in found.arrays}
        self._copies = others, copies
        self.settle()
        self._under_way = self._submit(arrays, found.kind, weight, target)

    def settle(self) -> None:
        """Wait for what is under way, or raise what went wrong with it."""
        operation, self._under_way = self._under_way, None
        if operation is not None:
            operation.result()

    def _submit(
        self, arrays: Mapping[int, Array], kind: str, weight: float, target: Target
    ) -> Operation:
        where = f"a push of trainer {self._session.rank}"
        push = Push(
            arrays, Deadline(None, where), weight=weight, kind=kind, target=target
        )
        return self._background.submit(push)
