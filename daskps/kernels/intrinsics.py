"""Functions of :mod:`daskps.kernels.system`, compiled, for generated modules only."""

from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]  # has no type hints
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

#: Of `clock_gettime`.
_MONOTONIC = 1
_BYTE, _INT, _WORD = ir.IntType(8).as_pointer(), ir.IntType(32), ir.IntType(64)


def _foreign(builder: Any, name: str, result: Any, kinds: Any) -> Any:
    """Return a function of the C library, which every process has loaded."""
    declare: Any = cgutils.get_or_insert_function
    return declare(builder.module, ir.FunctionType(result, kinds), name)


@intrinsic
def load(_: Any, address: Any) -> Any:
    """Return the int64 at an address, before anything that comes later is read."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        at = builder.inttoptr(args[0], _WORD.as_pointer())
        return builder.load_atomic(at, ordering="acquire", align=8)

    return types.int64(types.int64), generate


@intrinsic
def store(_: Any, address: Any, value: Any) -> Any:
    """Write an int64 to an address, after all that was written before."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        at = builder.inttoptr(args[0], _WORD.as_pointer())
        builder.store_atomic(args[1], at, ordering="release", align=8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def settle(_: Any) -> Any:
    """Let nothing that was read so far be read any later than this."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.fence("acquire")
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def hold(_: Any) -> Any:
    """Let nothing that is written later be written before this."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.fence("release")
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def copy(_: Any, to: Any, source: Any, nbytes: Any) -> Any:
    """Copy bytes from one address to another; the two may overlap."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        move = _foreign(builder, "memmove", _BYTE, (_BYTE, _BYTE, _WORD))
        to, source = (builder.inttoptr(arg, _BYTE) for arg in args[:2])
        builder.call(move, (to, source, args[2]))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


def _transfer(name: str) -> Any:
    """Return `recv` or `send` of the C library."""

    def typed(_: Any, fd: Any, address: Any, nbytes: Any, flags: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            fd, address, nbytes, flags = args
            call = _foreign(builder, name, _WORD, (_INT, _BYTE, _WORD, _INT))
            narrow = [builder.trunc(value, _INT) for value in (fd, flags)]
            where = builder.inttoptr(address, _BYTE)
            return builder.call(call, (narrow[0], where, nbytes, narrow[1]))

        return types.int64(*[types.int64] * 4), generate

    return intrinsic(typed)


recv = _transfer("recv")
send = _transfer("send")


@intrinsic
def poll(_: Any, address: Any, milliseconds: Any) -> Any:
    """Wait for one descriptor."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        call = _foreign(builder, "poll", _INT, (_BYTE, _WORD, _INT))
        where, limit = builder.inttoptr(args[0], _BYTE), builder.trunc(args[1], _INT)
        found = builder.call(call, (where, _WORD(1), limit))
        return builder.sext(found, _WORD)

    return types.int64(types.int64, types.int64), generate


@intrinsic
def epoll_wait(_: Any, fd: Any, address: Any, most: Any, milliseconds: Any) -> Any:
    """Wait for one of many descriptors."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        call = _foreign(builder, "epoll_wait", _INT, (_INT, _BYTE, _INT, _INT))
        fd, most, limit = (builder.trunc(args[i], _INT) for i in (0, 2, 3))
        found = builder.call(call, (fd, builder.inttoptr(args[1], _BYTE), most, limit))
        return builder.sext(found, _WORD)

    return types.int64(*[types.int64] * 4), generate


@intrinsic
def monotonic(_: Any) -> Any:
    """Return milliseconds of the clock that never goes back."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        call = _foreign(builder, "clock_gettime", _INT, (_INT, _BYTE))
        allocate: Any = cgutils.alloca_once
        time = allocate(builder, _WORD, size=2)
        builder.call(call, (_INT(_MONOTONIC), builder.bitcast(time, _BYTE)))
        seconds, rest = (builder.load(builder.gep(time, [_INT(i)])) for i in range(2))
        millis = builder.sdiv(rest, _WORD(1_000_000))
        return builder.add(builder.mul(seconds, _WORD(1000)), millis)

    return types.int64(), generate


@intrinsic
def errno(_: Any) -> Any:
    """Return why the last of these calls failed in this thread."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        where = _foreign(builder, "__errno_location", _INT.as_pointer(), ())
        return builder.sext(builder.load(builder.call(where, ())), _WORD)

    return types.int64(), generate
