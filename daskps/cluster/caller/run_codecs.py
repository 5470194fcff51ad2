"""How what a trainer pushes and pulls travels, and what is left over of its gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING

from daskps import codecs
from daskps.cluster.caller.row_words import worded
from daskps.cluster.wire import encoding

if TYPE_CHECKING:
    from daskps.cluster.caller.shard_map import RunMembership, StoreMap
    from daskps.cluster.caller.targets import Target
    from daskps.cluster.caller.trainer_step import TrainerStep
    from daskps.codecs import Codec
    from daskps.reduction import Empty
    from daskps.typing import Array


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
        #: What messages call that of gradients, and that of what is read; "" for none.
        self.pushes_in, self.reads_in = joined.coded[0], joined.read_codec
        self.codec: Codec | None = None
        if self.pushes_in:
            self.codec = codecs.named(self.pushes_in)
        self._read_codec = codecs.named(self.reads_in) if self.reads_in else None
        #: What words have not said yet, by parameter index.
        self._residuals: dict[int, Array] = {}
        #: Bytes that words have saved so far.
        self.saved_nbytes = 0

    def encoded(self, given: TrainerStep, codec: Codec) -> TrainerStep:
        """Return what is given in words of the run's codec, and what they do not say.

        Once: what is sent again are the same bytes.
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
        rows = [worded(one, codec, finite=finite, empty=empty) for one in given.rows]
        whole = sum(array.nbytes for array in given.arrays.values())
        whole += sum(one.data.nbytes for one in given.rows)
        made = sum(array.nbytes for array in words.values())
        made += sum(array.nbytes for one in rows for array in one.words or ())
        self.saved_nbytes += whole - made
        return given._replace(words=words, left=left, rows=rows)

    def keep(self, given: TrainerStep) -> None:
        """Keep what is left over of a step that was accepted.

        Not before: what was refused or lost takes nothing of what was left over. What
        weighs nothing brings no arrays, and does not either.
        """
        self._residuals |= given.left

    def round_read(self, target: Target) -> None:
        """Round what was read, where it has not come in words."""
        if self._read_codec is not None:
            encoding.round_read(self._read_codec, target.flats, self._empty)
