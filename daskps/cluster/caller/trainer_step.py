"""Steps of a trainer, and what the codec of a run makes of their arrays."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from daskps import codecs
from daskps.cluster.caller.routes import GRADIENT
from daskps.cluster.protocol import encoding

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from daskps.cluster.caller.routes import FiniteCheck
    from daskps.cluster.caller.row_routes import RowBatch
    from daskps.cluster.caller.shard_map import RunMembership, StoreMap
    from daskps.cluster.caller.targets import Target
    from daskps.codecs import Codec
    from daskps.reduction import Empty
    from daskps.typing import Array


class TrainerStep(NamedTuple):
    """One step of a trainer: its arrays and rows."""

    #: Flat arrays by parameter index.
    arrays: Mapping[int, Array]
    weight: float = 1.0
    #: Rows of tables.
    rows: Sequence[RowBatch] = ()
    #: A look for NaN and Inf in the arrays on their way, if nobody has looked: at the
    #: latest before a message takes them.
    look: FiniteCheck | None = None
    #: The kind of the arrays and rows, where there are any.
    of: str = GRADIENT
    #: The words that a codec has made of the arrays, by shard and position of the
    #: piece.
    words: Mapping[tuple[int, int], Array] | None = None
    #: By parameter index the rest that the words do not say, for the next gradient.
    left: Mapping[int, Array] = MappingProxyType({})

    @property
    def sent(self) -> Mapping[Any, Array]:
        """The arrays or words that go to the shards."""
        return self.arrays if self.words is None else self.words

    def copied(self) -> TrainerStep:
        """Return the same in arrays that no caller has."""
        arrays = {index: array.copy() for index, array in self.arrays.items()}
        return self._replace(arrays=arrays, rows=[one.copied() for one in self.rows])


#: An empty step, which ends a clock that brings no more.
NO_MORE = TrainerStep({})


class RunCodecs:
    """The codecs of a run, as one trainer uses them.

    Parameters
    ----------
    meta : StoreMap
        The store.
    joined : RunMembership
        The run.
    finite : bool
        Whether gradients that would become infinite are refused.
    empty : callable
        Makes arrays.
    """

    def __init__(
        self, meta: StoreMap, joined: RunMembership, *, finite: bool, empty: Empty
    ) -> None:
        self._layout, self._finite, self._empty = meta.layout, finite, empty
        #: Names in messages of the codecs of gradients and of reads; "" for none.
        self.pushes_in, self.reads_in = joined.coded[0], joined.read_codec
        self.codec: Codec | None = None
        if self.pushes_in:
            self.codec = codecs.named(self.pushes_in)
        self._read_codec = codecs.named(self.reads_in) if self.reads_in else None
        #: By parameter index the rest of gradients that no words have said yet.
        self._residuals: dict[int, Array] = {}
        #: Bytes that the encoding has saved so far.
        self.saved_nbytes = 0

    def encoded(self, given: TrainerStep, codec: Codec) -> TrainerStep:
        """Return a step in words of the run's codec, and the rest that they do not say.

        The caller encodes a step once: a step sent again has the same bytes.
        """
        finite, empty = self._finite, self._empty
        words, left = encoding.encoded(
            self._layout,
            given.arrays,
            codec,
            residuals=self._residuals,
            finite=finite,
            empty=empty,
        )
        rows = [one.in_words(codec, finite=finite, empty=empty) for one in given.rows]
        whole = sum(array.nbytes for array in given.arrays.values())
        whole += sum(one.data.nbytes for one in given.rows)
        made = sum(array.nbytes for array in words.values())
        made += sum(array.nbytes for one in rows for array in one.words or ())
        self.saved_nbytes += whole - made
        return given._replace(words=words, left=left, rows=rows)

    def keep(self, given: TrainerStep) -> None:
        """Keep the rest of a step that was accepted.

        Not before: a step that was refused or lost takes nothing of the rest kept so
        far. Nor does a step of weight 0, which brings no arrays.
        """
        self._residuals |= given.left

    def round_read(self, target: Target) -> None:
        """Round the values that were read, of which some have not come in words."""
        if self._read_codec is not None:
            encoding.round_read(self._read_codec, target.flats, self._empty)
