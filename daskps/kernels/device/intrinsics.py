"""Functions of element functions, which generated modules alone import: they need Numba."""

from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]  # has no type hints
from numba import types
from numba.extending import intrinsic

_HALF, _SINGLE, _WORD = ir.HalfType(), ir.FloatType(), ir.IntType(32)


@intrinsic
def scalar(_: Any) -> Any:
    """Keep the function that this is called in as it is: devices have no vectors."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        # Loops are not vectorised where it stands.
        builder.function.attributes.add("noimplicitfloat")
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def pointer(_: Any, address: Any, kind: Any) -> Any:
    """Return a pointer to numbers of a NumPy type, which are in a device's global memory."""
    made = types.CPointer(kind.dtype)  # type: ignore[no-untyped-call]

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        near = context.get_value_type(made)
        there = ir.PointerType(near.pointee, addrspace=1)
        return builder.addrspacecast(builder.inttoptr(args[0], there), near)

    return made(address, kind), generate


@intrinsic
def widen(_: Any, word: Any) -> Any:
    """Return the float32 of the bits of a float16."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fpext(builder.bitcast(args[0], _HALF), _SINGLE)

    return types.float32(word), generate


@intrinsic
def narrow(_: Any, number: Any) -> Any:
    """Return the bits of the float16 that is nearest to a float32 or float64."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        found = args[0]
        if signature.args[0] == types.float64:
            found = _to_odd(builder, found)
        return builder.bitcast(builder.fptrunc(found, _HALF), ir.IntType(16))

    return types.uint16(number), generate


def _to_odd(builder: Any, wide: Any) -> Any:
    """Round a float64 to a float32 whose last bit says that there was more of it.

    Such a one is no tie, and rounds to a float16 as the float64 would: see
    :mod:`daskps.kernels.halves`.
    """
    near = builder.fptrunc(wide, _SINGLE)
    back, bits = builder.fpext(near, wide.type), builder.bitcast(near, _WORD)
    above, below = (builder.fcmp_ordered(than, back, wide) for than in "><")
    negative = builder.fcmp_ordered("<", wide, wide.type(0))
    outward = builder.select(negative, below, above)
    less = builder.select(outward, builder.sub(bits, _WORD(1)), bits)
    inexact = builder.fcmp_ordered("!=", back, wide)
    odd = builder.select(inexact, builder.or_(less, _WORD(1)), bits)
    return builder.bitcast(odd, _SINGLE)
