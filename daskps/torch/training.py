"""Modules of torch as the gradient of `daskps.train`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import daskps
from daskps.torch.modules import gradient_of, sparse_embeddings

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from daskps.typing import Array


def train_module(  # noqa: PLR0917 - as `daskps.train`
    store: Any,
    module_fn: Callable[[], nn.Module],
    loss_fn: Callable[[Any, Any], torch.Tensor],
    X: Any,
    y: Any = None,
    **options: Any,
) -> daskps.TrainResult:
    """Train a module on the data of a cluster, by :func:`daskps.train`.

    Parameters
    ----------
    store : ParameterStore
        Of the module, see :func:`create`.
    module_fn : callable
        Makes the module, once in each trainer; its values do not matter.
    loss_fn : callable
        ``loss_fn(output, y_batch)``, or ``loss_fn(output)`` without `y`, returns the
        mean loss over the batch. Labels are of shape (n,), also where the output is
        (n, 1).
    X, y
        As in :func:`daskps.train`. Batches of floats come in the dtype of the module's
        parameters, others as int64.
    **options
        As in :func:`daskps.train`.

    Returns
    -------
    TrainResult
        With the losses; with an asynchronous client an awaitable of one.

    Raises
    ------
    TypeError
        For a module whose forward pass changes buffers, such as a batch normalization,
        and for sparse embeddings.
    Exception
        As :func:`daskps.train`.

    Examples
    --------
    >>> store = daskps.torch.create(torch.nn.Linear(3, 1), optimizer=daskps.optim.SGD(0.1))
    >>> X = np.random.default_rng(0).normal(size=(64, 3)).astype("f4")
    >>> y = X @ np.array([1, 2, 3], "f4")
    >>> make, loss = lambda: torch.nn.Linear(3, 1), torch.nn.MSELoss()
    >>> def fit(output, y):
    ...     return loss(output[:, 0], y)
    >>> result = train_module(store, make, fit, X, y, epochs=20, batch_size=16)
    >>> result.history[-1].loss < 0.01
    True
    """
    if isinstance(module_fn, nn.Module):
        raise TypeError(
            f"module_fn makes the module in each trainer, found the module "
            f"{type(module_fn).__name__}; pass a function or class that returns one"
        )
    return daskps.train(store, _Gradient(module_fn, loss_fn), X, y, **options)


class _Gradient:
    """The gradient function of a module, for `daskps.train`."""

    def __init__(self, module_fn: Any, loss_fn: Any) -> None:
        self._make, self._loss = module_fn, loss_fn
        self._module: nn.Module | None = None

    def __call__(
        self, params: Mapping[str, Any], X: Any, y: Any = None
    ) -> tuple[float, dict[str, Array]]:
        """Return the loss of a batch, and the gradients of the module's parameters."""
        if self._module is None:
            self._module = _stateless(self._make())
        trained = {n for n, p in self._module.named_parameters() if p.requires_grad}
        dtype = next((p.dtype for p in self._module.parameters()), torch.float32)
        X, y = (None if a is None else _as_tensor(a, dtype) for a in (X, y))
        given = {
            n: torch.as_tensor(a).requires_grad_(n in trained)
            for n, a in params.items()
        }
        output = torch.func.functional_call(self._module, given, (X,))
        loss = self._loss(output) if y is None else self._loss(output, y)
        loss.backward()
        grads = {
            n: gradient_of(n, given[n]) for n in trained if given[n].grad is not None
        }
        return float(loss.detach()), grads


def _stateless(module: nn.Module) -> nn.Module:
    """Return a module whose forward pass changes nothing, or refuse it."""
    for name, part in module.named_modules():
        if part.training and getattr(part, "track_running_stats", False):
            raise TypeError(
                f"{name or 'the module'} is a {type(part).__name__}, whose statistics "
                f"change with each pass, and train_module has no place for them; write a "
                f"loop with daskps.torch.Optimizer for daskps.run, or call .eval() on it"
            )
    if sparse := sparse_embeddings(module):
        raise TypeError(
            f"{next(iter(sparse))!r} is the weight of an embedding with sparse=True, "
            f"which train_module does not read by rows; write a loop with "
            f"daskps.torch.Optimizer for daskps.run"
        )
    return module


def _as_tensor(batch: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return a batch as a tensor of the kind that modules and losses take."""
    found = torch.as_tensor(batch)
    return found.to(dtype if found.is_floating_point() else torch.int64)
