"""Functions of :mod:`daskps.kernels.system`, compiled, for generated modules only."""

from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]  # has no type hints
from numba import types
from numba.extending import intrinsic

_WORD = ir.IntType(64)


@intrinsic
def store(_: Any, address: Any, value: Any) -> Any:
    """Write an int64 to an address, after all that was written before."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        at = builder.inttoptr(args[0], _WORD.as_pointer())
        builder.store_atomic(args[1], at, ordering="release", align=8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def hold(_: Any) -> Any:
    """Let nothing that is written later be written before this."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.fence("release")
        return context.get_dummy_value()

    return types.void(), generate
