"""Plain functions, compiled as they are written."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from daskps.kernels import plain
from daskps.shards.rounds import words as tablework
from tests.kernels import compiling

if TYPE_CHECKING:
    from daskps.kernels.words import Floats, Longs

#: Taken as it is when the function is compiled.
STEP = 3


def sums(words: Longs, start: int, out: Floats) -> int:
    """Add up every third word from one on, into the first of another array."""
    for i in range(start, words.size, STEP):
        out[0] += words[i]
    return len(words)


@pytest.mark.parametrize("kept", [True, False])
def test_plain_functions_are_compiled_with_their_numbers(kept, tmp_path):
    words, out = np.arange(10), np.zeros(1)
    for hits in (0, 1):
        module = plain((sums,), str(tmp_path) if kept else None)
        assert module.function("sums")(words, 1, out) == 10
        assert out[0] == (hits + 1) * (1 + 4 + 7)
        assert compiling.hits(module) == (hits if kept else 0)


def test_plain_functions_need_no_text(tmp_path):
    """As of an installation without sources."""
    space: dict[str, Any] = {"STEP": STEP}
    exec(
        "def of(words: Longs, n: int):\n    'Text.'\n    return words[n * STEP] - 1",
        space,
    )
    for hits in (0, 1):
        module = plain((space["of"],), str(tmp_path))
        assert module.function("of")(np.arange(10), 2) == 5
        assert compiling.hits(module) == hits


def test_plain_function_that_does_not_compile_says_so():
    def of(words: Longs) -> Any:
        return words.nothing

    with pytest.raises(TypeError, match="does not compile"):
        plain((of,)).function("of")


@pytest.mark.parametrize("name", tablework.Compiled._fields)
def test_compiled_functions_do_what_is_written(name):
    """On random words of a table of five ranks and four slices, and its record."""
    rng, size, n_slices = np.random.default_rng(5), 5, 4
    compiled = getattr(tablework.compiled(), name)
    written = getattr(tablework, name)
    n_table = tablework.HEAD + 2 * size + 2 * n_slices + 1
    for _ in range(200):
        table, other = rng.integers(-1, 4, (2, n_table))
        record = rng.integers(0, 3, 40)
        path = np.array([0, 2, 1, 0, 0, 4, 2, 0, 0, 5, 4, 0])
        found = rng.integers(0, n_slices, 12)
        rank, weight = int(rng.integers(size)), float(rng.uniform(0.1, 3))
        a, b, out = rng.normal(size=(3, 7)) * 1e3
        if name == "form4":
            a, b, out = (x.astype("f4") for x in (a, b, out))
        given = {
            "empty": (table, record, 13, size, n_slices),
            "climb": (table, size, n_slices, 0, rank % 2, path, found),
            "look": (table, size, n_slices, 0, rank % 2, 1, 2, 1, path, found),
            "join": (table, other, size, n_slices, found, 2, rank, 1, 9, 1, weight),
            "note": (record, 13, table, size, rank, 1, 9, weight),
            "form4": (out, a, weight, b, 3.0),
            "form8": (out, a, weight, b, 3.0),
        }[name]
        copies = [x.copy() if isinstance(x, np.ndarray) else x for x in given]
        assert compiled(*given) == written(*copies)
        for one, two in zip(given, copies, strict=True):
            assert np.asarray(one).tobytes() == np.asarray(two).tobytes()
