"""What generated kernels ask memory for in advance; imported by them only."""

from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]  # has no type hints
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_LINE = 64
#: Of one row. Processors find the lines after these themselves.
_LINES = 16
_TO_WRITE, _EVERY_CACHE, _DATA = 1, 3, 1


@intrinsic
def fetch(_: Any, table: Any, row: Any) -> Any:
    """Begin to bring the first cache lines of a row that will be updated.

    Parameters
    ----------
    table : ndarray, shape (n_rows, dim)
        Contiguous. Nothing is read: any row number is harmless.
    row : int
        Which one.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        array = context.make_array(signature.args[0])(context, builder, args[0])
        nbytes = builder.extract_value(array.strides, 0)
        kind = ir.FunctionType(ir.VoidType(), (byte, number, number, number))
        prefetch = builder.module.declare_intrinsic("llvm.prefetch", (byte,), kind)
        how = [number(value) for value in (_TO_WRITE, _EVERY_CACHE, _DATA)]
        start = builder.gep(
            builder.bitcast(array.data, byte), [builder.mul(nbytes, args[1])]
        )
        lines = builder.udiv(
            builder.add(nbytes, nbytes.type(_LINE - 1)), nbytes.type(_LINE)
        )
        most = nbytes.type(_LINES)
        few = builder.select(builder.icmp_unsigned("<", lines, most), lines, most)
        with cgutils.for_range(builder, few) as loop:
            offset = builder.mul(loop.index, loop.index.type(_LINE))
            builder.call(prefetch, [builder.gep(start, [offset]), *how])
        return context.get_dummy_value()

    return types.void(table, row), generate
