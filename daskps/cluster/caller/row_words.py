"""Gradients of rows encoded by a run's codec: words for each shard."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from daskps.config import cache_dir
from daskps.errors import PushRejectedError

if TYPE_CHECKING:
    from daskps.cluster.caller.row_routes import RowsGiven
    from daskps.codecs import Codec
    from daskps.reduction import Empty


def worded(given: RowsGiven, codec: Codec, *, finite: bool, empty: Empty) -> RowsGiven:
    """Return rows in words, with the numbers that these stand for as data.

    Near shards take the data, so results do not depend on the carrier.

    Raises
    ------
    PushRejectedError
        If one of them is too large for the codec, or the codec breaks its promises.
        Nothing has been changed anywhere.
    """
    cut, dim = given.cut, given.cut.table.dim
    rows, of_rows = given.data.reshape(-1, dim), codec.of_rows(dim)
    back, words = empty(len(given.data), given.data.dtype), []
    for shard in range(len(cut.starts) - 1):
        start, stop = cut.starts[shard], cut.starts[shard + 1]
        if start == stop:
            words.append(np.empty(0, codec.dtype))
            continue
        at = cut.at_of(shard)
        where = slice(start, stop) if at is None else at
        part = np.ascontiguousarray(rows[where]).reshape(-1)
        made = of_rows.encode_pieces(
            part, [(0, len(part))], empty=empty, cache_dir=cache_dir()
        )
        if finite and not made.finite:
            raise PushRejectedError(
                f"the gradient of rows of table {cut.table.name[:60]!r} has elements "
                f"that are too large for codec={codec.name!r}; clip it, lower the "
                f"learning rate, or leave codec at None"
            )
        out = empty(len(part), part.dtype)
        of_rows.decode_piece(made.words[0], out, cache_dir=cache_dir())
        back.reshape(-1, dim)[where] = out.reshape(-1, dim)
        words.append(made.words[0])
    return given._replace(data=back, words=words)
