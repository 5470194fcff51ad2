"""PyTorch modules in stores: a torch optimizer over a trainer, and embeddings over tables.

Each function says the same with `daskps.create`, `run` and `train`, and gives the same
numbers. Parameters and gradients in host memory are read and written where they are;
those on a GPU go to a store with ``device="cuda"`` without a copy to the host, and to a
store in host memory by one.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

import daskps
from daskps.store.handle import DEFAULT

if TYPE_CHECKING:
    from collections.abc import Callable

    from daskps.typing import Array

__all__ = ["EmbeddingBag", "Optimizer", "create", "load_into", "train_module", "view"]

#: Rows of a table that are read at a time.
_ROWS = 2**16


def create(module: nn.Module, *, optimizer: Any = None, **options: Any) -> Any:
    """Create a store of all that the `state_dict` of a module names.

    Tied weights are in it once, under their first name. The weight of an embedding with
    ``sparse=True`` becomes a table. Frozen parameters and buffers get no rule: they stay
    as they are, or as :class:`Optimizer` leaves them.

    Parameters
    ----------
    module : torch.nn.Module
        With its initial values.
    optimizer : daskps.optim.Rule or mapping of str to Rule
        The rule of parameters that require a gradient, as in :func:`daskps.create`.
    **options
        As in :func:`daskps.create`.

    Returns
    -------
    ParameterStore
        A handle; with an asynchronous client an awaitable of one.

    Raises
    ------
    LayoutError, StoreExistsError, NotEnoughWorkersError
        As :func:`daskps.create`; a LayoutError also for bfloat16.
    TypeError
        For no module, and for what is no tensor in its `state_dict`.

    Examples
    --------
    >>> model = torch.nn.Linear(2, 1)
    >>> store = create(model, optimizer=daskps.optim.SGD(0.1))
    >>> sorted(store.pull())
    ['bias', 'weight']
    """
    rows = _sparse(module)
    params: dict[str, Any] = {}
    without: dict[str, None] = {}
    for name, tensor in _named(module).items():
        value = params[name] = _array(name, tensor)
        if name in rows:
            n, dim = value.shape
            params[name] = daskps.TableSpec(n, dim, dtype=value.dtype.name, init=value)
        if tensor.is_floating_point() and not tensor.requires_grad:
            without[name] = None
    if optimizer is not None:
        given = optimizer if isinstance(optimizer, Mapping) else {"*": optimizer}
        optimizer = {**without, **given}
    return daskps.create(params, optimizer=optimizer, **options)


def load_into(module: nn.Module, store: Any, *, timeout: Any = DEFAULT) -> Any:
    """Copy the values of a store into a module, in place.

    Parameters
    ----------
    module : torch.nn.Module
        Its `state_dict` has the names of the store.
    store : ParameterStore
        The store; where it has more, that is left out.
    timeout : float, str or None
        Seconds or a duration such as "30s"; None waits for ever.

    Returns
    -------
    torch.nn.Module
        The module; with an asynchronous client an awaitable of it.

    Raises
    ------
    UnknownParameterError, ValueError
        For a name or a shape that the store does not have.
    StoreClosedError, ShardLostError, TimeoutError
        As :meth:`daskps.ParameterStore.pull`.

    Examples
    --------
    >>> model, other = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
    >>> store = create(model)
    >>> bool((load_into(other, store).weight == model.weight).all())
    True
    """
    out = {name: _array(name, tensor) for name, tensor in _named(module).items()}
    tables = {name: out.pop(name) for name in _sparse(module)}
    pull = partial(store.pull, timeout=timeout)
    reads = [partial(pull, out=out)]
    for name, rows in tables.items():
        for lo in range(0, len(rows), _ROWS):
            part = rows[lo : lo + _ROWS]
            ids = np.arange(lo, lo + len(part))
            reads.append(partial(pull, (), rows={name: ids}, out={name: part}))
    first, *others = reads
    found = first()
    if inspect.isawaitable(found):
        return _awaited(found, others, module)
    for read in others:
        read()
    return module


async def _awaited(found: Any, others: Any, module: nn.Module) -> Any:
    """Return a module once all reads of an asynchronous client have ended."""
    await found
    for read in others:
        await read()
    return module


def view(module: nn.Module, store: Any, **options: Any) -> nn.Module:
    """Have a module use a view of a store: one model in memory for all of a machine.

    In the tasks of a prediction, in place of :func:`load_into`, which copies.

    Parameters
    ----------
    module : torch.nn.Module
        Made on the device "meta" it takes no memory of its own. Its parameters and
        buffers are replaced by read-only memory of the view; it is set to evaluation.
    store : ParameterStore
        The store, of a client that is not asynchronous.
    **options
        As in :meth:`daskps.ParameterStore.view`.

    Returns
    -------
    torch.nn.Module
        The module. A pass that writes into its parameters changes them for the tasks of
        its own process, and for no other.

    Raises
    ------
    UnknownParameterError
        For a name that the store does not have, and for that of a table.
    StoreClosedError, ShardLostError, TimeoutError
        As :meth:`daskps.ParameterStore.view`.
    ValueError
        For a module of other shapes.

    Examples
    --------
    >>> store = create(torch.nn.Linear(2, 1), optimizer=daskps.optim.SGD(0.1))
    >>> def predict(params, block):
    ...     model = torch.nn.Linear(2, 1, device="meta")
    ...     with torch.no_grad():
    ...         return view(model, store)(torch.as_tensor(block).float()).numpy()
    >>> import dask.array as da
    >>> meta = np.empty((0, 1), "f4")
    >>> daskps.predict(store, predict, da.ones((4, 2), chunks=2), meta=meta).compute().shape
    (4, 1)
    """
    named = _named(module)
    first = {id(tensor): name for name, tensor in named.items()}
    found = store.view([*named], **options)
    with warnings.catch_warnings():
        # Nobody is to write there.
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        state = {name: torch.from_numpy(array) for name, array in found.items()}
    for name, tensor in module.state_dict(keep_vars=True).items():
        state[name] = state[first[id(tensor)]]
    try:
        module.load_state_dict(state, assign=True)
    except RuntimeError as error:
        raise ValueError(f"store {store.name!r} has other shapes: {error}") from None
    return module.requires_grad_(requires_grad=False).eval()


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
    >>> store = create(torch.nn.Linear(2, 1), optimizer=daskps.optim.SGD(0.1))
    >>> parts = [[(torch.ones(4, 2), torch.ones(4, 1))] * 3, [(torch.ones(2, 2), torch.ones(2, 1))]]
    >>> _ = daskps.run(store, loop, parts)
    >>> store.version
    3
    """

    def __init__(self, trainer: Any, model: nn.Module) -> None:
        tensors, sparse = _named(model), _sparse(model)
        arrays = {n: t for n, t in tensors.items() if n not in sparse}
        trained = {n: t for n, t in tensors.items() if t.requires_grad}
        if not trained and not [*_bags(model)]:
            raise ValueError("the model has no parameter that requires a gradient")
        buffers = {id(b) for b in model.buffers()}
        self._trainer, self._trained = trainer, trained
        self._bags = [*_bags(model)]
        out = {name: _place(name, tensor) for name, tensor in arrays.items()}
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
            name: _gradient(name, tensor)
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


