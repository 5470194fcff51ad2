"""LLVM code of element functions, from Numba; machine code of it for devices and for here."""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from daskps.kernels import cache
from daskps.kernels.device import libdevice

if TYPE_CHECKING:
    from collections.abc import Callable

#: The first of Numba whose LLVM writes PTX of it.
_NUMBA: Final = 0, 62
#: The oldest device that drivers of CUDA 13 know: they compile its PTX for any later one.
_DEVICE: Final = "sm_75"
_TARGET: Final = """\
target datalayout = "e-p6:32:32-i64:64-i128:128-i256:256-v16:16-v32:32-n16:32:64"
target triple = "nvptx64-nvidia-cuda"
"""
#: Intrinsics that devices have instructions for, with the bits of any processor. LLVM ends
#: the process at one that it has none for, so all others are refused before.
_PLAIN: Final = re.compile(
    r"llvm\.(sqrt|fabs|copysign|floor|ceil|trunc|rint|nearbyint|lifetime|assume|"
    r"umin|umax|smin|smax|abs)\..*"
)
#: Functions that are one of these.
_ROOTS: Final = {"sqrtf": ("float", "f32"), "sqrt": ("double", "f64")}
#: Functions of NVIDIA's library, which has an f behind the name for float32 too.
_LIBRARY: Final = re.compile(
    r"(exp|exp2|expm1|log|log2|log10|log1p|sin|cos|tan|tanh|sinh|cosh|atan|asin|acos|"
    r"pow|cbrt|erf|hypot|atan2|fmod)f?"
)
_ROOT: Final = """\
define internal {type} @{name}({type} %x) alwaysinline {{
  %y = call {type} @llvm.sqrt.{kind}({type} %x)
  ret {type} %y
}}
declare {type} @llvm.sqrt.{kind}({type})
"""

#: Rows and columns are counted by the threads of a grid, along y and x.
_AXIS: Final = """\
  %tid{x} = call i32 @llvm.nvvm.read.ptx.sreg.tid.{x}()
  %block{x} = call i32 @llvm.nvvm.read.ptx.sreg.ctaid.{x}()
  %size{x} = call i32 @llvm.nvvm.read.ptx.sreg.ntid.{x}()
  %grid{x} = call i32 @llvm.nvvm.read.ptx.sreg.nctaid.{x}()
  %t{x} = zext i32 %tid{x} to i64
  %b{x} = zext i32 %block{x} to i64
  %s{x} = zext i32 %size{x} to i64
  %g{x} = zext i32 %grid{x} to i64
  %before{x} = mul i64 %b{x}, %s{x}
  %first{x} = add i64 %before{x}, %t{x}
  %step{x} = mul i64 %s{x}, %g{x}
"""
_KERNEL: Final = """
define ptx_kernel void @{name}(i64 %rows, i64 %columns{alone}) {{
entry:
  %ret = alloca ptr
  %exc = alloca ptr
{axes}  %any = icmp slt i64 %firsty, %rows
  br i1 %any, label %row, label %done
row:
  %k = phi i64 [ %firsty, %entry ], [ %below, %next ]
{length}  %some = icmp slt i64 %firstx, %n
  br i1 %some, label %column, label %next
column:
  %j = phi i64 [ %firstx, %row ], [ %right, %column ]
  call i32 @element(ptr %ret, ptr %exc, i64 %k, i64 %j{parameters})
  %right = add i64 %j, %stepx
  %more = icmp slt i64 %right, %n
  br i1 %more, label %column, label %next
next:
  %below = add i64 %k, %stepy
  %again = icmp slt i64 %below, %rows
  br i1 %again, label %row, label %done
done:
  ret void
}}
"""
#: Elements of all rows in one order, which somebody has chosen.
_HOST: Final = """
define void @host(ptr %order, i64 %size, i64 %columns{parameters}) {{
entry:
  %ret = alloca ptr
  %exc = alloca ptr
  %any = icmp slt i64 0, %size
  br i1 %any, label %place, label %done
place:
  %i = phi i64 [ 0, %entry ], [ %following, %next ]
  %at = getelementptr i64, ptr %order, i64 %i
  %one = load i64, ptr %at
  %k = sdiv i64 %one, %columns
  %j = srem i64 %one, %columns
{length}  %some = icmp slt i64 %j, %n
  br i1 %some, label %call, label %next
call:
  call i32 @element(ptr %ret, ptr %exc, i64 %k, i64 %j{parameters})
  br label %next
next:
  %following = add i64 %i, 1
  %more = icmp slt i64 %following, %size
  br i1 %more, label %place, label %done
done:
  ret void
}}
"""
#: How many columns a row has: as many as all; as its row of a table begins with; or none
#: where a flag is set.
_EVEN: Final = "  %n = add i64 %columns, 0\n"
_RAGGED: Final = """\
  %offset = mul i64 %k, {width}
  %head = getelementptr i64, ptr %p0, i64 %offset
  %length = load i64, ptr %head
"""
_UNGUARDED: Final = "  %n = add i64 %length, 0\n"
_GUARDED: Final = """\
  %flag = load i64, ptr %p1
  %clear = icmp eq i64 %flag, 0
  %n = select i1 %clear, i64 %length, i64 0
"""
_TYPES: Final = {"f4": "float", "f8": "double"}
_C_TYPES: Final = {"f4": ctypes.c_float, "f8": ctypes.c_double}


