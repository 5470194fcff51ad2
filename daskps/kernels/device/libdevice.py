"""NVIDIA's library of functions such as exp, where an installation has it."""

from __future__ import annotations

import os


def read() -> bytes | None:
    """Return the library.

    Returns
    -------
    bytes or None
        LLVM's bitcode; None where it is not found.
    """
    try:
        # Comes with CuPy.
        from cuda.pathfinder import find_bitcode_lib  # type: ignore[import-not-found]

        path: str = find_bitcode_lib("device")
    except Exception:  # noqa: BLE001  (its own errors, of every kind)
        home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
        path = os.path.join(home, "nvvm", "libdevice", "libdevice.10.bc")
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return None
