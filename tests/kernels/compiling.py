"""Where tests keep compiled loops, and what Numba says of those of a generated module."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from daskps import config

if TYPE_CHECKING:
    from daskps.kernels.compiled import Module


def kept() -> str:
    """Return where the processes of a test run share what takes long to compile."""
    return str(config.load().cache)


def hits(module: Module) -> int:
    """Return how many functions were taken from the disk."""
    return _sum_of(module, "cache_hits")


def misses(module: Module) -> int:
    """Return how many functions were compiled."""
    return _sum_of(module, "cache_misses")


def _sum_of(module: Module, what: str) -> int:
    made: list[Any] = list(module.functions.values())
    return sum(sum(getattr(f.stats, what).values()) for f in made)


def llvm(module: Module, name: str) -> str:
    """Return the optimised LLVM code of a function, also of one that was on disk."""
    dispatcher: Any = module.function(name)
    [compiled] = dispatcher.overloads.values()
    return str(compiled.library._get_module_for_linking())
