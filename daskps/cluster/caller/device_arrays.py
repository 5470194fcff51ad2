"""Arrays of a device that a caller gives or gets.

They stay there where the store is on that device and this process owns all of its shards:
its calls move nothing to the host then. Everywhere else they come to the host first.
"""

from __future__ import annotations

import threading
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from daskps import backend, config
from daskps.cluster.host.node import HOSTS
from daskps.errors import PushRejectedError
from daskps.shards.arrays.device import DeviceMemory

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from daskps.typing import Array

#: By device, for looks at what callers bring; one call at a time uses it.
_lookers: Final[dict[str, DeviceMemory]] = {}
_lock: Final = threading.Lock()


def _is_near(device: str, owners: Sequence[str]) -> bool:
    """Return whether a store is on a device, and this process owns all of its shards."""
    if not device or not config.load().process_carrier:
        return False
    return all(worker in HOSTS for worker in owners)


def kept(device: str, owners: Sequence[str], value: Any) -> Array | None:
    """Return an array of a store's device, contiguous, if it can stay there.

    Parameters
    ----------
    device : str
        That of the store; "" for host memory.
    owners : sequence of str
        The owners of its shards.
    value : object
        An array of any library.

    Returns
    -------
    ndarray or None
        None where it has to come to the host.

    Raises
    ------
    PushRejectedError
        For an array of another device of this process, naming both.
    """
    if not _is_near(device, owners) or backend.device_of(value) is None:
        return None
    try:
        found: Any = backend.find(device).adopt(value)
    except ValueError as error:
        raise PushRejectedError(
            f"an array cannot be taken: {error}; nothing was applied, copy it there"
        ) from error
    return found if found is not None and found.flags.c_contiguous else None


def are_finite(arrays: Sequence[Array], *, look: bool = True) -> bool:
    """Return whether arrays of one device have no NaN and no infinity.

    Without `look` it only waits until all is done that this thread has launched for
    them: any other thread may serve their shards, and knows nothing of its streams.
    """
    device = backend.device_of(arrays[0])
    if device is None:
        raise TypeError("an array of no device")
    with _lock:
        looker = _lookers.get(device.name)
        if looker is None:
            looker = _lookers.setdefault(device.name, DeviceMemory(device))
        for array in map(looker.bring, arrays):
            if look:
                looker.look(array)
        return looker.wait()


def on_host(arrays: Mapping[Any, Any]) -> Mapping[Any, Array]:
    """Return arrays with those of a device brought to the host."""
    if all(type(array) is np.ndarray for array in arrays.values()):
        return arrays
    found = {}
    for name, array in arrays.items():
        here = backend.on_host(array)
        found[name] = array if here is None else here
    return found


def overlap_of_devices(arrays: Iterable[tuple[Any, Any]]) -> tuple[Any, Any] | None:
    """Return the names of two contiguous arrays of a device that share memory."""
    found = []
    for number, (name, array) in enumerate(arrays):
        device = None if type(array) is np.ndarray else backend.device_of(array)
        adopted: Any = None if device is None else device.adopt(array)
        if device is not None and array.size and adopted.flags.c_contiguous:
            with device.lend() as stream:
                start = stream.address(adopted)
            found.append((device.name, start, start + adopted.nbytes, number, name))
    for before, after in pairwise(sorted(found)):
        if before[0] == after[0] and after[1] < before[2]:
            return before[-1], after[-1]
    return None


def put(out: Any, values: Array) -> None:
    """Copy an array in host memory to a caller's, wherever that is."""
    device = None if type(out) is np.ndarray else backend.device_of(out)
    if device is None:
        np.copyto(out, values)
    else:
        adopted: Any = device.adopt(out)
        device.put(adopted, np.ascontiguousarray(values))
