"""Functions for generated kernels, which alone import them: they need Numba.

Memory is written in order, asked for in advance, and moved, past the caches too: then in
whole lines, which the caller sees to, and to a fence after them. :mod:`daskps.kernels.system`
has some of them as Python has them.
"""

from __future__ import annotations

import platform
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]  # has no type hints
from numba import types
from numba.core import cgutils
from numba.core.errors import TypingError
from numba.extending import intrinsic, overload

_WORD, _BYTE = ir.IntType(64), ir.IntType(8).as_pointer()
_LINE = 64
#: Of one row. Processors find the lines after these themselves.
_LINES = 16
_EVERY_CACHE, _DATA = 3, 1
_X86 = ("x86_64", "AMD64")
_SFENCE = "llvm.x86.sse.sfence"


def weight(result: Any) -> Any:
    """Return the weight from what an update without slots gave.

    Parameters
    ----------
    result : float or tuple of one float
        `w` or `(w,)`.

    Returns
    -------
    float
        The weight.
    """
    return result[0] if isinstance(result, tuple) else result


@overload(weight)
def _weight(result: Any) -> Any:
    """Choose at compile time; Numba wants signatures equal to the letter."""

    def bare(result: Any) -> Any:
        return result

    def single(result: Any) -> Any:
        return result[0]

    if not isinstance(result, types.BaseTuple):
        return bare
    if len(result) != 1:
        raise TypingError(f"an update without slots returned {len(result)} values")
    return single


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


def _stream_lines(
    builder: Any, target: Any, source: Any, n_lines: Any, *, align: int
) -> None:
    """Write full cache lines past the caches."""
    line = ir.VectorType(_WORD, _LINE // 8).as_pointer()
    source, target = builder.bitcast(source, line), builder.bitcast(target, line)
    hint = builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)])
    with cgutils.for_range(builder, n_lines) as loop:
        made = builder.load(builder.gep(source, [loop.index]))
        made.align = align
        where = builder.gep(target, [loop.index])
        builder.store(made, where, align=_LINE).set_metadata("nontemporal", hint)


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
        target, source = (
            context.make_array(kind)(context, builder, value).data
            for kind, value in zip(kinds, args[:2], strict=True)
        )
        count = builder.udiv(args[2], ir.Constant(args[2].type, _LINE // nbytes))
        align = nbytes if kinds[1].aligned else 1
        _stream_lines(builder, target, source, count, align=align)
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


def _ahead(name: str, to_write: int) -> Any:
    """Return a function that begins to bring the first cache lines of a row.

    It takes a contiguous array, shape (n_rows, dim), and a number. Nothing is read: any
    number is harmless.
    """

    def typed(_: Any, table: Any, row: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            number = ir.IntType(32)
            start, nbytes = _row(context, builder, signature.args[0], args)
            kind = ir.FunctionType(ir.VoidType(), (_BYTE, number, number, number))
            prefetch = builder.module.declare_intrinsic("llvm.prefetch", (_BYTE,), kind)
            how = [number(value) for value in (to_write, _EVERY_CACHE, _DATA)]
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

    typed.__name__ = name
    return intrinsic(typed)


def _row(context: Any, builder: Any, kind: Any, args: Any) -> Any:
    """Return where a row of a table starts, and how many bytes it has."""
    table, row = args
    array = context.make_array(kind)(context, builder, table)
    nbytes = builder.extract_value(array.strides, 0)
    start = builder.bitcast(array.data, _BYTE)
    return builder.gep(start, [builder.mul(nbytes, row)]), nbytes


#: Of a row that will be updated, and of one that is only read: other processors then
#: keep what they have of it.
fetch, fetch_to_read = _ahead("fetch", 1), _ahead("fetch_to_read", 0)


@intrinsic
def copy_row(_: Any, out: Any, to: Any, table: Any, row: Any) -> Any:
    """Copy a row into a row of another contiguous array, of rows as long."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kinds = signature.args
        start, nbytes = _row(context, builder, kinds[2], args[2:])
        target, _ = _row(context, builder, kinds[0], args[:2])
        copy = builder.module.declare_intrinsic("llvm.memcpy", [_BYTE, _BYTE, _WORD])
        builder.call(copy, [target, start, nbytes, ir.IntType(1)(0)])
        return context.get_dummy_value()

    return types.void(out, to, table, row), generate


@intrinsic
def copy_row_past(_: Any, out: Any, to: Any, table: Any, row: Any) -> Any:
    """Copy a row as `copy_row`, past the caches.

    A row has a multiple of 64 bytes, and `out` begins at one.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kinds = signature.args
        source, nbytes = _row(context, builder, kinds[2], args[2:])
        target, _ = _row(context, builder, kinds[0], args[:2])
        n_lines = builder.udiv(nbytes, nbytes.type(_LINE))
        _stream_lines(builder, target, source, n_lines, align=1)
        return context.get_dummy_value()

    return types.void(out, to, table, row), generate
