"""LLVM code of element functions, from Numba; PTX of it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from daskps.kernels.compiled import module_of
from daskps.kernels.device import driver, libdevice

if TYPE_CHECKING:
    from collections.abc import Mapping

    from daskps.kernels.device.driver import Form

#: The first of Numba whose LLVM writes PTX of it.
_NUMBA: Final = 0, 62
#: The oldest device that drivers of CUDA 13 know: they compile its PTX for any later one.
_DEVICE: Final = "sm_75"
#: Intrinsics that devices have instructions for, with the bits of any processor. LLVM ends
#: the process at one that it has none for, so all others are refused before.
_PLAIN: Final = re.compile(
    r"llvm\.(sqrt|fabs|copysign|floor|ceil|trunc|rint|nearbyint|lifetime|assume|"
    r"umin|umax|smin|smax|abs)(\..*)?"
)
#: Functions that are one of these.
_ROOTS: Final = {"sqrtf": "llvm.sqrt.f32", "sqrt": "llvm.sqrt.f64"}
#: Functions of NVIDIA's library, which has an f behind the name for float32 too.
_LIBRARY: Final = re.compile(
    r"(exp|exp2|expm1|log|log2|log10|log1p|sin|cos|tan|tanh|sinh|cosh|atan|asin|acos|"
    r"pow|cbrt|erf|hypot|atan2|fmod)f?"
)
_DECLARED: Final = re.compile(r"^declare [^@]*@([\w.]+)\(", flags=re.MULTILINE)


def element_code(form: Form, cache_dir: str | None = None) -> str:
    """Return the LLVM code of the element function of a generated module.

    Parameters
    ----------
    form : Form
        The loop.
    cache_dir : str, optional
        Where its module is kept, as in `build`.

    Returns
    -------
    str
        Without a target; nothing but `element`, and functions that devices may have.

    Raises
    ------
    TypeError
        If Numba cannot compile it or is too old, or a function has no loop on a device.
    """
    import numba
    from numba.core.errors import NumbaError

    if numba.version_info[:2] < _NUMBA:
        raise TypeError(
            f"loops on devices need numba >= {'.'.join(map(str, _NUMBA))}, found "
            f"{numba.__version__}; update it"
        )
    dispatcher = module_of(form.source, cache_dir).loaded().__dict__["element"]
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
        raise TypeError(f"{form.what} does not compile: {error}") from error
    code: str = dispatcher.inspect_llvm(signature)
    # Neither this processor, nor what a function for Python would refer to.
    code = re.sub(r"^(target |@_ZN08NumbaEnv).*\n", "", code, flags=re.MULTILINE)
    [symbol] = re.findall(r"^define [^@]*@(\w*7element\w*)\(", code, flags=re.MULTILINE)
    code = code.replace(f"@{symbol}(", "@element(")
    check(code, form.what)
    return code


def _in_library(function: str) -> str:
    """Return the name that a function, or an intrinsic, may have in NVIDIA's library."""
    if not function.startswith("llvm."):
        return function
    _, name, kind = (*function.split("."), "")[:3]
    return name + {"f32": "f", "f64": ""}.get(kind, f".{kind}")


def check(code: str, what: str) -> None:
    """Refuse functions that devices have not, and the remainder, which LLVM rounds twice."""
    used = [*_DECLARED.findall(code), *re.findall(r"= (frem) ", code)]
    for name in used:
        if not (
            name in _ROOTS
            or _PLAIN.fullmatch(name)
            or _LIBRARY.fullmatch(_in_library(name))
        ):
            raise TypeError(
                f"{what} calls {name!r}, which has no loop on a device: use arithmetic, "
                f"roots, comparisons, exp, log and the like, or a store on hosts"
            )


def _renamed(code: str, names: Mapping[str, str]) -> str:
    """Return code that calls functions by other names, and declares each once."""
    for old, new in names.items():
        code = code.replace(f"@{old}(", f"@{new}(")
    lines = code.splitlines()
    seen = {name[1]: line for line in lines if (name := _DECLARED.match(line))}
    others = (line for line in lines if not _DECLARED.match(line))
    return "\n".join([*others, *seen.values()])


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
    TypeError
        If NVIDIA's library is needed, and not found.
    """
    import llvmlite.binding as llvm  # type: ignore[import-untyped]

    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    used = {name for name in _DECLARED.findall(code) if not _PLAIN.fullmatch(name)}
    library = {name: f"__nv_{_in_library(name)}" for name in used - {*_ROOTS}}
    code = _renamed(code, {**_ROOTS, **library})
    made, element = map(llvm.parse_assembly, (driver.kernel(form), code))
    others = [element]
    if library:
        if (found := libdevice.read()) is None:
            raise TypeError(
                f"{form.what} uses functions such as exp, which are in NVIDIA's "
                f"libdevice: install nvidia-nvvm, or set CUDA_HOME to a CUDA toolkit"
            )
        others.append(llvm.parse_bitcode(found))
    target = llvm.Target.from_triple("nvptx64-nvidia-cuda")
    machine = target.create_target_machine(cpu=_DEVICE, opt=3)
    for module in (made, *others):
        module.triple, module.data_layout = machine.triple, str(machine.target_data)
    for module in others:
        made.link_in(module)
    for function in made.functions:
        if not function.is_declaration and function.name != form.name:
            function.linkage = "internal"
    made.verify()
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(made, builder)
    ptx: str = machine.emit_assembly(made)
    return ptx
