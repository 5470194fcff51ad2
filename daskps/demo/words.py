"""The words of ``daskps demo``: a vector for each, in an unbounded table.

Skip-gram with negative sampling on the text that comes with CPython. The rows of a
batch are read while the one before is computed, and nobody knows how many there will
be.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import daskps
from daskps.demo import skipgram, text
from daskps.demo.servers import cluster
from daskps.demo.skipgram import CONTEXTS, WORDS
from daskps.demo.waiting import WaitNotice
from daskps.optim import Adagrad

if TYPE_CHECKING:
    from collections.abc import Sequence

    from daskps.demo.options import Options
    from daskps.demo.text import Corpus
    from daskps.typing import Array

#: Chosen before a vector was trained, from what the text is about. The second should be
#: among the `N_NEAREST` of the first.
PAIRS = (
    *(("read", "write"), ("client", "server"), ("open", "close"), ("int", "float")),
    *(("list", "tuple"), ("true", "false"), ("day", "month"), ("encode", "decode")),
    *(("string", "bytes"), ("stdin", "stdout")),
)
N_NEAREST = 10
#: Of whose neighbours some are printed.
SHOWN, N_SHOWN = ("read", "client", "day", "stdin"), 5

DIM = 64
#: How often a word must occur, words on each side of it, and the share from which it is
#: too frequent to say much.
AT_LEAST, WIDTH, OFTEN = 20, 2, 3e-3
RULE = Adagrad(0.2, rowwise=True)


@dataclass(frozen=True)
class WordData:
    """The words, their ids, and the windows to train on, which are ids too."""

    corpus: Corpus
    ids: Array
    X: Array


def prepare(seed: int) -> WordData:
    """Read the text that comes with Python.

    Parameters
    ----------
    seed : int
        The seed of the choice of frequent words that are left out where they occur.

    Returns
    -------
    WordData
        The data to train on.

    Raises
    ------
    DemoError
        If there is no such text.
    """
    corpus = text.read(text.python_texts(), at_least=AT_LEAST)
    ids = daskps.hash_ids(corpus.words)
    X = ids[text.windows(corpus, width=WIDTH, often=OFTEN, seed=seed)]
    return WordData(corpus, ids, X)


def demo(options: Options) -> None:
    """Train vectors of words through a store, and print how it went.

    Parameters
    ----------
    options : Options
        The options of the command line.

    Raises
    ------
    DemoError
        If Python's text is missing, or the cluster cannot be reached, has no workers
        or lacks daskps.
    """
    with WaitNotice("the text"):
        data = prepare(options.seed)
    with cluster(options.scheduler) as client:
        trainers = options.trainers or len(client.nthreads())
        vectors = train(options, data, client, trainers)
    print()
    for word in (word for word in SHOWN if word in data.corpus.words):
        number = data.corpus.words.index(word)
        near = text.nearest(vectors, number, N_SHOWN)
        print(f"{word:8}", *(data.corpus.words[i] for i in near))
    found = text.found_pairs(data.corpus, vectors, PAIRS, N_NEAREST)
    named = ["/".join(pair) for pair in found]
    print(f"\n{len(found)} of {len(PAIRS)} pairs are among the {N_NEAREST} nearest:")
    print(*named)


def train(options: Options, data: WordData, client: Any, trainers: int) -> Array:
    """Train through a store, printing as it goes.

    Where nobody has said how many trainers, the first epoch is that of one alone.

    Parameters
    ----------
    options : Options
        The options of the command line.
    data : WordData
        The words and the windows.
    client : distributed.Client
        Where.
    trainers : int
        Number of trainers.

    Returns
    -------
    ndarray, shape (n_words, DIM)
        The vectors of the words.
    """
    tables = {
        WORDS: daskps.TableSpec(None, DIM, init=daskps.init.normal(std=DIM**-0.5 / 2)),
        CONTEXTS: daskps.TableSpec(None, DIM),
    }
    alone = 1 if options.trainers is None and options.epochs > 1 else 0
    with WaitNotice("the store, whose loops are compiled the first time"):
        made = daskps.create(tables, optimizer=RULE, client=client, seed=options.seed)
    with made as store:
        print(f"{len(store.placement)} shards of unbounded tables:")
        for shard, worker in enumerate(store.placement):
            print(f"  shard {shard} on {worker}")
        print(
            f"{len(data.X):,} words with {2 * WIDTH} around each, of Python "
            f"{platform.python_version()}'s help and docstrings\n"
            f"{options.sync}, batches of {options.batch_size}, {RULE!r}\n"
        )
        run = partial(_run, store, data, options)
        # Or compiling would count as time that words take.
        with WaitNotice("the first step, whose loops are compiled the first time"):
            run(data.X[: options.batch_size * trainers], trainers=trainers, epochs=1)
        print("epoch  trainers    loss  words/s  seconds", flush=True)
        with WaitNotice("the first epoch") as waiting:
            for n, epochs in ((1, alone), (trainers, options.epochs - alone)):
                lines = _Lines(waiting, len(data.X), n)
                if epochs:
                    run(data.X, trainers=n, epochs=epochs, callbacks=[lines])
        n_rows = store[WORDS].n_rows
        print(f"\n{n_rows:,} vectors of {DIM} numbers in the table of words")
        vectors: Array = store[WORDS].pull(data.ids)
        return vectors


def _run(
    store: Any,
    data: WordData,
    options: Options,
    X: Array,
    *,
    trainers: int,
    epochs: int,
    callbacks: Sequence[_Lines] = (),
) -> None:
    contexts = skipgram.Contexts.of(data.ids, data.corpus.counts)
    daskps.train(
        store,
        skipgram.gradient,
        X,
        rows={WORDS: skipgram.middle, CONTEXTS: contexts},
        epochs=epochs,
        batch_size=options.batch_size,
        trainers=trainers,
        sync=options.policy,
        # Other batches and samples than those of the run before.
        seed=options.seed + trainers,
        callbacks=callbacks,
    )


class _Lines:
    """Prints a line per epoch of a run; epoch 0 of the store was the first step."""

    def __init__(self, waiting: WaitNotice, n_words: int, trainers: int) -> None:
        self._waiting, self._n_words = waiting, n_words
        self._trainers = trainers

    def on_epoch(self, run: Any) -> None:
        self._waiting.end()
        epoch = run.history[-1]
        print(
            f"{epoch.epoch:5d}  {self._trainers:8d}  "
            f"{epoch.loss:6.3f}  {self._n_words / epoch.seconds:7,.0f}  "
            f"{epoch.seconds:7.3f}",
            flush=True,
        )
