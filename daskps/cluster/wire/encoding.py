"""Gradients as a run's codec has them: rounded when they leave, widened on arrival.

Every contribution is rounded, also where it does not travel: a run's result must not
depend on which way its gradients took.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from daskps import codecs
from daskps.config import cache_dir
from daskps.errors import PushRejectedError
from daskps.layout.arrays import compute_dtype

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from daskps.cluster.wire.messages import Call
    from daskps.codecs import Codec
    from daskps.layout.arrays import Layout
    from daskps.layout.parameters import Piece
    from daskps.reduction import Empty
    from daskps.shards.steps import Step
    from daskps.typing import Array


def warm(codec: Codec | None) -> None:
    """Compile a codec's loops; not on an event loop, for this takes a while."""
    if codec is not None:
        codec.warm(cache_dir=cache_dir())


def encoded(
    layout: Layout,
    arrays: Mapping[int, Array],
    codec: Codec,
    *,
    finite: bool,
    empty: Empty,
) -> dict[int, Array]:
    """Return words of checked gradients, by parameter index.

    Raises
    ------
    PushRejectedError
        If one of them is too large for the codec. Nothing has been changed anywhere.
    """
    found = {}
    for index, array in arrays.items():
        words = empty(len(array), codec.dtype)
        if not codec.encode(array, words, cache_dir=cache_dir()) and finite:
            name = layout.parameters[index].name
            raise PushRejectedError(
                f"the gradient of {name[:60]!r} has elements that are too large for "
                f"codec={codec.name!r}; clip it, lower the learning rate, or leave "
                f"codec at None"
            )
        found[index] = words
    return found


def decoded(codec: Codec, words: Array, dtype: str, empty: Empty) -> Array:
    """Return the numbers that words stand for, in a dtype that sums are made in."""
    out = empty(len(words), dtype)
    codec.decode(words, out, cache_dir=cache_dir())
    return out


def widened(call: Call, layout: Layout, empty: Empty) -> Call:
    """Return a call with numbers for words, in arrays that nobody else has."""
    parts = [
        p._replace(step=widened_step(p.step, call.codec, layout.pieces[p.shard], empty))
        for p in call.parts
    ]
    return call._replace(parts=tuple(parts), codec="")


def widened_step(step: Step, codec: str, pieces: Sequence[Piece], empty: Empty) -> Step:
    """Return a step with numbers for words, in arrays that nobody else has."""
    known = codecs.named(codec)
    items = tuple(
        i._replace(data=decoded(known, i.data, _dtype(pieces[i.position]), empty))
        for i in step.items
    )
    return step._replace(items=items, owned=True)


def widened_node(
    words: Mapping[int, Array],
    codec: Codec,
    pieces: Sequence[Piece],
    *,
    scale: float,
    empty: Empty,
) -> dict[int, Array]:
    """Return numbers for words by position of the piece, multiplied by `scale`."""
    found = {}
    for position, data in words.items():
        array = decoded(codec, data, _dtype(pieces[position]), empty)
        if scale != 1.0:
            array *= scale
        found[position] = array
    return found


def _dtype(piece: Piece) -> str:
    return compute_dtype(piece.parameter.dtype)
