"""A group of workers that train one net together, each on some rows of every batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from daskps.compat.singa.grouped import Grouped
from daskps.compat.singa.sub_net import SubNet
from daskps.store.arguments import whole

if TYPE_CHECKING:
    from daskps.typing import Array


class WorkerGroup(Grouped):
    """Workers that cut each batch among them, and update shared parameters together.

    It is light and travels into tasks. :func:`launch` runs a program in its workers, in
    which the methods below are called, by all workers in the same order. Gradients of a
    parameter are averaged over the group, weighted by rows, before the server's one
    update.

    Parameters
    ----------
    net : sequence of Layer
        The layers, each after its sources.
    n_workers : int
        How many workers there are.
    batch : int
        Rows of a batch. Each worker has floor(batch / n_workers), the last also the rest.
    sync_freq : int
        With several groups: updates of this group between two syncs with the others.
    warmup_steps : int
        With several groups: updates of the first one before the others begin, from what
        it has come to. Where it makes fewer, they begin when it has ended.

    Raises
    ------
    TypeError, ValueError
        For what is no net, and for fewer rows than workers.

    Examples
    --------
    >>> from daskps.compat import singa
    >>> net = [singa.Layer("fc", "linear", params={"w": np.zeros(2)})]
    >>> singa.WorkerGroup(net, 3, batch=50)
    <daskps.compat.singa.WorkerGroup of 3 workers for 50 rows>
    """

    # -- their calls -----------------------------------------------------------------

    def put(self, name: str, value: Any = None) -> None:
        """Initialise a parameter on the server: its owner does, once.

        Parameters
        ----------
        name : str
            The parameter.
        value : array_like, optional
            Of its shape; by default the one of its layer.

        Raises
        ------
        ValueError
            In a worker that does not own it, for a second put, and for another shape.
            Nothing has changed.

        Examples
        --------
        >>> from daskps.compat import singa
        >>> net = [singa.Layer("fc", "linear", params={"w": np.zeros(2)})]
        >>> group = singa.WorkerGroup(net, 2, batch=4)
        >>> def main(group):
        ...     if "w" in group.owned:
        ...         group.put("w", np.ones(2))
        ...     return group.collect("w").tolist()
        >>> singa.launch(main, group, updater=daskps.optim.SGD(0.1))
        [[1.0, 1.0], [1.0, 1.0]]
        """
        worker, owner = self._worker, self._owner(self._known(name))
        if owner != self.worker_id:
            raise ValueError(
                f"parameter {name!r} is put by worker {owner}, which owns it, and not by "
                f"worker {self.worker_id}"
            )
        if worker.has_begun or name in worker.puts:
            raise ValueError(f"parameter {name!r} was put already; its value stays")
        given = self.params[name] if value is None else np.asarray(value)
        worker.puts[name] = self._shaped(name, given)

    def put_own(self) -> None:
        """Put all parameters that this worker owns, as their layers have them."""
        for name in self.owned:
            self.put(name)

    def get(self, name: str, min_version: int = 0) -> None:
        """Ask for a parameter of a version at least; :meth:`collect` waits for it.

        Parameters
        ----------
        name : str
            The parameter.
        min_version : int
            How many updates of it are in it at least.

        Raises
        ------
        ValueError
            For a version that this worker has sent no update for.

        Examples
        --------
        >>> from daskps.compat import singa
        >>> net = [singa.Layer("fc", "linear", params={"w": np.zeros(2)})]
        >>> group = singa.WorkerGroup(net, 2, batch=4)
        >>> def main(group):
        ...     group.put_own()
        ...     group.get("w")
        ...     return group.collect("w").tolist()
        >>> singa.launch(main, group, updater=daskps.optim.SGD(0.1))
        [[0.0, 0.0], [0.0, 0.0]]
        """
        worker = self._worker
        worker.reach(self._known(name), whole(min_version, "min_version", least=0))
        operation = worker.trainer.pull_async(name)
        worker.fetches[name] = worker.versions.get(name, 0), operation

    def update(self, name: str, gradient: Any) -> None:
        """Send the mean gradient of this worker's rows.

        The group's mean goes to the server with the next call that wants a version after
        it, or at the end of the program.

        Parameters
        ----------
        name : str
            The parameter.
        gradient : array_like
            Of its shape.

        Raises
        ------
        ValueError
            For another shape, and a second update of it before its version was asked for.

        Examples
        --------
        >>> from daskps.compat import singa
        >>> net = [singa.Layer("fc", "linear", params={"w": np.zeros(2)})]
        >>> group = singa.WorkerGroup(net, 2, batch=4)
        >>> def main(group):
        ...     group.put_own()
        ...     group.update("w", np.full(2, group.worker_id))
        ...     return group.collect("w").tolist()
        >>> singa.launch(main, group, updater=daskps.optim.SGD(0.1))
        [[-0.05, -0.05], [-0.05, -0.05]]
        """
        worker = self._worker
        if self._known(name) in worker.grads:
            raise ValueError(
                f"parameter {name!r} has an update that was not collected; collect it "
                f"before the next one"
            )
        worker.grads[name] = self._shaped(name, np.asarray(gradient))

    def collect(self, name: str, min_version: int | None = None) -> Array:
        """Wait for a parameter and return it.

        Parameters
        ----------
        name : str
            The parameter.
        min_version : int, optional
            How many updates of it are in it at least; by default all that were sent.

        Returns
        -------
        ndarray
            The value.

        Raises
        ------
        ValueError
            For a version that this worker has sent no update for.

        Examples
        --------
        >>> from daskps.compat import singa
        >>> net = [singa.Layer("fc", "linear", params={"w": np.zeros(2)})]
        >>> group = singa.WorkerGroup(net, 2, batch=4)
        >>> def main(group):
        ...     group.put_own()
        ...     before = group.collect("w")
        ...     group.update("w", np.ones(2))
        ...     return (group.collect("w", 1) - before).tolist()
        >>> singa.launch(main, group, updater=daskps.optim.SGD(0.1))
        [[-0.1, -0.1], [-0.1, -0.1]]
        """
        worker = self._worker
        least = self._wanted(self._known(name), min_version)
        version, operation = worker.fetches.pop(name, (-1, None))
        if operation is not None and version >= least:
            fetched: Array = operation.result()[name]
            return fetched
        worker.reach(name, least)
        return worker.trainer.pull(name)[name]

    def collect_all(self, min_version: int | None = None) -> dict[str, Array]:
        """Wait for all parameters and return them.

        Parameters
        ----------
        min_version : int, optional
            As for :meth:`collect`, of each of them.

        Returns
        -------
        dict of str to ndarray
            The values, all after the same updates.

        Raises
        ------
        ValueError
            For a version that this worker has sent no update for.

        Examples
        --------
        >>> from daskps.compat import singa
        >>> net = [singa.Layer("fc", "linear", params={"w": np.zeros(2)})]
        >>> group = singa.WorkerGroup(net, 2, batch=4)
        >>> def main(group):
        ...     group.put_own()
        ...     return sorted(group.collect_all())
        >>> singa.launch(main, group, updater=daskps.optim.SGD(0.1))
        [['w'], ['w']]
        """
        worker = self._worker
        for name in self.params:
            worker.reach(name, self._wanted(name, min_version))
        worker.fetches.clear()
        return worker.trainer.pull()

    def version(self, name: str) -> int:
        """Return how many updates of a parameter the server has made.

        Parameters
        ----------
        name : str
            The parameter.

        Returns
        -------
        int
            0 after the put.

        Raises
        ------
        ValueError
            For a name that is none.

        Examples
        --------
        >>> from daskps.compat import singa
        >>> net = [singa.Layer("fc", "linear", params={"w": np.zeros(2)})]
        >>> group = singa.WorkerGroup(net, 2, batch=4)
        >>> def main(group):
        ...     group.put_own()
        ...     group.update("w", np.ones(2))
        ...     before = group.version("w")
        ...     group.collect_all()
        ...     return before, group.version("w")
        >>> singa.launch(main, group, updater=daskps.optim.SGD(0.1))
        [(0, 1), (0, 1)]
        """
        return self._worker.versions.get(self._known(name), 0)

    def train_one_batch(self, step: int) -> float:
        """Collect all parameters, run this worker's sub-net both ways, send the updates.

        Parameters
        ----------
        step : int
            The step that data layers are given.

        Returns
        -------
        float
            Mean loss over the rows of this worker.

        Raises
        ------
        ValueError
            For a batch of other rows than `batch`, and what `update` refuses.

        Examples
        --------
        >>> from daskps.compat import singa
        >>> class Rows(singa.Layer):
        ...     def forward(self, step):
        ...         return np.array([1.0, 2.0])
        >>> class Loss(singa.Layer):
        ...     def forward(self, params, rows):
        ...         return (rows * params["w"]).mean(), rows
        ...     def backward(self, params, saved, gradient):
        ...         return {"w": saved.mean(keepdims=True)}, [None]
        >>> net = [Rows("x", "data"), Loss("loss", "loss", ["x"], params={"w": np.ones(1)})]
        >>> group = singa.WorkerGroup(net, 2, batch=2)
        >>> def main(group):
        ...     group.put_own()
        ...     return group.train_one_batch(0)
        >>> singa.launch(main, group, updater=daskps.optim.SGD(0.1))
        [1.0, 2.0]
        """
        params = self.collect_all()
        found = SubNet(self.net, self.batch, self.rows)
        for name, gradient in found.run(params, step):
            self.update(name, gradient)
        return found.loss

    def performance(self, loss: float) -> float:
        """Return the mean of a number over the group, by rows; all workers call it.

        Parameters
        ----------
        loss : float
            This worker's mean over its rows.

        Returns
        -------
        float
            The same in all workers.

        Raises
        ------
        RunCancelledError
            If another worker has failed.

        Examples
        --------
        >>> from daskps.compat import singa
        >>> net = [singa.Layer("fc", "linear", params={"w": np.zeros(2)})]
        >>> group = singa.WorkerGroup(net, 2, batch=4)
        >>> def main(group):
        ...     group.put_own()
        ...     return group.performance(float(group.worker_id))
        >>> singa.launch(main, group, updater=daskps.optim.SGD(0.1))
        [0.5, 0.5]
        """
        own = self.rows.stop - self.rows.start
        total = self._worker.trainer.allreduce(np.array(float(loss) * own))
        return float(total) / self.batch
