"""A net of layers, and the same cut into sub-layers by the rows of a batch."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from daskps.store.arguments import whole

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from daskps.typing import Array

#: Types of layers that make a batch, and are not cut.
WHOLE = ("data", "parser")
_NO_PARAMS: Mapping[str, Any] = {}


@dataclass(frozen=True)
class Layer:
    """A layer of a net; subclass it with `forward`, and with `backward` where it learns.

    Parameters
    ----------
    name : str
        Of the layer.
    type : str
        "data" (``forward(step)`` returns the rows of a batch), "parser"
        (``forward(*inputs)`` makes arrays of these, with as many rows), "loss", or
        anything else.
    sources : sequence of str
        Names of the layers whose outputs it takes, which come before it in the net.
    shape : tuple of int
        Shape of its output for a whole batch, for the picture; may be left out.
    params : mapping of str to ndarray
        Its parameters' initial values, of floats. Layers that name the same parameter
        share it.

    Examples
    --------
    >>> from daskps.compat import singa
    >>> class Double(singa.Layer):
    ...     def forward(self, params, x):
    ...         return 2 * x, None
    ...     def backward(self, params, saved, gradient):
    ...         return {}, [2 * gradient]
    >>> Double("twice", "linear", ("rows",)).forward({}, np.ones(2))
    (array([2., 2.]), None)
    """

    name: str
    type: str
    sources: Sequence[str] = ()
    shape: tuple[int, ...] = ()
    params: Mapping[str, Any] = field(default_factory=dict)

    def forward(self, *given: Any) -> Any:
        """Compute the output; layers of other types return it with what to save.

        Parameters
        ----------
        *given : object
            Of "data" the number of the step, of "parser" the inputs, else parameters by
            name and then the inputs. A "loss" returns the mean over its rows.

        Returns
        -------
        ndarray or (ndarray, object)
            The output; and, but for "data" and "parser", what `backward` will need.

        Raises
        ------
        NotImplementedError
            Where a subclass has none.

        Examples
        --------
        >>> from daskps.compat import singa
        >>> class Ones(singa.Layer):
        ...     def forward(self, step):
        ...         return np.ones(2)
        >>> Ones("rows", "data").forward(0)
        array([1., 1.])
        """
        raise NotImplementedError(f"layer {self.name!r} has no forward")

    def backward(
        self, params: Mapping[str, Array], saved: Any, gradient: Any
    ) -> tuple[Mapping[str, Any], Sequence[Any]]:
        """Compute the gradients of parameters and inputs.

        Parameters
        ----------
        params : mapping of str to ndarray
            The parameters.
        saved : object
            The state that `forward` has saved.
        gradient : ndarray or float
            Gradient of the output; 1.0 of a loss.

        Returns
        -------
        (mapping of str to ndarray, sequence of ndarray)
            Gradients of all its parameters, means over the rows as the loss is, and of
            its inputs, None where none is needed.

        Raises
        ------
        NotImplementedError
            Where a subclass has none.

        Examples
        --------
        >>> from daskps.compat import singa
        >>> class Scale(singa.Layer):
        ...     def backward(self, params, saved, gradient):
        ...         return {"a": (gradient * saved).sum()}, [gradient * params["a"]]
        >>> scale = Scale("scale", "linear", ["rows"], params={"a": np.array(2.0)})
        >>> scale.backward(scale.params, np.ones(3), np.ones(3))
        ({'a': np.float64(3.0)}, [array([2., 2., 2.])])
        """
        raise NotImplementedError(f"layer {self.name!r} has no backward")


@dataclass(frozen=True)
class SubLayer:
    """A layer for the rows of one worker; it shares the parameters of its origin."""

    name: str
    type: str
    sources: tuple[str, ...]
    shape: tuple[int, ...]
    origin: Any
    worker: int

    @property
    def params(self) -> Mapping[str, Any]:
        """The very parameters of the layer it comes from."""
        found: Mapping[str, Any] = self.origin.params
        return found


def cut(batch: int, n: int) -> list[slice]:
    """Return the rows of a batch of each of `n` workers: the last has what is left."""
    if n > batch:
        raise ValueError(
            f"a batch of {batch} rows has none for some of {n} workers; make it larger"
        )
    size = batch // n
    starts = range(0, size * n, size)
    return [slice(a, batch if k == n - 1 else a + size) for k, a in enumerate(starts)]


def check_net(net: Any) -> list[Any]:
    """Return the layers of a net, or refuse what is none.

    Raises
    ------
    TypeError
        For what is no list of layers.
    ValueError
        For names that are there twice, sources that do not come before, and parameters
        that are shared with another shape.
    """
    if not isinstance(net, (list, tuple)) or not net:
        raise TypeError(f"net is a list of layers, found {net!r:.60}")
    known: dict[str, Any] = {}
    params: dict[str, Array] = {}
    for layer in net:
        _check_layer(layer, known)
        known[layer.name] = layer
        for name, value in params_of(layer).items():
            _check_shared(name, np.asarray(value), params)
    if not params:
        raise ValueError("no layer of the net has parameters")
    return list(net)


def _check_layer(layer: Any, known: Mapping[str, Any]) -> None:
    for wanted in ("name", "type", "sources", "shape", "forward"):
        if not hasattr(layer, wanted):
            raise TypeError(f"a layer has no {wanted!r}: {layer!r:.60}")
    if layer.name in known:
        raise ValueError(f"layer {layer.name!r} is there twice; give each its name")
    for source in layer.sources:
        if source not in known:
            raise ValueError(
                f"layer {layer.name!r} has the source {source!r}, which does not come "
                f"before it; known are {sorted(known)}"
            )
        if layer.type in WHOLE and known[source].type not in WHOLE:
            raise ValueError(
                f"layer {layer.name!r} makes the batch and cannot have the source "
                f"{source!r}, which is cut"
            )


def _check_shared(name: str, array: Array, params: dict[str, Array]) -> None:
    """Refuse a parameter of another dtype, or that others share in another shape."""
    if array.dtype.kind != "f":
        raise TypeError(f"parameter {name!r} is {array.dtype}; it is of floats")
    if params.setdefault(name, array).shape != array.shape:
        raise ValueError(
            f"layers share parameter {name!r} with the shapes {params[name].shape} and "
            f"{array.shape}"
        )


def params_of(layer: Any) -> Mapping[str, Any]:
    """Return the parameters of a layer, which may have none."""
    found: Mapping[str, Any] = getattr(layer, "params", _NO_PARAMS)
    return found


def partition(net: Sequence[Any], n: int) -> list[Any]:
    """Cut all layers but those that make the batch into `n` sub-layers.

    Parameters
    ----------
    net : sequence of Layer
        The layers, each after its sources.
    n : int
        Number of workers.

    Returns
    -------
    list
        Layers of the types "data" and "parser" as they are; behind each whose output is
        cut one of the type "slice"; and of each other layer `n` sub-layers, ``name@0``
        and so on, which share the parameters of their origin. Of ``shape[0]`` rows each
        has as many as the batch cut into floor(batch / n), the last also the rest.

    Raises
    ------
    TypeError, ValueError
        For what is no net, and for fewer rows than workers.

    Examples
    --------
    >>> from daskps.compat import singa
    >>> net = [
    ...     singa.Layer("rows", "data", shape=(50, 4)),
    ...     singa.Layer("loss", "loss", ("rows",), (50,), {"w": np.zeros(4)}),
    ... ]
    >>> [(layer.name, layer.shape) for layer in singa.partition(net, 3)][1:]
    [('rows-slice', (50, 4)), ('loss@0', (16,)), ('loss@1', (16,)), ('loss@2', (18,))]
    """
    layers, n = check_net(net), whole(n, "n", least=1)
    types = {layer.name: layer.type for layer in layers}
    cut_here = {
        source
        for layer in layers
        if layer.type not in WHOLE
        for source in layer.sources
        if types[source] in WHOLE
    }
    found: list[Any] = []
    for layer in layers:
        if layer.type in WHOLE:
            found.append(layer)
            if layer.name in cut_here:
                name = f"{layer.name}-slice"
                found.append(Layer(name, "slice", (layer.name,), tuple(layer.shape)))
            continue
        shape = tuple(layer.shape)
        rows = cut(shape[0], n) if shape else [slice(0, 0)] * n
        for worker, part in enumerate(rows):
            sources = tuple(
                f"{s}-slice" if types[s] in WHOLE else f"{s}@{worker}"
                for s in layer.sources
            )
            own = (part.stop - part.start, *shape[1:]) if shape else ()
            name = f"{layer.name}@{worker}"
            found.append(SubLayer(name, layer.type, sources, own, layer, worker))
    return found


def to_json(net: Sequence[Any]) -> str:
    """Return a net, cut or not, as a graph in JSON.

    Parameters
    ----------
    net : sequence of Layer
        The layers, or what :func:`partition` has made of them.

    Returns
    -------
    str
        Node-link form, which ``networkx.node_link_graph`` reads: a node for each layer,
        with its type, shape, parameters and, of a sub-layer, worker ("partition").

    Examples
    --------
    >>> import json
    >>> from daskps.compat import singa
    >>> net = [singa.Layer("a", "data"), singa.Layer("b", "loss", ("a",))]
    >>> json.loads(singa.to_json(net))["edges"]
    [{'source': 'a', 'target': 'b'}]
    """
    nodes, edges = [], []
    for layer in net:
        node = {
            "id": layer.name,
            "type": layer.type,
            "shape": list(layer.shape),
            "params": sorted(params_of(layer)),
        }
        if isinstance(layer, SubLayer):
            node["partition"] = layer.worker
        nodes.append(node)
        edges += [{"source": s, "target": layer.name} for s in layer.sources]
    graph = {"directed": True, "multigraph": False, "graph": {}}
    return json.dumps({**graph, "nodes": nodes, "edges": edges})
