"""A group of executors, bound to shapes of inputs, and the parameters that it holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from daskps.compat.mxnet import executors
from daskps.compat.mxnet.binding import batch_size_of, bound_inputs, cut_rows, part_of
from daskps.store.arguments import flag
from daskps.store.targets import check_apart

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from daskps.compat.mxnet.binding import BoundInput
    from daskps.compat.mxnet.executor_states import ExecutorStates
    from daskps.typing import Array


class BoundGroup:
    """Executors of one network, their shapes and their parameters.

    Parameters
    ----------
    symbol : object
        The network.
    states : ExecutorStates
        The state of the executors.
    """

    contexts: list[str]
    param_names: list[str]
    workload: list[float]

    def __init__(self, symbol: Any, states: ExecutorStates) -> None:
        self._symbol, self.states = symbol, states
        n = range(len(states.contexts))
        self._network = [states.send(i, symbol) for i in n]

    # -- binding ---------------------------------------------------------------------

    def bind_exec(
        self,
        data_shapes: Any,
        label_shapes: Any = None,
        shared_group: BoundGroup | None = None,
        reshape: bool = False,
    ) -> None:
        """Bind an executor on each context.

        Parameters
        ----------
        data_shapes, label_shapes : sequence of tuple
            As for the class.
        shared_group : DataParallelExecutorGroup, optional
            The group that this one shares parameters and gradients with from now on.
        reshape : bool
            Whether parameters and gradients stay; otherwise gradients are forgotten.

        Raises
        ------
        ValueError, TypeError
            For shapes that cannot be; what was bound before stays.
        """
        data = bound_inputs(data_shapes, "data_shapes")
        labels = bound_inputs(label_shapes, "label_shapes")
        size = batch_size_of([*data, *labels])
        rows = cut_rows(size, self.workload)
        stay = flag(reshape, "reshape")
        if shared_group is not None:
            self.states = shared_states(shared_group, self.contexts)
        elif not stay:
            self.states.ran_back = [None] * len(self.contexts)
        self._data, self._labels = data, labels
        self.batch_size, self._rows = size, rows
        self._ran: list[Any] = [None] * len(self.contexts)
        self._has_run_back = False
        self._output_shapes: list[tuple[int, ...]] | None = None

    def reshape(self, data_shapes: Any, label_shapes: Any = None) -> None:
        """Bind for other shapes; parameters and gradients stay.

        Parameters
        ----------
        data_shapes, label_shapes : sequence of tuple
            As for the class; the same as before change nothing.

        Raises
        ------
        ValueError, TypeError
            For shapes that cannot be; what was bound before stays.
        """
        data = bound_inputs(data_shapes, "data_shapes")
        labels = bound_inputs(label_shapes, "label_shapes")
        if (data, labels) != (self._data, self._labels):
            self.bind_exec(data_shapes, label_shapes, reshape=True)

    def get_batch_size(self) -> int:
        """Return how many rows a batch has.

        Returns
        -------
        int
            Of all executors.
        """
        return self.batch_size

    def get_output_shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        """Return the names and shapes of the outputs of a whole batch.

        Returns
        -------
        list of (str, tuple of int)
            "output0" and so on, and the shape of each, found by a forward of zeros where
            there was none yet.

        Raises
        ------
        RuntimeError
            Before parameters are set.
        """
        if self._output_shapes is None:
            inputs = [*self._data, *self._labels]
            zeros = {one.name: np.zeros(one.shape, one.dtype) for one in inputs}
            ran = self._ran[0] or self._forward_on(0, zeros, is_train=False)
            # The state that the network keeps for its backward stays where it is.
            outs = self.states.submit(0, executors.item, ran, 0)
            [outputs] = self.states.gather([outs])
            mine = self._rows[0].stop - self._rows[0].start
            self._output_shapes = [
                _with_batch(np.shape(out), axis, mine, self.batch_size)
                for out, axis in zip(outputs, self._axes(len(outputs)), strict=True)
            ]
        return [(f"output{i}", shape) for i, shape in enumerate(self._output_shapes)]

    # -- parameters ------------------------------------------------------------------

    def set_params(
        self,
        arg_params: Mapping[str, Any],
        aux_params: Mapping[str, Any] | None = None,
        allow_extra: bool = False,
        allow_missing: bool = False,
    ) -> None:
        """Copy parameters to all executors.

        Parameters
        ----------
        arg_params, aux_params : mapping
            Name to array, of parameters and of auxiliary states.
        allow_extra : bool
            Whether names that are no parameters are left out; else they are an error.
        allow_missing : bool
            Whether parameters that are not named stay; else they are an error.

        Raises
        ------
        ValueError
            For extra and missing names, and other shapes than before.
        """
        given = dict(arg_params)
        extra = sorted(set(given) - set(self.param_names))
        missing = [name for name in self.param_names if name not in given]
        if extra and not flag(allow_extra, "allow_extra"):
            raise ValueError(
                f"{extra[0]!r} is no parameter; there are {self.param_names}. "
                f"allow_extra=True leaves it out"
            )
        if missing and not flag(allow_missing, "allow_missing"):
            raise ValueError(
                f"parameter {missing[0]!r} is not given; allow_missing=True keeps it"
            )
        params = {n: np.array(given[n]) for n in self.param_names if n in given}
        aux = {name: np.array(array) for name, array in (aux_params or {}).items()}
        self.states.set(params, aux)

    def get_params(
        self,
        arg_params: Mapping[str, Array],
        aux_params: Mapping[str, Array] | None = None,
    ) -> None:
        """Copy the mean of the executors' parameters into arrays.

        Parameters
        ----------
        arg_params, aux_params : mapping
            Name to array, which takes the values in place and in its own dtype.

        Raises
        ------
        ValueError
            For names that there are not, other shapes, and arrays that share memory.
        RuntimeError
            Before parameters are set.
        """
        outs = {**arg_params, **(aux_params or {})}
        self._check_set()
        for name, out in outs.items():
            shape = self.states.shapes.get(name)
            if shape != out.shape:
                raise ValueError(
                    f"{name!r} has shape {shape}, and its array {out.shape}"
                )
        check_apart(outs.items())
        found = self.states.mean()
        for name, out in outs.items():
            out[...] = found[name].astype(out.dtype)

    @property
    def grad_arrays(self) -> list[list[Array | None]]:
        """Gradients of each parameter, and of it of each executor; None without one."""
        ran = [back for back in self.states.ran_back if back is not None]
        of = [back.grads for back in self.states.gather(ran)]
        return [[grads.get(name) for grads in of] for name in self.param_names]

    # -- what they are made of -------------------------------------------------------

    def _check_set(self) -> None:
        missing = [n for n in self.param_names if n not in self.states.shapes]
        if missing:
            raise RuntimeError(
                f"parameter {missing[0]!r} has no value; call set_params"
            )

    def _axes(self, n: int) -> list[int]:
        """Return the axis of the rows of each output."""
        axes = list(getattr(self._symbol, "output_axes", [0] * n))
        if len(axes) != n:
            raise ValueError(f"output_axes has {len(axes)} axes for {n} outputs")
        return axes

    def _forward_on(
        self, i: int, arrays: Mapping[str, Array], *, is_train: bool
    ) -> Any:
        self._check_set()
        inputs: list[BoundInput] = [*self._data, *self._labels]
        batch = {
            one.name: part_of(arrays[one.name], one.axis, self._rows[i])
            for one in inputs
            if one.name in arrays
        }
        sent, state = self.states.send(i, batch), self.states.held[i]
        network = self._network[i]
        return self.states.submit(i, executors.forward, network, state, sent, is_train)


def shared_states(group: Any, contexts: Sequence[str]) -> ExecutorStates:
    """Return what another group holds, for one that shares it.

    Raises
    ------
    TypeError, ValueError
        For what is no group, and one on other contexts.
    """
    if not isinstance(group, BoundGroup):
        raise TypeError(f"shared_group is another group, found {type(group).__name__}")
    if group.contexts != contexts:
        raise ValueError(
            f"groups that share are on the same contexts, found {group.contexts}"
        )
    return group.states


def _with_batch(
    shape: tuple[int, ...], axis: int, mine: int, whole: int
) -> tuple[int, ...]:
    """Return the shape of a whole batch's output, of that of one executor's."""
    if axis < 0:
        return shape
    if axis >= len(shape) or shape[axis] != mine:
        raise ValueError(
            f"an output of {mine} rows has shape {shape}, and its rows along axis {axis}; "
            f"give the network output_axes"
        )
    return (*shape[:axis], whole, *shape[axis + 1 :])
