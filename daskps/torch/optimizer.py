"""Steps of a trainer in the words of `torch.optim`, and embeddings over tables."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

import daskps
from daskps.torch.modules import (
    gradient_of,
    named_tensors,
    place_of,
    sparse_embeddings,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from daskps.typing import Array


class EmbeddingBag(nn.Module):  # type: ignore[misc]  # torch has no types here
    """Sums or means of rows of a table, with no copy of the table in the module.

    A forward pass pulls the rows that it names, each once. The step of the
    :class:`Optimizer` of the model pushes their gradients, of all passes since the step
    before.

    Parameters
    ----------
    trainer : Trainer or ParameterStore
        The table is in its store: a trainer trains, a store evaluates.
    name : str
        Of the table, with a number of rows or of any ids.
    mode : {"sum", "mean"}
        How the rows of a bag are combined.

    Examples
    --------
    >>> store = daskps.create({"emb": daskps.TableSpec(None, 2, init=1.0)})
    >>> bag = EmbeddingBag(store, "emb")
    >>> bag(torch.tensor([7, 9, 7]), torch.tensor([0, 1])).tolist()
    [[1.0, 1.0], [2.0, 2.0]]
    """

    def __init__(self, trainer: Any, name: str, mode: str = "sum") -> None:
        super().__init__()
        if mode not in ("sum", "mean"):
            raise ValueError(f"mode is 'sum' or 'mean', found {mode!r}")
        self.table, self.mode = name, mode
        #: Not a submodule, nor a part of the state of this one.
        self._pull = trainer.pull
        #: Ids and rows of each pass whose gradients a step will push.
        self._pulled: list[tuple[Array, torch.Tensor]] = []
        self._is_trained = isinstance(trainer, daskps.Trainer)

    def forward(
        self, ids: torch.Tensor, offsets: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the combined rows of each bag, of shape (bags, dim).

        Parameters
        ----------
        ids : tensor of integers, shape (n,) or (bags, n)
            The rows.
        offsets : tensor of integers, shape (bags,), optional
            Where each bag begins, for ids of one dimension.

        Returns
        -------
        tensor, shape (bags, dim)
            On the device of `ids`.
        """
        named, at = torch.unique(ids, return_inverse=True)
        where = named.cpu().numpy()
        rows = torch.from_numpy(self._pull((), rows={self.table: where})[self.table])
        keeps = self._is_trained and torch.is_grad_enabled()
        rows = rows.to(ids.device).requires_grad_(keeps)
        if keeps:
            self._pulled.append((where, rows))
        bags: torch.Tensor = functional.embedding_bag(at, rows, offsets, mode=self.mode)
        return bags

    def take_gradient(self) -> daskps.RowGrad | None:
        """Return the gradient of the rows of all passes since it was called last."""
        pulled, self._pulled = self._pulled, []
        found = [
            (i, rows.grad.cpu().numpy()) for i, rows in pulled if rows.grad is not None
        ]
        if not found:
            return None
        ids, grads = zip(*found, strict=True)
        return daskps.RowGrad(np.concatenate(ids), np.concatenate(grads))

    def extra_repr(self) -> str:
        """Return the table and how rows are combined."""
        return f"{self.table!r}, mode={self.mode!r}"


