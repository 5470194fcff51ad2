"""The words of the demo: their text and the mathematics; test_demo.py trains them."""

from __future__ import annotations

import sys
import sysconfig
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from daskps import demo
from daskps.demo import skipgram, text, words
from daskps.demo.skipgram import CONTEXTS, WORDS

TEXTS = ["To be, or not to BE: that is.", "", "is to be to", "rare"]


@pytest.fixture(scope="module")
def data() -> words.WordData:
    return words.prepare(0)


# -- the text ----------------------------------------------------------------------


def test_docstrings_are_strings_in_triple_quotes_that_begin_a_line() -> None:
    code = '''"""Module, isn't it."""
def f():
    r\'\'\'Function
    with """quotes""".\'\'\'
    x = """no docstring"""
    return "", """nor
    this"""
class C:
    """ """
    """never ends
'''
    found = list(text.docstrings(code))
    assert found == ["Module, isn't it.", 'Function\n    with """quotes""".', " "]


def test_words_are_numbered_by_how_often_they_occur_then_by_the_alphabet() -> None:
    corpus = text.read(TEXTS, at_least=2)
    assert corpus.words == ("to", "be", "is")
    assert corpus.counts.tolist() == [4, 3, 2]
    assert [found.tolist() for found in corpus.texts] == [
        [0, 1, 0, 1, 2],
        [],
        [2, 0, 1, 0],
        [],
    ]
    every = text.read(TEXTS, at_least=1).words
    assert every[3:] == ("not", "or", "rare", "that")


def test_windows_stay_in_their_text() -> None:
    corpus = text.read(TEXTS, at_least=2)
    found = text.windows(corpus, width=1, often=1.0, seed=0)
    assert found.tolist() == [[0, 1, 0], [1, 0, 1], [0, 1, 2], [2, 0, 1], [0, 1, 0]]
    assert text.windows(corpus, width=3, often=1.0, seed=0).shape == (0, 7)


def test_frequent_words_are_thinned_out_the_same_each_time() -> None:
    corpus = text.read(["a " * 9_000 + "b " * 1_000], at_least=1)
    found = text.windows(corpus, width=0, often=0.1, seed=3)
    assert np.array_equal(found, text.windows(corpus, width=0, often=0.1, seed=3))
    assert len(found) != len(text.windows(corpus, width=0, often=0.1, seed=4))
    assert (found == 1).sum() == 1_000
    assert (found == 0).sum() == pytest.approx(3_000, rel=0.1)


def test_the_text_of_python_is_the_same_each_time(data: words.WordData) -> None:
    corpus = text.read(text.python_texts(), at_least=words.AT_LEAST)
    assert corpus.words == data.corpus.words
    assert all(map(np.array_equal, corpus.texts, data.corpus.texts))
    assert len(corpus.words) > 1_000
    assert corpus.counts.min() >= words.AT_LEAST
    assert all(a >= b for a, b in pairwise(corpus.counts))
    assert {word for pair in words.PAIRS for word in pair} <= set(corpus.words)
    assert len({*words.PAIRS}) == len(words.PAIRS) == 10
    assert len(np.unique(data.ids)) == len(corpus.words)
    assert np.isin(data.X, data.ids).all()


def test_a_python_without_its_text_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda _: tmp_path)
    with pytest.raises(demo.DemoError, match="without the text of its library"):
        next(text.python_texts())
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(demo.DemoError, match=r"without the topics of help\(\)"):
        next(text.python_texts())


def test_what_is_installed_is_no_part_of_the_library(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kept = ("b.py", "a.py", "x.py", "h.py", "c/k.py", "c/d.py")
    for name in (*kept, "site-packages/e.py", "c/tests/f.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f'"""{name}"""\n')
    (tmp_path / "g.txt").write_text('"""no module"""')
    monkeypatch.setattr(sysconfig, "get_path", lambda _: tmp_path)
    found = list(text.python_texts())[-len(kept) :]
    assert found == ["a.py", "b.py", "h.py", "x.py", "c/d.py", "c/k.py"]


def test_nearest_go_by_direction_without_the_word_itself() -> None:
    corpus = text.read(["a a a a b b b c c d"], at_least=1)
    vectors = np.array([[1.0, 0.0], [0.0, 1.0], [9.0, 1.0], [-1.0, 0.0]])
    assert text.nearest(vectors, 0, 2).tolist() == [2, 1]
    pairs = [("a", "c"), ("a", "b"), ("c", "a"), ("a", "gone"), ("gone", "a")]
    assert text.found_pairs(corpus, vectors, pairs, 1) == [("a", "c"), ("c", "a")]


# -- the mathematics ---------------------------------------------------------------


def test_contexts_are_the_words_around_and_draws_by_frequency() -> None:
    contexts = skipgram.Contexts.of(np.array([5, -6, 7]), np.array([16, 0, 1]))
    X = np.array([[1, 2, 3], [4, 5, 6]])
    assert skipgram.middle(X).tolist() == [2, 5]
    found = contexts(X, np.random.default_rng(0))
    assert found[:4].tolist() == [1, 3, 4, 6]
    drawn = found[4:]
    assert len(drawn) == skipgram.N_DRAWN
    assert set(drawn) == {5, 7}
    assert (drawn == 5).mean() == pytest.approx(8 / 9, abs=0.07)
    assert np.array_equal(found, contexts(X, np.random.default_rng(0)))


def test_gradient_is_the_derivative_of_the_loss(rng: np.random.Generator) -> None:
    X = rng.integers(0, 9, (3, 5))
    params = {
        WORDS: rng.normal(size=(3, 4)),
        CONTEXTS: rng.normal(size=(12 + skipgram.N_DRAWN, 4)),
    }
    loss, grads = skipgram.gradient(params, X, None)
    for name, index in [(WORDS, (1, 2)), (CONTEXTS, (7, 3)), (CONTEXTS, (12, 0))]:
        losses = []
        for step in (1e-5, -1e-5):
            moved = {n: p.copy() for n, p in params.items()}
            moved[name][index] += step
            losses.append(skipgram.gradient(moved, X, None)[0])
        slope = (losses[0] - losses[1]) / 2e-5
        assert grads[name][index] == pytest.approx(slope, abs=1e-8)
        assert abs(slope) > 1e-6
    # Of one window by the definition, pair by pair.
    around = params[CONTEXTS][:12].reshape(3, 4, 4)
    drawn = params[CONTEXTS][12:]
    each = [
        np.log1p(np.exp(-around[i] @ u)).sum()
        + 4 * skipgram.NEGATIVES * np.log1p(np.exp(drawn @ u)).mean()
        for i, u in enumerate(params[WORDS])
    ]
    assert loss == pytest.approx(np.mean(each))
