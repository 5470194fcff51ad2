"""Arrays in messages: small ones inside, large ones as frames of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from daskps import errors
from daskps.cluster.upstream import frame, unframe

if TYPE_CHECKING:
    from daskps.typing import Array

#: Arrays up to this size travel inside the message, larger ones as frames of their
#: own without a copy. (Wrapping an array costs about as much as copying 16 kB.)
INLINE_NBYTES = 16_384


def pack_array(array: Array) -> Any:
    """Return an array as bytes, or wrapped to travel as a frame of its own."""
    return array.tobytes() if array.nbytes <= INLINE_NBYTES else frame(array)


def unpack_array(data: Any, dtype: str) -> Array:
    """Rebuild an array, 1-D where it was small, from :func:`pack_array`."""
    if isinstance(data, bytes):
        return np.frombuffer(data, dtype=dtype)
    data = unframe(data)
    if not isinstance(data, np.ndarray) or data.dtype != dtype:
        raise errors.PushRejectedError(
            f"expected an array of {dtype}, found {getattr(data, 'dtype', type(data))}"
        )
    return data
