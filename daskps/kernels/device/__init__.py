"""Loops for devices: PTX, and the same element functions for this processor.

Layer 1, without streams, memory and drivers: a `Launcher` has these. Numba and llvmlite are
imported where a loop is made, and not where it is kept on disk already.
"""

from daskps.kernels.device.kernel import DeviceKernel as DeviceKernel
from daskps.kernels.device.kernel import Launcher as Launcher
from daskps.kernels.device.kernel import build as build
from daskps.kernels.device.loops import DeviceLoop as DeviceLoop

__all__ = ["DeviceKernel", "DeviceLoop", "Launcher", "build"]
