"""One worker's sub-layers at work: forward, then backward, on its rows of a batch."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from daskps.compat.singa.net import WHOLE, params_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from daskps.typing import Array


class SubNet:
    """The layers of a net, for some of the rows of a batch.

    Parameters
    ----------
    net : sequence of Layer
        The layers, each after its sources.
    batch : int
        Rows of a batch.
    rows : slice
        Those of them that count here.
    """

    def __init__(self, net: Sequence[Any], batch: int, rows: slice) -> None:
        self._net, self._batch, self._rows = net, batch, rows
        #: Mean over the rows, of all layers of that type.
        self.loss = 0.0
        self._outputs: dict[str, Any] = {}
        self._saved: dict[str, Any] = {}

    def run(self, params: Mapping[str, Array], step: int) -> Iterator[tuple[str, Any]]:
        """Compute; give each gradient when all layers that share its parameter have it.

        Parameters
        ----------
        params : mapping of str to ndarray
            The parameters.
        step : int
            The step that data layers are given.

        Yields
        ------
        str, ndarray
            Name of a parameter, and its gradient.

        Raises
        ------
        ValueError
            For a batch of another length, and gradients that are missing.
        """
        self._make_batch(step)
        for layer in self._net:
            if layer.type not in WHOLE:
                given = [self._outputs[s] for s in layer.sources]
                own = {n: params[n] for n in params_of(layer)}
                output, self._saved[layer.name] = layer.forward(own, *given)
                self._outputs[layer.name] = output
                if layer.type == "loss":
                    self.loss += float(output)
        yield from self._backward(params)

    def _make_batch(self, step: int) -> None:
        """Have the layers that make a batch make it; keep the rows that count here."""
        made: dict[str, Any] = {}
        for layer in self._net:
            if layer.type not in WHOLE:
                continue
            found = layer.forward(*([made[s] for s in layer.sources] or [step]))
            if len(found) != self._batch:
                raise ValueError(
                    f"layer {layer.name!r} made {len(found)} rows, the batch has "
                    f"{self._batch}"
                )
            made[layer.name] = found
            self._outputs[layer.name] = found[self._rows]

    def _backward(self, params: Mapping[str, Array]) -> Iterator[tuple[str, Any]]:
        left = Counter(name for layer in self._net for name in params_of(layer))
        given: dict[str, Any] = {}
        sums: dict[str, Any] = {}
        for layer in reversed(self._net):
            if layer.type == "loss":
                _add(given, layer.name, 1.0)
            if layer.type in WHOLE or layer.name not in given:
                continue
            own = {n: params[n] for n in params_of(layer)}
            saved, gradient = self._saved.pop(layer.name), given[layer.name]
            of_params, of_inputs = layer.backward(own, saved, gradient)
            for source, one in zip(layer.sources, of_inputs, strict=True):
                if one is not None:
                    _add(given, source, one)
            if missing := own.keys() - of_params.keys():
                raise ValueError(
                    f"layer {layer.name!r} gave no gradient of {sorted(missing)}"
                )
            for name in own:
                _add(sums, name, of_params[name])
                left[name] -= 1
                if not left[name]:
                    yield name, sums[name]


def _add(sums: dict[str, Any], name: str, value: Any) -> None:
    before = sums.get(name)
    sums[name] = value if before is None else before + value
