"""LLVM code of kernels: threads of a grid that go over the elements of a loop."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Form:
    """How the loop of an element function is called."""

    #: The kernel.
    name: str
    #: Of the arguments: dtypes such as "f4" and "i8", with a star where they are pointers.
    kinds: tuple[str, ...]
    #: Each row of elements has a row of so many int64 numbers in a table, which is the first
    #: argument; it begins with the number of its columns. 0 without such a table.
    width: int = 0
    #: Whether the second argument is a flag, which stops the loop where it is not 0.
    guarded: bool = False
    #: The rule of the loop, in messages.
    what: str = field(default="a device loop", compare=False, repr=False)
    #: Text of the generated module that has the element function, as `element`.
    source: str = field(default="", repr=False)


def kernel(form: Form) -> str:
    """Return the kernel that calls `element`: columns along x, and rows along y.

    Parameters
    ----------
    form : Form
        The loop.

    Returns
    -------
    str
        LLVM code, without a target.
    """
    from llvmlite import ir  # type: ignore[import-untyped]

    module, pointer, long = ir.Module(), ir.PointerType(), ir.IntType(64)
    floats = {"f4": ir.FloatType(), "f8": ir.DoubleType()}
    types = [
        pointer if kind[-1] == "*" else floats.get(kind, ir.IntType(8 * int(kind[1:])))
        for kind in form.kinds
    ]
    number = ir.IntType(32)
    kind = ir.FunctionType(number, [pointer, pointer, long, long, *types])
    element = ir.Function(module, kind, "element")
    kind = ir.FunctionType(ir.VoidType(), [long, long, *types])
    made = ir.Function(module, kind, form.name)
    made.calling_convention = "ptx_kernel"
    rows, columns, *args = made.args
    for argument, of in zip(args, types, strict=True):
        if of is pointer:
            # Each number of a table's row is read once.
            argument.add_attribute("noalias")
    builder = ir.IRBuilder(made.append_basic_block())
    # llvmlite before 0.46 writes `ptr*` for memory of a pointer, which LLVM refuses.
    unused = builder.alloca(long)
    unused.type = pointer

    def load(numbers: Any, index: Any) -> Any:
        place = builder.gep(numbers, [index], source_etype=long)
        return builder.load(place, align=8, typ=long)

    def length(k: Any) -> Any:
        """Return how many columns a row has."""
        n = load(args[0], builder.mul(k, long(form.width))) if form.width else columns
        if not form.guarded:
            return n
        clear = builder.icmp_signed("==", load(args[1], long(0)), long(0))
        return builder.select(clear, n, long(0))

    with (
        _along(builder, "y", rows) as (k, _),
        _along(builder, "x", length(k)) as (j, _),
    ):
        builder.call(element, [unused, unused, k, j, *args])
    builder.ret_void()
    return str(module)


def _along(builder: Any, axis: str, stop: Any) -> Any:
    """Return the loop of a thread along an axis of the grid, in steps of it."""
    from llvmlite import ir
    from numba.core import cgutils

    tools: Any = cgutils
    kind, read = ir.FunctionType(ir.IntType(32), []), {}
    for name in ("tid", "ntid", "ctaid", "nctaid"):
        full = f"llvm.nvvm.read.ptx.sreg.{name}.{axis}"
        register = tools.get_or_insert_function(builder.module, kind, full)
        read[name] = builder.zext(builder.call(register, []), stop.type)
    first = builder.add(builder.mul(read["ctaid"], read["ntid"]), read["tid"])
    step = builder.mul(read["ntid"], read["nctaid"])
    return tools.for_range_slice(builder, first, stop, step, stop.type)
