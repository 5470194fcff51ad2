"""Modules of torch into stores and back: by copies, and by views."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

import daskps
from daskps.store.handle import DEFAULT

if TYPE_CHECKING:
    from daskps.typing import Array


def create(
    module: nn.Module, *, optimizer: Any = None, **options: Any
) -> daskps.ParameterStore:
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
    rows = sparse_embeddings(module)
    params: dict[str, Any] = {}
    without: dict[str, None] = {}
    for name, tensor in named_tensors(module).items():
        value = params[name] = array_of(name, tensor)
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
    out = {
        name: array_of(name, tensor) for name, tensor in named_tensors(module).items()
    }
    rows = {name: np.arange(len(out[name])) for name in sparse_embeddings(module)}
    found = store.pull(rows=rows, out=out, timeout=timeout)
    return _filled(found, module) if inspect.isawaitable(found) else module


async def _filled(found: Any, module: nn.Module) -> Any:
    """Return a module once the read of an asynchronous client has ended."""
    await found
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
    named = named_tensors(module)
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


def named_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
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


def sparse_embeddings(module: nn.Module) -> dict[str, nn.Module]:
    """Return the embeddings with sparse gradients, by the name of their weight."""
    found = {}
    names = {id(tensor): name for name, tensor in named_tensors(module).items()}
    for part in module.modules():
        if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.sparse:
            found[names[id(part.weight)]] = part
    return found


def array_of(name: str, tensor: torch.Tensor) -> Array:
    """Return a tensor as an array of NumPy: in host memory the same memory."""
    if tensor.dtype == torch.bfloat16:
        raise daskps.LayoutError(
            f"{name!r} is bfloat16, which no store holds; keep the model in float32, with "
            f"module.float(), and compute in bfloat16 under torch.autocast"
        )
    found: Array = tensor.detach().cpu().numpy()
    return found


def place_of(name: str, tensor: torch.Tensor) -> Any:
    """Return what a pull writes to: the memory of a tensor, wherever it is."""
    return tensor.detach() if tensor.is_cuda else array_of(name, tensor)


def gradient_of(name: str, tensor: torch.Tensor) -> Any:
    """Return the gradient of a tensor as it is pushed."""
    grad: Any = tensor.grad
    if grad.is_sparse:
        ids, values = grad._indices()[0], grad._values()  # noqa: SLF001 - torch's own names; coalesced ones would cost a sort
        return daskps.RowGrad(ids.cpu().numpy(), values.cpu().numpy())
    return place_of(name, grad)
