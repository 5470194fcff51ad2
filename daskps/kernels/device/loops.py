"""Loops over elements, made from one element function for devices and for here."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from daskps.kernels import cache
from daskps.kernels.compiled import module_source
from daskps.kernels.device import ptx

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_ELEMENT = """

@njit(error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)
def element({arguments}):
{body}"""


@dataclass(frozen=True)
class DeviceLoop(ptx.Form):
    """A loop over rows and columns; elements are computed alone and in any order.

    Its kernel takes int64 numbers of rows and columns, and then its arguments. Threads go
    over columns along x and over rows along y, in steps of the grid.
    """

    #: Text of the generated module with its element function.
    source: str = field(kw_only=True, repr=False)

    def ptx(self, cache_dir: str | None = None) -> str:
        """Return its PTX, the same text for all devices.

        Parameters
        ----------
        cache_dir : str, optional
            Where its LLVM code is kept between processes, as in `build`.

        Returns
        -------
        str
            The text of one kernel.

        Raises
        ------
        NoDeviceLoop
            If there is none, see `daskps.kernels.device.ptx`.
        """
        return _ptx(self, cache_dir)

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
        NoDeviceLoop
            As `ptx`, but for what is missing here and not on the processor.
        """
        return _host(self, cache_dir)


def loop_of(
    name: str,
    text: str,
    arguments: Sequence[tuple[str, str]],
    body: str,
    **form: Any,
) -> DeviceLoop:
    """Return the loop of the text of an element function.

    Parameters
    ----------
    name : str
        Of the kernel.
    text : str
        Definitions that it uses.
    arguments : sequence of (str, str)
        Names and kinds of its arguments after the row `k` and the column `j`.
    body : str
        Lines of Python.
    **form
        More of :class:`~daskps.kernels.device.ptx.Form`.

    Returns
    -------
    DeviceLoop
        The loop; nothing is compiled yet.
    """
    names, kinds = zip(*arguments, strict=True)
    element = _ELEMENT.format(arguments=", ".join(["k", "j", *names]), body=body)
    return DeviceLoop(name, kinds, source=module_source(text + element), **form)


@functools.cache
def _code(loop: DeviceLoop, cache_dir: str | None) -> str:
    """Return its LLVM code, which Numba takes most of the time for."""
    key = loop.source, loop.kinds
    make = functools.partial(ptx.element_code, loop.source, loop)
    return cache.text_of(key, make, cache_dir)


@functools.cache
def _ptx(loop: DeviceLoop, cache_dir: str | None) -> str:
    return ptx.to_ptx(_code(loop, cache_dir), loop)


@functools.cache
def _host(loop: DeviceLoop, cache_dir: str | None) -> Callable[..., None]:
    return ptx.to_host(_code(loop, cache_dir), loop)
