"""Gradients as a run's codec has them: rounded when they leave, widened on arrival.

Every contribution is rounded, also where it does not travel: a run's result must not
depend on which way its gradients took.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from daskps import codecs
from daskps.cluster.protocol.read_words import CODED
from daskps.cluster.upstream import loads
from daskps.config import cache_dir
from daskps.errors import PushRejectedError
from daskps.layout.arrays import compute_dtype
from daskps.usercode import user_code

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from daskps.cluster.protocol.messages import Call, Part
    from daskps.codecs import Codec
    from daskps.layout.arrays import Layout
    from daskps.layout.parameters import Piece
    from daskps.reduction import Empty
    from daskps.shards.steps import Item, Step
    from daskps.typing import Array

#: Shard, and position of the piece in it.
_PieceId = tuple[int, int]


def learn(name: str, pickled: bytes) -> None:
    """Know the codec of a run by its name, and compile its loops; "" is none.

    Not on an event loop, for this takes a while.
    """
    if name:
        with user_code(f"the codec {name!r}"):
            codec = loads(pickled)
            codec.warm(cache_dir=cache_dir())
        codecs.keep(name, codec)


def encoded(
    layout: Layout,
    arrays: Mapping[int, Array],
    codec: Codec,
    *,
    residuals: Mapping[int, Array] | None = None,
    finite: bool,
    empty: Empty,
) -> tuple[dict[_PieceId, Array], dict[int, Array]]:
    """Return words of checked gradients, by shard and position of the piece.

    And what they do not say, by parameter index. `residuals`, what was left before,
    stays as it is: what becomes of the words is not known yet.

    Raises
    ------
    PushRejectedError
        If one of them is too large for the codec, or that does not do what it says.
        Nothing has been changed anywhere.
    """
    found: dict[_PieceId, Array] = {}
    left: dict[int, Array] = {}
    for index, array in arrays.items():
        pieces = [p for p in layout.pieces_of[index] if p.start < p.stop]
        if not pieces:
            continue
        before = residuals.get(index) if residuals else None
        cuts = [(piece.start, piece.stop) for piece in pieces]
        made = codec.encode_pieces(
            array, cuts, before, empty=empty, cache_dir=cache_dir()
        )
        # The rest that feedback carries on would never be finite again.
        if not made.finite and (finite or codec.feedback):
            raise _too_large(layout, index, codec)
        for piece, words in zip(pieces, made.words, strict=True):
            found[piece.shard, layout.positions[piece.shard, index]] = words
        if made.residual is not None:
            left[index] = made.residual
    return found, left


def rounded(
    layout: Layout,
    arrays: Mapping[int, Array],
    codec: Codec,
    *,
    finite: bool,
    empty: Empty,
) -> dict[int, Array]:
    """Return words of whole gradients, of a codec whose words may be cut anywhere.

    Raises
    ------
    PushRejectedError
        If one of them is too large for the codec. Nothing has been changed anywhere.
    """
    found = {}
    for index, array in arrays.items():
        whole = [(0, len(array))]
        made = codec.encode_pieces(array, whole, empty=empty, cache_dir=cache_dir())
        if finite and not made.finite:
            raise _too_large(layout, index, codec)
        [found[index]] = made.words
    return found


def round_read(codec: Codec, flats: Iterable[Array], empty: Empty) -> None:
    """Round what was read to what its words would say; what came in words stays.

    Reads of local shards copy weights as they are: this is what makes all ways alike.
    """
    for flat in flats:
        if flat.dtype.name in CODED and len(flat):
            [words] = codec.encode_pieces(
                flat, [(0, len(flat))], empty=empty, cache_dir=cache_dir()
            ).words
            codec.decode_piece(words, flat, cache_dir=cache_dir())


def _too_large(layout: Layout, index: int, codec: Codec) -> PushRejectedError:
    name = layout.parameters[index].name
    return PushRejectedError(
        f"the gradient of {name[:60]!r} has elements that are too large for "
        f"codec={codec.name!r}; clip it, lower the learning rate, or leave codec at "
        f"None"
    )


def decoded(codec: Codec, words: Array, piece: Piece, empty: Empty) -> Array:
    """Return the numbers of a piece, in the dtype that sums are made in.

    Raises
    ------
    PushRejectedError
        Where the codec does not do what it says.
    """
    out = empty(piece.size, compute_dtype(piece.parameter.dtype))
    codec.decode_piece(words, out, piece.start, cache_dir=cache_dir())
    return out


def numbers(
    layout: Layout, words: Mapping[_PieceId, Array], codec: Codec, empty: Empty
) -> dict[int, Array]:
    """Return the numbers that words of whole gradients stand for, by parameter index."""
    found: dict[int, Array] = {}
    for (shard, position), of in words.items():
        piece = layout.pieces[shard][position]
        index, size = piece.parameter.index, piece.parameter.size
        if index not in found:
            found[index] = empty(size, compute_dtype(piece.parameter.dtype))
        out = found[index][piece.start : piece.stop]
        codec.decode_piece(of, out, piece.start, cache_dir=cache_dir())
    return found


def widened(call: Call, layout: Layout, empty: Empty) -> Call:
    """Return a call with numbers for words, in arrays that nobody else has.

    Raises
    ------
    PushRejectedError
        Where words do not fit what they are for, or a codec cannot read them.
    """
    _check_words(call.parts, codecs.named(call.codec), layout)
    parts = [
        p._replace(step=widened_step(p.step, call.codec, layout, p.shard, empty=empty))
        for p in call.parts
    ]
    return call._replace(parts=tuple(parts), codec="")


def widened_step(
    step: Step, codec: str, layout: Layout, shard: int, *, empty: Empty
) -> Step:
    """Return a step with numbers for words, in arrays that nobody else has.

    Raises
    ------
    PushRejectedError
        Where a codec of a user's cannot read here what its trainer could. It says that
        other shards may have taken their parts.
    """
    known, pieces = codecs.named(codec), layout.pieces[shard]
    try:
        items = tuple(
            _widened_rows(item, known, layout, shard, empty=empty)
            if item.ids is not None
            else item._replace(
                data=decoded(known, item.data, pieces[item.position], empty)
            )
            for item in step.items
        )
    except PushRejectedError as error:
        raise PushRejectedError(
            f"{error}; the trainer could read these words and shard {shard} could not, "
            f"which has taken nothing of this push. Other shards may have taken their "
            f"parts: under BSP push again, under SSP and ASP that would count twice there"
        ) from error
    return step._replace(items=items, owned=True)


def _widened_rows(
    item: Item, codec: Codec, layout: Layout, shard: int, *, empty: Empty
) -> Item:
    """Return rows of a table as numbers."""
    pieces = layout.table_pieces[shard]
    table = pieces[item.position - len(layout.pieces[shard])].table
    n = 0 if item.ids is None else len(item.ids) * table.dim
    out = empty(n, compute_dtype(table.dtype))
    if n:
        codec.of_rows(table.dim).decode_piece(item.data, out, cache_dir=cache_dir())
    return item._replace(data=out)


def _check_words(parts: Sequence[Part], codec: Codec, layout: Layout) -> None:
    """Refuse words that are not those of what they are for: frames say how many come.

    Raises
    ------
    PushRejectedError
        Where their number does not fit a piece, or rows.
    """
    for part in parts:
        pieces = layout.pieces[part.shard]
        for item in part.step.items:
            n, ids = len(item.data), item.ids
            if ids is None:
                piece = pieces[item.position]
                fits = codec.fits(n, piece.size, piece.start)
                what = f"{piece.size:,} elements of {piece.parameter.name[:60]!r}"
            else:
                at = item.position - len(pieces)
                dim = layout.table_pieces[part.shard][at].table.dim
                what = f"{len(ids):,} rows of {dim} elements"
                fits = codec.of_rows(dim).fits(n, len(ids) * dim) if len(ids) else not n
            if not fits:
                raise PushRejectedError(
                    f"{n:,} words of codec={codec.name!r} do not fit {what} of shard "
                    f"{part.shard}"
                )
