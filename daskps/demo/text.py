"""English text that comes with CPython: what ``help()`` knows, and docstrings.

Nothing is imported but the topics: docstrings of the standard library are read from its
files. The text depends on the version of Python alone.
"""

from __future__ import annotations

import builtins
import os
import re
import sysconfig
from collections import Counter
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from types import BuiltinFunctionType
from typing import TYPE_CHECKING

import numpy as np

from daskps.demo.options import DemoError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from daskps.typing import Array

_WORD = re.compile(r"[a-z]+")
_QUOTES = re.compile("'{3}|\"{3}")
#: Folders of what is no library, or not everywhere: what was installed, tests, programs.
_LEFT_OUT = {
    *("site-packages", "dist-packages", "test", "tests", "pydoc_data"),
    *("idlelib", "lib2to3", "turtledemo", "ensurepip"),
}


@dataclass(frozen=True)
class Corpus:
    """Texts as numbers of words, the most frequent word first.

    Attributes
    ----------
    words : tuple of str
        The words, by number.
    counts : ndarray of int, shape (n_words,)
        How often each occurs.
    texts : list of ndarray of int
        The words of each text, in order. Rare words are left out.
    """

    words: tuple[str, ...]
    counts: Array
    texts: list[Array]


def python_texts() -> Iterator[str]:
    """Give the topics of ``help()`` and the docstrings of Python and its library.

    Yields
    ------
    str
        A text.

    Raises
    ------
    DemoError
        Where Python came without them.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    try:
        from pydoc_data.topics import topics
    except ModuleNotFoundError as error:
        raise DemoError(
            f"this Python came without the topics of help(): {error}"
        ) from error
    files = list(_files_under(folder))
    if not files:
        raise DemoError(f"this Python came without the text of its library in {folder}")
    yield from (topics[name] for name in sorted(topics))
    yield from sorted(_of_builtins())
    for file in files:
        yield from docstrings(file.read_text("utf-8", errors="replace"))


def _files_under(folder: Path) -> Iterator[Path]:
    """Give the modules of the library, in the same order everywhere."""
    for place, folders, files in os.walk(folder):
        # In place: `os.walk` goes on with these.
        folders[:] = sorted(set(folders) - _LEFT_OUT)
        yield from (Path(place, name) for name in sorted(files) if name[-3:] == ".py")


def _of_builtins() -> set[str]:
    """Return the docstrings of what needs no import, and of its methods."""
    named = [one for one in vars(builtins).values() if _is_builtin(one)]
    types = [vars(one).values() for one in named if isinstance(one, type)]
    found = (getattr(one, "__doc__", None) for one in chain(named, *types))
    return {doc for doc in found if isinstance(doc, str)}


def _is_builtin(one: object) -> bool:
    """Return whether it is no instance, and nothing that somebody has put there."""
    return isinstance(one, type | BuiltinFunctionType) and one.__module__ == "builtins"


def docstrings(code: str) -> Iterator[str]:
    """Give the strings in triple quotes that begin a line of a module.

    That is its docstrings and little else. Python's own parser would tell exactly, and
    takes four times as long.

    Parameters
    ----------
    code : str
        Its text.

    Yields
    ------
    str
        A docstring.
    """
    at = 0
    while begin := _QUOTES.search(code, at):
        end = code.find(begin[0], begin.end())
        if end < 0:
            return
        line = code.rfind("\n", 0, begin.start()) + 1
        if not code[line : begin.start()].strip(" \trRuU"):
            yield code[begin.end() : end]
        at = end + len(begin[0])


def read(texts: Iterable[str], *, at_least: int) -> Corpus:
    """Return texts as numbers of words.

    Parameters
    ----------
    texts : iterable of str
        The texts; of each the words are its runs of letters from a to z, in lower case.
    at_least : int
        How often a word must occur, or it is left out.

    Returns
    -------
    Corpus
        The words and the texts; the same for the same texts.
    """
    split = [_WORD.findall(text.lower()) for text in texts]
    counted = Counter(chain.from_iterable(split))
    kept = sorted(
        (word for word, n in counted.items() if n >= at_least),
        key=lambda word: (-counted[word], word),
    )
    number = {word: i for i, word in enumerate(kept)}
    return Corpus(
        tuple(kept),
        np.array([counted[word] for word in kept], dtype=np.int64),
        [np.array([number[w] for w in text if w in number], int) for text in split],
    )


def windows(corpus: Corpus, *, width: int, often: float, seed: int) -> Array:
    """Return each word of the texts between the words around it.

    Of a word that makes up a share f of the texts about the share ``sqrt(often / f)`` is
    kept, all of those below `often`; words next to each other are those that are kept. The
    first and last words of a text are around others and have no window of their own.

    Parameters
    ----------
    corpus : Corpus
        The texts.
    width : int
        How many words on each side.
    often : float
        The share from which words are too frequent to say much.
    seed : int
        The seed of the choice of those that are kept.

    Returns
    -------
    ndarray of int, shape (n, 2 * width + 1)
        Numbers of words; the word itself is in the middle.
    """
    rng = np.random.default_rng(seed)
    share = corpus.counts / corpus.counts.sum()
    chance = np.sqrt(often / share)
    found = [np.empty((0, 2 * width + 1), dtype=np.int64)]
    for text in corpus.texts:
        kept = text[rng.random(len(text)) < chance[text]]
        if len(kept) > 2 * width:
            found.append(np.lib.stride_tricks.sliding_window_view(kept, 2 * width + 1))
    return np.concatenate(found)


def nearest(vectors: Array, word: int, n: int) -> Array:
    """Return the words whose vectors point most nearly where that of a word does.

    Parameters
    ----------
    vectors : ndarray, shape (n_words, dim)
        A vector for each word.
    word : int
        Number of the word.
    n : int
        How many.

    Returns
    -------
    ndarray of int, shape (n,)
        Their numbers, the nearest first, by the cosine; without the word itself.
    """
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    cosines = unit @ unit[word]
    cosines[word] = -np.inf
    return np.argsort(-cosines, kind="stable")[:n]


def found_pairs(
    corpus: Corpus, vectors: Array, pairs: Sequence[tuple[str, str]], n: int
) -> list[tuple[str, str]]:
    """Return the pairs of which the second word is among the nearest of the first.

    Parameters
    ----------
    corpus : Corpus
        The words.
    vectors : ndarray, shape (n_words, dim)
        A vector for each.
    pairs : sequence of tuple of str
        Two words each. Those that the texts do not have are not found.
    n : int
        How many are looked at.

    Returns
    -------
    list of tuple of str
        Those of `pairs`.
    """
    number = {word: i for i, word in enumerate(corpus.words)}
    return [
        (a, b)
        for a, b in pairs
        if a in number and number.get(b) in nearest(vectors, number[a], n)
    ]
