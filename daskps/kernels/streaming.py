"""Stores past the caches for generated kernels; only these import it."""

from __future__ import annotations

import platform
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]  # has no type hints
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_LINE = 64
_X86 = ("x86_64", "AMD64")
_SFENCE = "llvm.x86.sse.sfence"


@intrinsic
def stream(_: Any, out: Any, a: Any, n: Any) -> Any:
    """Write the first n elements of `a` to `out`, full cache lines past the caches.

    Not a compiled function around one: that counts references to its arrays, and a
    locked instruction among such stores makes the loop eight times as slow.

    Parameters
    ----------
    out, a : ndarray
        Contiguous, of one dtype; `out` starts at a multiple of 64 bytes.
    n : int
        How many elements, a multiple of 64 bytes.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kinds = signature.args[:2]
        nbytes = kinds[0].dtype.bitwidth // 8
        vector = ir.VectorType(ir.IntType(64), _LINE // 8)
        target, source = (
            builder.bitcast(
                context.make_array(kind)(context, builder, value).data,
                vector.as_pointer(),
            )
            for kind, value in zip(kinds, args[:2], strict=True)
        )
        hint = builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)])
        count = builder.udiv(args[2], ir.Constant(args[2].type, _LINE // nbytes))
        with cgutils.for_range(builder, count) as loop:
            line = builder.load(builder.gep(source, [loop.index]))
            line.align = nbytes if kinds[1].aligned else 1
            to = builder.gep(target, [loop.index])
            builder.store(line, to, align=_LINE).set_metadata("nontemporal", hint)
        return context.get_dummy_value()

    return types.void(out, a, n), generate


@intrinsic
def fence(_: Any) -> Any:
    """Let no later store be seen before those of `stream`.

    Processors that keep all other stores in order have an instruction for just these.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if platform.machine() in _X86:
            kind = ir.FunctionType(ir.VoidType(), ())
            builder.call(builder.module.declare_intrinsic(_SFENCE, (), kind), ())
        else:
            builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate
