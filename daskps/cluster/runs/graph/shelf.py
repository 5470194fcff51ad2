"""Where the contributions of one run are kept on a worker, and found from others."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from daskps import config
from daskps.cluster.host.contributions import Contribution, contribution
from daskps.cluster.host.shared_contributions import Neighbours, Sheets, spans
from daskps.cluster.machine import accounting
from daskps.cluster.wire.encoding import encoded
from daskps.layout.arrays import compute_dtype

if TYPE_CHECKING:
    from daskps.cluster.caller.routes import Computed
    from daskps.cluster.caller.shard_map import StoreMap
    from daskps.cluster.host.contributions import Receipt
    from daskps.cluster.host.host import ShardHost
    from daskps.codecs import Codec
    from daskps.reduction import Reducer


class Shelf:
    """The contributions of one run as one worker keeps and finds them.

    Parameters
    ----------
    host : ShardHost
        The worker's.
    run : int
        The run.
    meta : StoreMap
        The store.
    reduce : str or callable
        How contributions become one gradient.
    codec : Codec or None
        How they are kept.
    """

    def __init__(
        self,
        host: ShardHost,
        run: int,
        meta: StoreMap,
        *,
        reduce: str | Reducer,
        codec: Codec | None,
    ) -> None:
        self._layout, self._reduce, self._codec = meta.layout, reduce, codec
        self._dtypes = [
            np.dtype(codec.dtype if codec else compute_dtype(p.dtype))
            for p in meta.layout.parameters
        ]
        self._finite = config.load().check_finite
        self._pool = host.pool
        memory, shared = host.memory(meta.cluster), host.contributions.shared
        whole = self._nbytes(range(len(self._dtypes)))
        self._sheets: Sheets = shared(run, "sheets", lambda: Sheets(memory, whole))
        # A process that is charged for what it touches asks for it by message; and one
        # that cannot tell without a lock whether what it has read was whole.
        by_message = not accounting.may_map() or config.load().locked_reads
        registry = memory.registry if memory and not by_message else None
        self._neighbours: Neighbours = shared(
            run, "neighbours", lambda: Neighbours(registry)
        )

    def _nbytes(self, indices: Any) -> list[int]:
        """Return the bytes of parameters as they are kept."""
        parameters = self._layout.parameters
        return [parameters[i].size * self._dtypes[i].itemsize for i in indices]

    def keep(self, found: Computed) -> Contribution:
        """Return what a rank delivers as it is kept; the arrays stay the caller's.

        Raises
        ------
        PushRejectedError
            If one of them is too large for the run's codec.
        """
        layout, codec, arrays = self._layout, self._codec, found.arrays
        sheet = self._sheets.take(self._nbytes(arrays)) if arrays else None
        empty = sheet.empty if sheet else self._pool.empty
        weight = float(found.rows)
        if codec is None:
            kept = contribution(layout, arrays, weight, self._reduce, empty=empty)
        else:
            words = encoded(layout, arrays, codec, finite=self._finite, empty=empty)
            kept = Contribution(layout, weight, words, codec, self._scale(weight))
        return replace(kept, spot=sheet.publish(arrays)) if sheet else kept

    def _scale(self, weight: float) -> float:
        """Return what the words of a contribution are multiplied by."""
        return weight if self._codec and self._reduce == "mean" else 1.0

    def find(self, receipt: Receipt) -> Contribution | None:
        """Return what another worker keeps, as views of its memory.

        Good as long as :meth:`holds` says so afterwards. None where it cannot be
        mapped here, or is no longer what it was.
        """
        weight, arrays = float(receipt.rows), {}
        if receipt.kind is None:
            return Contribution(self._layout, weight, {})
        spot = receipt.spot
        memory = self._neighbours.find(spot)
        if spot is None or memory is None:
            return None
        sizes = self._nbytes(spot.indices)
        for index, (first, last) in zip(spot.indices, spans(sizes), strict=True):
            array = memory[first:last].view(self._dtypes[index])
            array.flags.writeable = False
            arrays[index] = array
        scale = self._scale(weight)
        return Contribution(self._layout, weight, arrays, self._codec, scale, spot)

    def holds(self, found: Contribution) -> bool:
        """Return whether a contribution that was found here is what it was."""
        spot = found.spot
        return spot is None or self._neighbours.find(spot) is not None
