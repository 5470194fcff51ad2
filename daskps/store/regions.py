"""A run of a parameter's elements: what is read of it, and what verbs send to it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from daskps import config
from daskps.cluster.caller.region_routes import push_region
from daskps.cluster.caller.routes import GRADIENT, Request, Step
from daskps.store import intake
from daskps.store.arguments import number, whole

if TYPE_CHECKING:
    from collections.abc import Callable

    from daskps.cluster.caller.shard_map import StoreMap
    from daskps.layout.parameters import Parameter


class Region(NamedTuple):
    """Elements [start, stop) of a parameter, in C order, as an array of one axis."""

    parameter: Parameter
    start: int
    stop: int

    @classmethod
    def of(cls, parameter: Parameter, start: Any, stop: Any) -> Region:
        """Return a region, or refuse what is none.

        Raises
        ------
        TypeError
            For what is no int.
        IndexError
            For elements that the parameter does not have.
        """
        first, end = whole(start, "start"), whole(stop, "stop")
        if not 0 <= first <= end <= parameter.size:
            raise IndexError(
                f"region({first}, {end}) of {parameter.name[:60]!r}, which has elements "
                f"0 to {parameter.size}; give 0 <= start <= stop <= {parameter.size}"
            )
        return cls(parameter, first, end)

    @property
    def shaped(self) -> Parameter:
        """What it is checked as: an array of its own, named after its elements."""
        name = f"{self.parameter.name}: elements {self.start} to {self.stop}"
        return replace(self.parameter, name=name, shape=(self.stop - self.start,))

    def pushing(
        self, grad: Any, weight: float, lr: float | None
    ) -> Callable[[StoreMap], Request]:
        """Return what plans a push; see :meth:`ParameterArray.push`."""
        rate = None if lr is None else number(lr, "lr", least=0.0)
        factor, step = number(weight, "weight", least=0.0), Step(kind=GRADIENT, lr=rate)

        def make(meta: StoreMap) -> Request:
            finite, p = config.check_finite(), self.shaped
            intake.check_gradient(self.parameter, meta.optimizers)
            flat = intake.gradient_of(p, grad, finite=finite)
            if factor != 1.0:
                flat = intake.times(p, flat, factor, finite=finite)
            return push_region(meta, (p.index, self.start), flat, step)

        return make

    def placing(
        self, kind: str, given: Any, what: str
    ) -> Callable[[StoreMap], Request]:
        """Return what plans an add or an assign."""

        def make(meta: StoreMap) -> Request:
            finite = config.check_finite()
            p = self.shaped
            flat = intake.value_of(p, given, what, finite=finite)
            return push_region(meta, (p.index, self.start), flat, Step(kind=kind))

        return make