class NoDeviceLoop(TypeError):  # noqa: N818  (what there is none of)
    """An update rule has no loop on a device, or this installation cannot make it."""


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
    what: str = "a device loop"


def element_code(source: str, form: Form) -> str:
    """Return the LLVM code of the element function of a generated module.

    Parameters
    ----------
    source : str
        Text of the module, with a function `element` of a row, a column, and arguments.
    form : Form
        The loop.

    Returns
    -------
    str
        Without a target; nothing but `element`, and functions that devices may have.

    Raises
    ------
    NoDeviceLoop
        If Numba cannot compile it or is too old, or a function has no loop on a device.
    """
    import numba
    from numba.core.errors import NumbaError

    if numba.version_info[:2] < _NUMBA:
        raise NoDeviceLoop(
            f"loops on devices need numba >= {'.'.join(map(str, _NUMBA))}, found "
            f"{numba.__version__}; update it"
        )
    dispatcher = cache.load(source, None).__dict__["element"]
    types: Any = numba.types
    kinds = [numba.from_dtype(np.dtype(kind.rstrip("*"))) for kind in form.kinds]
    given = [
        types.CPointer(of) if kind.endswith("*") else of
        for kind, of in zip(form.kinds, kinds, strict=True)
    ]
    signature = types.int64, types.int64, *given
    try:
        dispatcher.compile(signature)
    except NumbaError as error:
        raise NoDeviceLoop(f"{form.what} does not compile: {error}") from error
    code: str = dispatcher.inspect_llvm(signature)
    code = re.sub(
        r"^(target |@_ZN08NumbaEnv|; ModuleID|source_filename).*\n",
        "",
        code,
        flags=re.MULTILINE,
    )
    # Of what else was compiled nothing is called by others.
    code = re.sub(
        r"^define (?:linkonce_odr )?", "define internal ", code, flags=re.MULTILINE
    )
    [symbol] = re.findall(r"^define [^@]*@(\w*7element\w*)\(", code, flags=re.MULTILINE)
    code = code.replace(f"@{symbol}(", "@element(")
    check(code, form.what)
    return code


def _declared(code: str) -> list[str]:
    return sorted(
        set(re.findall(r"^declare [^@]*@([\w.]+)\(", code, flags=re.MULTILINE))
    )


def _in_library(function: str) -> str:
    """Return the name that a function, or an intrinsic, may have in NVIDIA's library."""
    if not function.startswith("llvm."):
        return function
    _, name, kind = (*function.split("."), "")[:3]
    return name + {"f32": "f", "f64": ""}.get(kind, f".{kind}")


def check(code: str, what: str) -> None:
    """Refuse functions that devices have not, and the remainder, which LLVM rounds twice."""
    used = [*_declared(code), *re.findall(r"= (frem) ", code)]
    for name in used:
        if not (
            name in _ROOTS
            or _PLAIN.fullmatch(name)
            or _LIBRARY.fullmatch(_in_library(name))
        ):
            raise NoDeviceLoop(
                f"{what} calls {name!r}, which has no loop on a device: use arithmetic, "
                f"roots, comparisons, exp, log and the like, or a store on hosts"
            )


