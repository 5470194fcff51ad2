"""Chunks of an array dealt out to trainers: pure arithmetic over their lengths."""

from __future__ import annotations

import bisect
import heapq
import itertools
from typing import TYPE_CHECKING

from daskps.training.data.rows import split_batch

if TYPE_CHECKING:
    from collections.abc import Sequence


def runs_of_chunks(heights: Sequence[int], k: int) -> list[list[tuple[int, slice]]]:
    """Deal the chunks of an array out to `k` parts, in order.

    The borders are those between chunks that are nearest to an even split, the lower
    one among equals, with one chunk per part at least. Only where there are fewer
    chunks than parts, chunks are cut, so that the largest part is as small as it can
    be with no part over two chunks. Empty chunks are left out.

    Parameters
    ----------
    heights : sequence of int
        Rows of each chunk.
    k : int
        Number of parts.

    Returns
    -------
    list of list of tuple
        For each part its chunks: number of the chunk and which of its rows. Each has
        one at least, so a part without rows still knows its columns.

    Examples
    --------
    >>> runs_of_chunks([4, 1, 1, 4], 2)
    [[(0, slice(0, 4, None)), (1, slice(0, 1, None))], [(2, slice(0, 1, None)), \
(3, slice(0, 4, None))]]
    >>> runs_of_chunks([4, 1], 3)
    [[(0, slice(0, 2, None))], [(0, slice(2, 4, None))], [(1, slice(0, 1, None))]]
    """
    full = full_chunks(heights)
    if k > len(full):
        cuts = _cuts([heights[i] for i in full], k)
        return [
            [(i, part)]
            for i, pieces in zip(full, cuts, strict=True)
            for part in split_batch(heights[i], [1] * pieces)
        ]
    ends = list(itertools.accumulate(heights[i] for i in full))
    borders = [0]
    for rank in range(1, k):
        # Chunks before the border: one more than the border before, and enough left.
        least, most = borders[-1] + 1, len(full) - (k - rank)
        after = bisect.bisect_left(ends, -(-ends[-1] * rank // k), least - 1, most - 1)
        near = [n for n in (after, after + 1) if least <= n <= most]
        borders.append(
            min(near, key=lambda n: (abs(ends[n - 1] * k - ends[-1] * rank), n))
        )
    borders.append(len(full))
    return [
        [(i, slice(0, heights[i])) for i in full[a:b]]
        for a, b in itertools.pairwise(borders)
    ]


def full_chunks(heights: Sequence[int]) -> list[int]:
    """Return the numbers of the chunks with rows; the first where none has any."""
    return [i for i, height in enumerate(heights) if height] or [0]


def _cuts(heights: Sequence[int], k: int) -> list[int]:
    """Return into how many of `k` pieces each chunk is cut, always the largest."""
    pieces = [1] * len(heights)
    largest = [(-height, i) for i, height in enumerate(heights)]
    heapq.heapify(largest)
    for _ in range(k - len(heights)):
        _, i = largest[0]
        pieces[i] += 1
        heapq.heapreplace(largest, (heights[i] // -pieces[i], i))
    return pieces