def train_module(  # noqa: PLR0917 - as `daskps.train`
    store: Any,
    module_fn: Callable[[], nn.Module],
    loss_fn: Callable[[Any, Any], torch.Tensor],
    X: Any,
    y: Any = None,
    **options: Any,
) -> Any:
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
    >>> store = create(torch.nn.Linear(3, 1), optimizer=daskps.optim.SGD(0.1))
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
            n: _gradient(n, given[n]) for n in trained if given[n].grad is not None
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
    if sparse := _sparse(module):
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


def _named(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return all that the state of a module names, tied tensors once."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, found {type(module).__name__}")
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(
                f"{name!r} in the state of the module is a {type(tensor).__name__}, and "
                f"stores hold tensors; leave it out of get_extra_state"
            )
        found.setdefault(id(tensor), (name, tensor))
    return dict(found.values())


def _sparse(module: nn.Module) -> dict[str, nn.Module]:
    """Return the embeddings with sparse gradients, by the name of their weight."""
    found = {}
    names = {id(tensor): name for name, tensor in _named(module).items()}
    for part in module.modules():
        if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.sparse:
            found[names[id(part.weight)]] = part
    return found


def _bags(module: nn.Module) -> Iterator[EmbeddingBag]:
    return (part for part in module.modules() if isinstance(part, EmbeddingBag))


def _array(name: str, tensor: torch.Tensor) -> Array:
    """Return a tensor as an array of NumPy: in host memory the same memory."""
    if tensor.dtype == torch.bfloat16:
        raise daskps.LayoutError(
            f"{name!r} is bfloat16, which no store holds; keep the model in float32, with "
            f"module.float(), and compute in bfloat16 under torch.autocast"
        )
    found: Array = tensor.detach().cpu().numpy()
    return found


def _place(name: str, tensor: torch.Tensor) -> Any:
    """Return what a pull writes to: the memory of a tensor, wherever it is."""
    return tensor.detach() if tensor.is_cuda else _array(name, tensor)


def _gradient(name: str, tensor: torch.Tensor) -> Any:
    """Return the gradient of a tensor as it is pushed."""
    grad: Any = tensor.grad
    if grad.is_sparse:
        ids, values = grad._indices()[0], grad._values()  # noqa: SLF001 - torch's own names; coalesced ones would cost a sort
        return daskps.RowGrad(ids.cpu().numpy(), values.cpu().numpy())
    return _place(name, grad)


def _bring(trainer: Any, name: str, embedding: Any, args: tuple[Any, ...]) -> None:
    """Pull the rows that a forward pass of an embedding reads, in place."""
    ids = torch.unique(args[0])
    rows = trainer.pull((), rows={name: ids.cpu().numpy()})[name]
    with torch.no_grad():
        embedding.weight[ids] = torch.from_numpy(rows).to(embedding.weight.device)
