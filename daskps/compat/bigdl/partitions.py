"""A program in every partition, tried again where it fails, and what it waits for."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from daskps import config
from daskps.compat import launch as base
from daskps.compat.behind import behind
from daskps.store.arguments import whole

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    from daskps.compat.launch import Participant
    from daskps.typing import Array

SYSTEM = "bigdl"


def launch(
    main: Callable[[Any], Any],
    parts: Sequence[Any],
    *,
    retries: int = 0,
    retry_window: Any = "120s",
    client: Any = None,
    timeout: Any = None,
) -> list[Any]:
    """Run a program in every partition.

    Parameters
    ----------
    main : callable
        ``main(part)``; it makes and uses :class:`AllReduceParameter`.
    parts : sequence
        The partitions of the data, one for each trainer.
    retries : int
        How often all of it is run again where `main` fails. Arguments that cannot be
        (ValueError, TypeError) are not tried again. `main` says where it goes on.
    retry_window : float or str
        Seconds or a duration: after so long without a failure they are counted anew.
    client : distributed.Client, optional
        The client; the current one by default.
    timeout : float, str or None
        Seconds or a duration for one try; None for none.

    Returns
    -------
    list
        The results of `main`, by partition.

    Raises
    ------
    ValueError, TypeError
        For arguments that cannot be.
    Exception
        The error of `main`, when it is not tried again.

    Examples
    --------
    >>> from daskps.compat import bigdl
    >>> def main(part):
    ...     parameter = bigdl.AllReduceParameter.new_parameter(2, 3, compress="none")
    ...     parameter.init(np.zeros(3, "f4"))
    ...     parameter.put_gradients(np.full(3, part, "f4"))
    ...     parameter.aggregate_gradient_partition(2)
    ...     return parameter.gradient_partition.tolist()
    >>> bigdl.launch(main, [1.0, 2.0])
    [[1.5, 1.5], [1.5]]
    """
    left = most = whole(retries, "retries", 0)
    seconds = config.deadline(retry_window, "retry_window")
    window = np.inf if seconds is None else seconds
    if not callable(main):
        raise TypeError(f"main is a function main(part), found {main!r:.60}")
    failed = -np.inf
    while True:
        try:
            body = partial(_partition, main)
            return base.launch(SYSTEM, body, parts, client=client, timeout=timeout)
        except (ValueError, TypeError):
            raise
        except Exception:
            now = time.monotonic()
            left, failed = (most if now - failed > window else left) - 1, now
            if left < 0:
                raise


def _partition(main: Callable[[Any], Any], here: Participant, part: Any) -> Any:
    """Call the program of one partition, with a thread for what it waits for later."""
    with behind("daskps-bigdl") as gets:
        here.kept["gets"] = gets
        return main(part)


@dataclass(frozen=True)
class FutureResult:
    """Weights that are on their way; see :meth:`AllReduceParameter.get_weights`.

    Parameters
    ----------
    future : concurrent.futures.Future
        Of the weights.

    Examples
    --------
    >>> from daskps.compat import bigdl
    >>> def main(part):
    ...     parameter = bigdl.AllReduceParameter.new_parameter(1, 2)
    ...     parameter.init(np.ones(2, "f4"))
    ...     return parameter.get_weights(np.zeros(2, "f4")).wait_result().tolist()
    >>> bigdl.launch(main, [None])
    [[1.0, 1.0]]
    """

    future: Future[Array]

    def wait_result(self) -> Array:
        """Wait until all weights are there, and return them.

        Returns
        -------
        ndarray
            The array that :meth:`AllReduceParameter.get_weights` was given.

        Raises
        ------
        RunCancelledError, ShardLostError
            For what its name says.
        """
        return self.future.result()
