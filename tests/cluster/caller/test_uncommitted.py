"""What a trainer keeps of its clock, to send it to the next owner of a shard."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from daskps import codecs
from daskps.cluster.caller.row_routes import IdSplit, RowBatch
from daskps.cluster.caller.shard_map import Prepared
from daskps.cluster.caller.uncommitted import Uncommitted
from daskps.cluster.protocol import encoding
from daskps.layout.arrays import Layout
from daskps.shards.steps import ADD, GRADIENT, Step

LAYOUT = Layout.build({"w": ((5,), "float32"), "h": ((3,), "float16")}, 2)


def uncommitted(codec: Any = None, layout: Layout = LAYOUT) -> Uncommitted:
    meta: Any = SimpleNamespace(layout=layout, where=object())
    meta.routes = Prepared(meta)
    return Uncommitted(meta, codec, np.empty)


def sums_of(kept: Uncommitted, arrays: Any) -> Any:
    return kept.whole(Step(), arrays, ()).arrays


def test_sums_are_those_of_the_shard_and_the_arrays_stay_the_caller_s():
    kept, w = uncommitted(), np.full(5, 0.1, "f4")
    kept.add({0: w})
    w[:] = 0.2
    kept.add({0: w, 1: np.ones(3, "f4")})
    w[:] = 0.7
    expected = np.float32(0.1) + np.float32(0.2) + np.float32(0.7)
    for _ in range(2):
        found = sums_of(kept, {0: w})
        np.testing.assert_array_equal(found[0], np.full(5, expected))
        np.testing.assert_array_equal(found[1], 1)
    assert (w == np.float32(0.7)).all()
    kept.clear()
    assert sums_of(kept, {}) == {}


@pytest.mark.parametrize("index", [0, 1])
def test_words_become_numbers(index):
    """Both parameters are summed in float32."""
    codec, given = codecs.BFloat16(), {index: np.full((5, 3)[index], 1.5, "f4")}
    kept = uncommitted(codec)
    words, _ = encoding.encoded(LAYOUT, given, codec, finite=True, empty=np.empty)
    kept.add(words)
    kept.add(words)
    found = sums_of(kept, words)[index]
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, 4.5)


def test_rows_of_a_clock_go_one_after_the_other():
    """In the order of the pushes, which is that of the sums; the arrays stay ours."""
    layout = Layout.build({}, 2, {"emb": (4, 1, "float32")})
    kept = uncommitted(layout=layout)

    def given(ids, data):
        cut = IdSplit.of(layout.tables[0], np.array(ids), 2)
        return RowBatch(cut, np.array(data, "f4"))

    first = given([3, 0], [1, 2])
    kept.add({}, [first])
    first.data[:] = 9
    for _ in range(2):
        [found] = kept.whole(Step(), {}, [given([0, 3], [3, 4])]).rows
        assert found.ids.tolist() == [3, 0, 0, 3]
        assert found.data.tolist() == [1, 2, 3, 4]
    kept.clear()
    assert kept.whole(Step(), {}, []).rows == ()


def test_what_is_sent_again_is_nobody_else_s():
    """Whole pushes of gradients, also where only an earlier one had arrays."""
    kept, w = uncommitted(), np.ones(5, "f4")
    kept.add({0: w})
    again = kept.whole(Step(tick=True, sequence=7), {}, ())
    assert (again.step.kind, again.step.whole, again.step.sequence) == (
        GRADIENT,
        True,
        7,
    )
    last = kept.whole(Step(kind=ADD, tick=True), {1: (b := np.ones(3, "f4"))}, ())
    w[:] = b[:] = 5
    assert last.step.kind == ADD
    assert [a.tolist() for a in last.arrays.values()] == [[1] * 5, [1] * 3]


def test_values_of_a_coded_run_are_no_words():
    """In such a run only gradients are encoded."""
    kept, w = uncommitted(codecs.BFloat16()), np.ones(5, "f4")
    kept.add({0: w})
    w[:] = 5
    assert sums_of(kept, {0: w})[0].tolist() == [6] * 5
