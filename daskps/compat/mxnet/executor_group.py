"""A network on several workers at once: each batch is split, and run everywhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from daskps.compat.mxnet import executors
from daskps.compat.mxnet.binding import arrays_of_batch, part_of, requests_of
from daskps.compat.mxnet.bound_group import BoundGroup, shared_states
from daskps.compat.mxnet.executor_states import ExecutorStates
from daskps.store.arguments import flag

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from daskps.compat.mxnet.binding import DataBatch
    from daskps.compat.mxnet.monitor import TensorMonitor
    from daskps.typing import Array


class DataParallelExecutorGroup(BoundGroup):
    """Executors of one network on Dask workers, which split each batch among them.

    The results of an executor stay on its worker, as a future: outputs, gradients and
    the state that the network keeps for its backward travel when they are asked for.

    Parameters
    ----------
    symbol : object
        The network. ``forward(params, aux, batch, is_train) -> (outputs, saved)`` takes
        arrays by name, of `batch` this executor's rows, and may write to `aux`;
        ``backward(params, saved, out_grads) -> (grads, input_grads)`` returns gradients
        by name. It may have `output_axes`, the axis of the rows of each output, -1 for
        one that is the same everywhere; 0 by default.
    contexts : sequence of str
        Address of the Dask worker of each executor; one may have several.
    data_shapes, label_shapes : sequence of tuple
        ``(name, shape)``, ``(name, shape, layout)`` or ``(name, shape, dtype, layout)`` of
        each input, or MXNet's `DataDesc`, for the whole batch. Batches are cast to a dtype.
        Rows are along the axis "N" of the layout, and without one along the first; a
        layout without N gives all of it to everybody.
    param_names : sequence of str
        Parameters of the network.
    workload : sequence of float, optional
        In which proportion executors share a batch; alike by default.
    for_training : bool
        Whether there will be a backward.
    inputs_need_grad : bool
        Whether gradients of `data_shapes` are kept.
    shared_group : DataParallelExecutorGroup, optional
        On the same contexts: parameters and gradients are those of this group.
    fixed_param_names : sequence of str
        Parameters without a gradient.
    grad_req : {"write", "add", "null"}, sequence or mapping
        The use of the gradients before in a backward, for all parameters or each.
    client : distributed.Client, optional
        The client; the current one by default.

    Raises
    ------
    ValueError, TypeError
        For arguments that cannot be, and batches that leave an executor without a row.

    Examples
    --------
    >>> from daskps.compat import mxnet
    >>> class Scale:
    ...     def forward(self, params, aux, batch, is_train):
    ...         return [params["w"] * batch["x"]], batch["x"]
    ...     def backward(self, params, saved, out_grads):
    ...         return {"w": (saved * out_grads[0]).sum()}, {"x": params["w"] * out_grads[0]}
    >>> group = mxnet.DataParallelExecutorGroup(
    ...     symbol=Scale(), contexts=list(client.nthreads()),
    ...     data_shapes=[("x", (5,))], param_names=["w"],
    ... )
    >>> group.set_params({"w": np.array(2.0)})
    >>> group.forward(mxnet.DataBatch([np.arange(5.0)]))
    >>> group.get_outputs_merged()
    [array([0., 2., 4., 6., 8.])]
    >>> group.backward([np.ones(5)])
    >>> [g.tolist() for g in group.grad_arrays[0]]
    [3.0, 7.0]
    """

    def __init__(  # noqa: PLR0913 - the public contract
        self,
        *,
        symbol: Any,
        contexts: Sequence[str],
        data_shapes: Any,
        label_shapes: Any = None,
        param_names: Iterable[str],
        workload: Sequence[float] | None = None,
        for_training: bool = True,
        inputs_need_grad: bool = False,
        shared_group: DataParallelExecutorGroup | None = None,
        fixed_param_names: Iterable[str] = (),
        grad_req: Any = "write",
        client: Any = None,
    ) -> None:
        self.contexts = list(contexts)
        self.param_names = list(param_names)
        self.workload = [1] * len(self.contexts) if workload is None else list(workload)
        if len(self.workload) != len(self.contexts):
            raise ValueError(
                f"workload has {len(self.workload)} numbers for {len(self.contexts)} contexts"
            )
        self.for_training = flag(for_training, "for_training")
        self.inputs_need_grad = flag(inputs_need_grad, "inputs_need_grad")
        self._requests = requests_of(
            grad_req,
            self.param_names,
            fixed_param_names,
            for_training=self.for_training,
        )
        states = (
            ExecutorStates(self.contexts, client)
            if shared_group is None
            else shared_states(shared_group, self.contexts)
        )
        super().__init__(symbol, states)
        self.bind_exec(data_shapes, label_shapes, reshape=True)

    def __repr__(self) -> str:
        rows = ", ".join(str(part.stop - part.start) for part in self._rows)
        return (
            f"<daskps.compat.mxnet.DataParallelExecutorGroup: {self.batch_size} rows over "
            f"{len(self.contexts)} executors ({rows})>"
        )

    # -- running ---------------------------------------------------------------------

    def forward(self, data_batch: DataBatch, is_train: bool | None = None) -> None:
        """Split a batch, and run the network on it.

        Parameters
        ----------
        data_batch : DataBatch
            Anything with lists `data` and, unless it is for a prediction, `label`.
        is_train : bool, optional
            Whether this is training; by default what the group is bound for.

        Raises
        ------
        ValueError
            For other shapes than are bound.
        RuntimeError
            Before parameters are set.
        """
        self._check_set()
        train = self.for_training if is_train is None else flag(is_train, "is_train")
        arrays = arrays_of_batch(self._data, data_batch.data, "data")
        label = getattr(data_batch, "label", None)
        if label is not None:
            arrays |= arrays_of_batch(self._labels, label, "label")
        self.states.settle()
        self._has_run_back = False
        self._ran = [
            self._forward_on(i, arrays, is_train=train)
            for i in range(len(self.contexts))
        ]
        for i, ran in enumerate(self._ran):
            self.states.advance(i, ran)

    def backward(self, out_grads: Any = None) -> None:
        """Run the network backward, after a forward.

        Parameters
        ----------
        out_grads : array_like or list of it, optional
            Gradient of each output, of the whole batch; None where outputs are losses.

        Raises
        ------
        RuntimeError
            Of a group that is not bound for training, and before a forward.
        ValueError
            For another number of gradients, or of rows.
        """
        if not self.for_training:
            raise RuntimeError("this group is bound with for_training=False")
        ran = self._last_forward()
        parts = self._cut_grads(out_grads)
        state = self.states
        state.settle()
        self._has_run_back = True
        for i, network in enumerate(self._network):
            both = state.submit(i, executors.joined, state.held[i], ran[i])
            asked = (self._requests, None if parts is None else parts[i])
            sent = state.send(i, asked)
            state.ran_back[i] = state.submit(
                i, executors.backward, network, both, sent, state.ran_back[i]
            )

    def get_outputs(self) -> list[list[Array]]:
        """Return the outputs of the last forward, and of each that of each executor.

        Returns
        -------
        list of list of ndarray
            Outputs by number, then executors.

        Raises
        ------
        RuntimeError
            Before a forward.
        """
        ran = self._last_forward()
        outputs = [
            self.states.submit(i, executors.item, one, 0) for i, one in enumerate(ran)
        ]
        return [list(of) for of in zip(*self.states.gather(outputs), strict=True)]

    def get_outputs_merged(self) -> list[Array]:
        """Return the outputs of the last forward, as if of one executor.

        Returns
        -------
        list of ndarray
            Each put together along the axis of its rows.

        Raises
        ------
        RuntimeError
            Before a forward.
        """
        found = self.get_outputs()
        axes = self._axes(len(found))
        return [
            parts[0] if axis < 0 else np.concatenate(parts, axis)
            for parts, axis in zip(found, axes, strict=True)
        ]

    def get_input_grads(self) -> list[list[Array]]:
        """Return the gradients of the inputs, and of each that of each executor.

        Returns
        -------
        list of list of ndarray
            Inputs in the order of `data_shapes`, then executors.

        Raises
        ------
        RuntimeError
            Of a group that is bound without `inputs_need_grad`, and before a backward.
        ValueError
            Where the network gives none.
        """
        if not self.inputs_need_grad:
            raise RuntimeError("this group is bound with inputs_need_grad=False")
        if not self._has_run_back:
            raise RuntimeError("there are no gradients before a backward")
        back = self.states.ran_back
        grads = [
            self.states.submit(i, executors.item, one, 1) for i, one in enumerate(back)
        ]
        found = self.states.gather(grads)
        for one in self._data:
            if any(one.name not in of for of in found):
                raise ValueError(f"backward gives no gradient of input {one.name!r}")
        return [[of[one.name] for of in found] for one in self._data]

    def get_input_grads_merged(self) -> list[Array]:
        """Return the gradients of the inputs, as if of one executor.

        Returns
        -------
        list of ndarray
            Of an input that everybody has as a whole the sum.

        Raises
        ------
        RuntimeError, ValueError
            As in :meth:`get_input_grads`.
        """
        return [
            np.sum(parts, axis=0) if one.axis < 0 else np.concatenate(parts, one.axis)
            for parts, one in zip(self.get_input_grads(), self._data, strict=True)
        ]

    def update_metric(self, eval_metric: Any, labels: Any) -> None:
        """Bring each executor's outputs and labels to a metric.

        Parameters
        ----------
        eval_metric : object
            Its ``update(labels, outputs)`` gets two lists, once for each executor.
        labels : list of array_like
            Of the whole batch; each executor's are its rows.

        Raises
        ------
        RuntimeError
            Before a forward.
        ValueError
            For other shapes than are bound.
        """
        arrays = arrays_of_batch(self._labels, labels, "label")
        outputs = self.get_outputs()
        for i, rows in enumerate(self._rows):
            mine = [part_of(arrays[one.name], one.axis, rows) for one in self._labels]
            eval_metric.update(mine, [of[i] for of in outputs])

    def install_monitor(self, monitor: TensorMonitor) -> None:
        """Have a monitor look at every executor.

        Parameters
        ----------
        monitor : TensorMonitor
            Its `tic` comes before a forward, its `toc` after.
        """
        monitor.watch(self.states, lambda: self._ran)

    # -- what they are made of -------------------------------------------------------

    def _last_forward(self) -> list[Any]:
        if None in self._ran:
            raise RuntimeError("there was no forward since the group was bound")
        return self._ran

    def _cut_grads(self, out_grads: Any) -> list[list[Array]] | None:
        if out_grads is None:
            return None
        given = out_grads if isinstance(out_grads, (list, tuple)) else [out_grads]
        grads = [np.asarray(grad) for grad in given]
        shapes = [shape for _, shape in self.get_output_shapes()]
        if [grad.shape for grad in grads] != shapes:
            raise ValueError(
                f"out_grads have shapes {[grad.shape for grad in grads]}, and the outputs "
                f"{shapes}"
            )
        axes = self._axes(len(grads))
        return [
            [part_of(grad, axis, rows) for grad, axis in zip(grads, axes, strict=True)]
            for rows in self._rows
        ]
