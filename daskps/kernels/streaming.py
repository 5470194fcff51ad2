"""What generated kernels write with past the caches; imported by them only."""

from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]  # has no type hints
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

__all__ = ["fence", "stream"]

_LINE = 64


@intrinsic
def stream(_: Any, out: Any, a: Any, n: Any) -> Any:
    """Write the first n elements of `a` to `out`, full cache lines past the caches.

    Not a compiled function around one: that counts references to its arrays, and a
    locked instruction among such stores makes the loop eight times as slow.

    Parameters
    ----------
    out, a : ndarray, float32 or float64
        Contiguous; `out` starts at a multiple of 64 bytes.
    n : int
        How many elements, a multiple of 64 bytes.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kinds = signature.args[:2]
        bits = kinds[0].dtype.bitwidth
        scalar = ir.FloatType() if bits == 32 else ir.DoubleType()
        vector = ir.VectorType(scalar, 8 * _LINE // bits)
        target, source = (
            builder.bitcast(
                context.make_array(kind)(context, builder, value).data,
                vector.as_pointer(),
            )
            for kind, value in zip(kinds, args[:2], strict=True)
        )
        hint = builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)])
        count = builder.udiv(args[2], ir.Constant(args[2].type, vector.count))
        with cgutils.for_range(builder, count) as loop:
            line = builder.load(builder.gep(source, [loop.index]))
            line.align = bits // 8
            to = builder.gep(target, [loop.index])
            builder.store(line, to, align=_LINE).set_metadata("nontemporal", hint)
        return context.get_dummy_value()

    return types.void(out, a, n), generate


@intrinsic
def fence(_: Any) -> Any:
    """Let no later store be seen before those of `stream`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate
