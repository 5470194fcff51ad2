"""The memory that shards are in: the host's, or that of a device."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from daskps.usercode import user_code

if TYPE_CHECKING:
    from collections.abc import Sequence

    from daskps.backend.stream import Device
    from daskps.typing import Array

#: The kinds of devices, each a module of this package.
KINDS: Final = ("cuda", "fake")


def checked(name: object) -> str:
    """Return the name of a device with its number, "" for host memory.

    Parameters
    ----------
    name : str or None
        "cuda", "cuda:1", "fake", or None.

    Returns
    -------
    str
        "cuda:0" for "cuda".

    Raises
    ------
    ValueError, TypeError
        For anything else, with the choices.

    Examples
    --------
    >>> checked("cuda"), checked("fake:1"), checked(None)
    ('cuda:0', 'fake:1', '')
    """
    if name is None:
        return ""
    choices = 'None, "cuda", "cuda:1" and so on, or "fake"'
    if not isinstance(name, str):
        raise TypeError(f"device must be {choices}, found {type(name).__name__}")
    kind, colon, number = name.partition(":")
    if kind not in KINDS or (colon and not (number.isascii() and number.isdigit())):
        raise ValueError(f"device must be {choices}, found {name!r:.60}")
    return f"{kind}:{int(number or 0)}"


def find(name: str) -> Device:
    """Return a device of this process by its checked name.

    Raises
    ------
    ValueError
        If this process has none, with the reason.
    """
    kind, _, number = name.partition(":")
    try:
        module = importlib.import_module(f"daskps.backend.{kind}")
        found: Device = module.device(int(number))
    except ValueError:
        raise
    except ModuleNotFoundError as error:
        raise ValueError(
            f"no {name}: {error}; install daskps[cu13], or daskps[cu12], beside the driver"
        ) from error
    except Exception as error:
        # CuPy has no driver or no device: errors of its own.
        raise ValueError(f"no {name}: {type(error).__name__}: {error}") from error
    return found


def device_of(array: Any) -> Device | None:
    """Return the device that an array of any library is on, None for host memory.

    Parameters
    ----------
    array : object
        An array of CuPy, torch, JAX or the fake device, or anything else.

    Returns
    -------
    Device or None
        None for anything else too.
    """
    # It takes the module to have made an array of it.
    fake: Any = sys.modules.get("daskps.backend.fake")
    if fake is not None and (found := fake.device_of(array)) is not None:
        device: Device = found
        return device
    if not _is_of_cuda(array):
        return None
    cuda = importlib.import_module("daskps.backend.cuda")
    of_cuda: Device | None = cuda.device_of(array)
    return of_cuda


def _is_of_cuda(array: Any) -> bool:
    """Return whether an array says that it is in memory of a CUDA device."""
    of = getattr(type(array), "__dlpack_device__", None)
    if of is not None:
        return of(array)[0] in (2, 13)
    # Not first: arrays of torch and JAX have it wherever they are.
    return hasattr(type(array), "__cuda_array_interface__")


def on_host(array: Any) -> Array | None:
    """Return an array of a device in host memory; None for what is on no device."""
    device = device_of(array)
    if device is None:
        return None
    adopted: Any = device.adopt(array)
    return device.fetch(adopted)


def stacked(arrays: Sequence[Array]) -> Array:
    """Return copies of arrays of one shape for a user's function, one on the other."""
    device = device_of(arrays[0])
    if device is None:
        return np.stack(arrays)
    out = device.array((len(arrays), *arrays[0].shape), arrays[0].dtype)
    with device.lend() as stream:
        # New memory may be what this thread's own work still has to be done with.
        stream.follow()
        for i, array in enumerate(arrays):
            stream.copy(out[i], array)
        stream.wait()
    return out


def returned(
    value: Any, like: Array, what: str, where: str = "", *, finite: bool = True
) -> Array:
    """Return what a user's function has made, as a new array like another and beside it.

    Parameters
    ----------
    value : array_like
        What it has returned; for an array of a device one of the same device.
    like : Array
        An array of the shape and dtype that are wanted.
    what, where : str
        The function and what it was called for, in messages.
    finite : bool, default True
        Whether NaN and infinity are refused.

    Returns
    -------
    Array
        Contiguous; the device is done with it.

    Raises
    ------
    TypeError, ValueError
        For anything else.
    """
    device = device_of(like)
    with user_code(what):  # an array-like has code of the user's too
        found: Any = np.asarray(value) if device is None else device.adopt(value)
    if found is None:
        raise TypeError(
            f"{what} returned {type(value).__name__}{where}; return an array of the "
            f"device that the arrays are on which it gets"
        )
    is_kind = np.can_cast(found.dtype, like.dtype, "same_kind")
    if found.shape != like.shape or not is_kind:
        raise (ValueError if is_kind else TypeError)(
            f"{what} returned shape {found.shape} and dtype {found.dtype}{where}; return "
            f"an array of shape {like.shape} and {like.dtype}"
        )
    with np.errstate(all="ignore"):
        made: Array = found.astype(like.dtype, order="C")
    if finite and not np.isfinite(made).all():
        raise ValueError(f"{what} returned NaN or Inf (as {like.dtype}){where}")
    if device is not None:
        device.settle()
    return made