def _driver(template: str, form: Form, **more: str) -> str:
    """Return the function that goes over elements."""
    types = [
        "ptr" if kind.endswith("*") else _TYPES.get(kind, f"i{8 * int(kind[1:])}")
        for kind in form.kinds
    ]
    parameters = "".join(f", {of} %p{j}" for j, of in enumerate(types))
    # A row of the table is read once: no array overlaps another argument.
    more["alone"] = parameters.replace("ptr", "ptr noalias")
    length = _EVEN
    if form.width:
        length = _RAGGED.format(width=form.width)
        length += _GUARDED if form.guarded else _UNGUARDED
    return template.format(parameters=parameters, length=length, **more)


def _llvm() -> Any:
    """Return llvmlite's binding, which knows devices."""
    import llvmlite.binding as llvm  # type: ignore[import-untyped]

    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    return llvm


def _optimised(llvm: Any, module: Any, machine: Any) -> None:
    module.verify()
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(module, builder)


def to_ptx(code: str, form: Form) -> str:
    """Return PTX of a kernel that calls an element function.

    Parameters
    ----------
    code : str
        From `element_code`.
    form : Form
        The loop.

    Returns
    -------
    str
        PTX 6.3.

    Raises
    ------
    NoDeviceLoop
        If NVIDIA's library is needed, and not found.
    """
    llvm, library = _llvm(), False
    for function in _declared(code):
        if function in _ROOTS:
            of, kind = _ROOTS[function]
            code = re.sub(
                rf"^declare [^@]*@{function}\(.*\n", "", code, flags=re.MULTILINE
            )
            code += _ROOT.format(name=function, type=of, kind=kind)
        elif not _PLAIN.fullmatch(function):
            library = True
            code = code.replace(f"@{function}(", f"@__nv_{_in_library(function)}(")
    axes = "".join(_AXIS.format(x=axis) for axis in "yx")
    registers = sorted(set(re.findall(r"@llvm.nvvm[.\w]+", axes)))
    code += "".join(f"declare i32 {register}()\n" for register in registers)
    code += _driver(_KERNEL, form, name=form.name, axes=axes)
    module = llvm.parse_assembly(_TARGET + code)
    if library:
        module.link_in(llvm.parse_bitcode(_library(form.what)))
        for function in module.functions:
            if not function.is_declaration and function.name != form.name:
                function.linkage = "internal"
    target = llvm.Target.from_triple("nvptx64-nvidia-cuda")
    machine = target.create_target_machine(cpu=_DEVICE, opt=3)
    _optimised(llvm, module, machine)
    ptx: str = machine.emit_assembly(module)
    return ptx


def _library(what: str) -> bytes:
    """Return NVIDIA's library of functions."""
    found = libdevice.read()
    if found is None:
        raise NoDeviceLoop(
            f"{what} uses functions such as exp, which are in NVIDIA's libdevice: install "
            f"nvidia-nvvm, or set CUDA_HOME to a CUDA toolkit"
        )
    return found


def to_host(code: str, form: Form) -> Callable[..., None]:
    """Return a function that calls an element function here, without the GIL.

    Parameters
    ----------
    code, form
        As for `to_ptx`.

    Returns
    -------
    callable
        `(order, columns, *args)`: elements are columns times row plus column, in the
        order of an int64 array; pointers are addresses.
    """
    llvm = _llvm()
    module = llvm.parse_assembly(code + _driver(_HOST, form))
    features = llvm.get_host_cpu_features().flatten()
    target, cpu = llvm.Target.from_default_triple(), llvm.get_host_cpu_name()
    machine = target.create_target_machine(cpu=cpu, features=features, opt=3, jit=True)
    _optimised(llvm, module, machine)
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    types = [
        ctypes.c_void_p if kind.endswith("*") else _C_TYPES.get(kind, ctypes.c_int64)
        for kind in form.kinds
    ]
    prototype = ctypes.CFUNCTYPE(
        None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, *types
    )
    compiled = prototype(engine.get_function_address("host"))

    def run(order: np.ndarray[Any, Any], columns: int, *args: float) -> None:
        # The engine has the memory of the machine code.
        assert engine
        compiled(order.ctypes.data, len(order), columns, *args)

    return run
