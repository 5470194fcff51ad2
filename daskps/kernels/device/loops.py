"""Loops over elements, made from one element function for devices and for here."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from daskps.kernels import cache
from daskps.kernels.compiled import module_of, module_source
from daskps.kernels.device import ptx
from daskps.kernels.device.driver import Form

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

#: Where an element function runs here, pointers are addresses.
_SOURCE = """
from daskps.kernels.device.intrinsics import narrow, pointer, scalar, widen
{text}

@inner
def element(k, j, {names}):
    scalar()
{body}

@loop
def host(order: IDS, columns: INT, {typed}):
    for i in range(order.size):
        k, j = order[i] // columns, order[i] % columns
        if j < ({length}):
            element(k, j, {given})
"""


@dataclass(frozen=True)
class DeviceLoop(Form):
    """A loop over rows and columns; elements are computed alone and in any order.

    Its kernel takes int64 numbers of rows and columns, and then its arguments. Threads go
    over columns along x and over rows along y, in steps of the grid.
    """

    def ptx(self, cache_dir: str | None = None) -> str:
        """Return its PTX, the same text for all devices.

        Parameters
        ----------
        cache_dir : str, optional
            Where it is kept between processes, as in `build`.

        Returns
        -------
        str
            The text of one kernel.

        Raises
        ------
        TypeError
            If there is none, see `daskps.kernels.device.ptx`.
        """
        return _ptx(self, cache_dir)

    def check(self, cache_dir: str | None = None) -> None:
        """Refuse a loop that devices have not.

        Parameters
        ----------
        cache_dir : str, optional
            As in `ptx`.

        Raises
        ------
        TypeError
            As `ptx`, but for the lack of NVIDIA's library.
        """
        ptx.element_code(self, cache_dir)

    def host(self, cache_dir: str | None = None) -> Callable[..., None]:
        """Return a function that goes over elements here, in an order that it is given.

        Parameters
        ----------
        cache_dir : str, optional
            As in `ptx`.

        Returns
        -------
        callable
            `(order, columns, *args)`: an int64 array of columns times row plus column, how
            many columns the longest row has, and the arguments, addresses for pointers.

        Raises
        ------
        TypeError
            If Numba cannot compile it.
        """
        return module_of(self.source, cache_dir).entry("host")


def numpy_type(kind: str) -> str:
    """Return the text of the type of numbers of a kind, or of what it points to."""
    return f"np.{np.dtype(kind.rstrip('*'))}"


def loop_of(
    name: str,
    text: str,
    arguments: Mapping[str, str],
    body: Sequence[str],
    **form: Any,
) -> DeviceLoop:
    """Return the loop of the text of an element function.

    Parameters
    ----------
    name : str
        Of the kernel.
    text : str
        Definitions that it uses.
    arguments : mapping
        Kinds of its arguments after the row `k` and the column `j`, by their names.
    body : sequence of str
        Lines of Python.
    **form
        More of :class:`~daskps.kernels.device.driver.Form`.

    Returns
    -------
    DeviceLoop
        The loop; nothing is compiled yet.
    """
    loop = DeviceLoop(name, tuple(arguments.values()), **form)
    typed, given = [], []
    for a, kind in arguments.items():
        is_pointer = kind.endswith("*")
        typed.append(f"{a}: {'INT' if is_pointer else f'types.{np.dtype(kind)}'}")
        given.append(f"pointer({a}, {numpy_type(kind)})" if is_pointer else a)
    length = "columns"
    if loop.width:
        length = f"{given[0]}[k * {loop.width}]"
    if loop.guarded:
        length += f" if {given[1]}[0] == 0 else 0"
    source = _SOURCE.format(
        text=text,
        names=", ".join(arguments),
        body="".join(f"    {line}\n" for line in body),
        typed=", ".join(typed),
        length=length,
        given=", ".join(given),
    )
    return replace(loop, source=module_source(source))


@functools.cache
def _ptx(loop: DeviceLoop, cache_dir: str | None) -> str:
    """Return it from the disk, or made."""

    def make() -> str:
        return ptx.to_ptx(ptx.element_code(loop, cache_dir), loop)

    return cache.text_of((loop, loop.source), make, cache_dir)