class Optimizer(torch.optim.Optimizer):  # type: ignore[misc]
    """Steps of a trainer, in the words of `torch.optim`.

    Making one pulls the values of the store into the model. Each :meth:`step` is one
    clock of the trainer: it pushes the gradients and pulls the parameters in place. A
    rank whose part of the data ends leaves, and the others go on.

    When the loops have returned, the store gets the buffers of the models: of floats,
    such as the statistics of batch normalizations, the mean weighted by the weights of
    all steps; of others those of the first trainer.

    Parameters
    ----------
    trainer : Trainer
        Of a run on a store that has the names of the model's `state_dict`, see
        :func:`create`.
    model : torch.nn.Module
        The model.

    Raises
    ------
    UnknownParameterError, ValueError
        For a name or a shape that the store does not have.

    Notes
    -----
    The rule of the store updates, so learning rates are those of
    :mod:`daskps.optim.schedules`. Gradients that are clipped before a step are clipped
    before the mean over trainers.

    Examples
    --------
    >>> def loop(trainer, part):
    ...     model = torch.nn.Linear(2, 1)
    ...     optimizer = Optimizer(trainer, model)
    ...     for X, y in part:
    ...         optimizer.zero_grad()
    ...         torch.nn.functional.mse_loss(model(X), y).backward()
    ...         optimizer.step(weight=len(X))
    >>> store = daskps.torch.create(torch.nn.Linear(2, 1), optimizer=daskps.optim.SGD(0.1))
    >>> parts = [[(torch.ones(4, 2), torch.ones(4, 1))] * 3, [(torch.ones(2, 2), torch.ones(2, 1))]]
    >>> _ = daskps.run(store, loop, parts)
    >>> store.version
    3
    """

    def __init__(self, trainer: Any, model: nn.Module) -> None:
        tensors, sparse = named_tensors(model), sparse_embeddings(model)
        arrays = {n: t for n, t in tensors.items() if n not in sparse}
        trained = {n: t for n, t in tensors.items() if t.requires_grad}
        bags = [part for part in model.modules() if isinstance(part, EmbeddingBag)]
        if not trained and not bags:
            raise ValueError("the model has no parameter that requires a gradient")
        buffers = {id(b) for b in model.buffers()}
        self._trainer, self._trained, self._bags = trainer, trained, bags
        out = {name: place_of(name, tensor) for name, tensor in arrays.items()}
        trainer.pull(out=out)
        self._out = {name: out[name] for name in arrays if name in trained}
        self._buffers = {n: out[n] for n, t in arrays.items() if id(t) in buffers}
        self._weight = 0.0
        for name, embedding in sparse.items():
            embedding.register_forward_pre_hook(partial(_bring, trainer, name))
        # Without parameters of its own: bags have none.
        super().__init__(list(trained.values()) or [torch.empty(0)], {"lr": 1.0})
        self._is_made = True

    def step(
        self, closure: Callable[[], Any] | None = None, *, weight: float = 1.0
    ) -> Any:
        """Push the gradients, and pull the parameters after this step in place.

        Parameters
        ----------
        closure : callable, optional
            Computes the loss again, and its gradients.
        weight : float
            In the mean of the round under BSP: ``len(batch)`` gives the mean over the
            batches of all trainers. Under SSP and ASP it multiplies the gradient.

        Returns
        -------
        object
            What the closure has returned; None without one.

        Raises
        ------
        ValueError
            Where somebody has changed ``lr``: the rule of the store updates.
        PushRejectedError, RunCancelledError, ShardLostError
            As :meth:`daskps.Trainer.push`.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if any(group["lr"] != 1.0 for group in self.param_groups):
            raise ValueError(
                "the learning rate of this optimizer was changed, and the rule of the "
                "store updates: give the rule one of daskps.optim.schedules as lr= "
                "instead, or call store.scale_lr(factor) between two runs"
            )
        grads = {
            name: gradient_of(name, tensor)
            for name, tensor in self._trained.items()
            if tensor.grad is not None
        }
        for bag in self._bags:
            if (found := bag.take_gradient()) is not None:
                grads[bag.table] = found
        if self._out:
            self._trainer.pushpull(grads, weight=weight, out=self._out)
        else:
            self._trainer.push(grads, weight=weight)
        if self._buffers:
            self._weight += weight
            self._trainer.leave(self._buffers, weight=self._weight)
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse more parameters: those of the model are all.

        Raises
        ------
        TypeError
            Once the optimizer is made.
        """
        if getattr(self, "_is_made", False):
            raise TypeError(
                "the parameters of this optimizer are those of its model; give them "
                "rules by their names in daskps.torch.create(optimizer=...)"
            )
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Refuse: the state is in the store.

        Raises
        ------
        TypeError
            Naming the way to save it.
        """
        raise TypeError(
            "the state of this optimizer is in the store: call store.save(url), and "
            "daskps.restore(url) for a store that goes on with it"
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Refuse: the state is in the store.

        Raises
        ------
        TypeError
            As :meth:`state_dict`.
        """
        del state_dict
        self.state_dict()


def _bring(trainer: Any, name: str, embedding: Any, args: tuple[Any, ...]) -> None:
    """Pull the rows that a forward pass of an embedding reads, in place."""
    ids = torch.unique(args[0])
    rows = trainer.pull((), rows={name: ids.cpu().numpy()})[name]
    with torch.no_grad():
        embedding.weight[ids] = torch.from_numpy(rows).to(embedding.weight.device)
