"""Rows of memory: asked for in advance, and moved; imported by generated kernels only.

Rows that are written past the caches are whole lines: the caller sees to that, and to a
fence after them (:mod:`daskps.kernels.streaming`).
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]  # has no type hints
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_LINE = 64
#: Of one row. Processors find the lines after these themselves.
_LINES = 16
_EVERY_CACHE, _DATA = 3, 1


def _ahead(name: str, to_write: int) -> Any:
    """Return a function that begins to bring the first cache lines of a row.

    It takes a contiguous array, shape (n_rows, dim), and a number. Nothing is read: any
    number is harmless.
    """

    def typed(_: Any, table: Any, row: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
            start, nbytes = _row(context, builder, signature.args[0], args)
            kind = ir.FunctionType(ir.VoidType(), (byte, number, number, number))
            prefetch = builder.module.declare_intrinsic("llvm.prefetch", (byte,), kind)
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
    start = builder.bitcast(array.data, ir.IntType(8).as_pointer())
    return builder.gep(start, [builder.mul(nbytes, row)]), nbytes


#: Of a row that will be updated, and of one that is only read: other processors then
#: keep what they have of it.
fetch, fetch_to_read = _ahead("fetch", 1), _ahead("fetch_to_read", 0)


@intrinsic
def copy_row(_: Any, out: Any, to: Any, table: Any, row: Any) -> Any:
    """Copy a row into a row of another contiguous array, of rows as long."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        byte, word = ir.IntType(8).as_pointer(), ir.IntType(64)
        kinds = signature.args
        start, nbytes = _row(context, builder, kinds[2], args[2:])
        target, _ = _row(context, builder, kinds[0], args[:2])
        copy = builder.module.declare_intrinsic("llvm.memcpy", [byte, byte, word])
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
        line = ir.VectorType(ir.IntType(64), _LINE // 8).as_pointer()
        source, target = builder.bitcast(source, line), builder.bitcast(target, line)
        hint = builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)])
        n_lines = builder.udiv(nbytes, nbytes.type(_LINE))
        with cgutils.for_range(builder, n_lines) as loop:
            made = builder.load(builder.gep(source, [loop.index]))
            made.align = 1
            where = builder.gep(target, [loop.index])
            builder.store(made, where, align=_LINE).set_metadata("nontemporal", hint)
        return context.get_dummy_value()

    return types.void(out, to, table, row), generate
