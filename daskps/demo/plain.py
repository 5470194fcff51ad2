"""The same training with plain NumPy, in one process."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np

import daskps
from daskps.demo.digits import Digits, Params, gradient, initial
from daskps.demo.options import RULES, Options
from daskps.training.data.rows import batches

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from daskps.optim import Rule


def train_plain(options: Options, digits: Digits, trainers: int) -> Params:
    """Train in this process with plain NumPy: same batches, same mathematics.

    Under BSP the gradients of a round become their mean over rows, then one step.
    Under SSP and ASP every gradient is a step; here the trainers take turns.

    Parameters
    ----------
    options : Options
        The options of the command line.
    digits : Digits
        The data.
    trainers : int
        Number of trainers whose batches are used.

    Returns
    -------
    dict of str to ndarray
        The trained parameters.
    """
    params = initial()
    step = _plain_step(RULES[options.optimizer], params)
    parts = daskps.partition(digits.X, digits.y, trainers)
    for epoch in range(options.epochs):
        for turn in steps(options, len(digits.X), trainers, epoch=epoch):
            taken = [
                (parts[rank][0][rows], parts[rank][1][rows]) for rank, rows in turn
            ]
            if options.sync == "bsp":
                grads = [gradient(params, X, y)[1] for X, y in taken]
                step(_mean(grads, [len(y) for _, y in taken]))
            else:
                for X, y in taken:
                    step(gradient(params, X, y)[1])
    return params


def steps(
    options: Options, n: int, trainers: int, *, epoch: int
) -> Iterator[list[tuple[int, Any]]]:
    """Return for each round of an epoch the ranks that have a batch, and its rows.

    Parameters
    ----------
    options : Options
        Batch size and seed.
    n, trainers : int
        Training rows, and trainers they are dealt out to.
    epoch : int
        Number of the epoch, from 0.

    Returns
    -------
    iterator of list of tuple
        Pairs of rank and row numbers within that rank's part.
    """
    size, seed = options.batch_size, options.seed
    of_ranks = [
        batches(len(part), size, seed=seed, epoch=epoch, rank=rank)
        for rank, (part, _) in enumerate(daskps.partition(np.empty(n), None, trainers))
    ]
    for turn in itertools.zip_longest(*of_ranks):
        yield [(rank, rows) for rank, rows in enumerate(turn) if rows is not None]


def _mean(grads: Sequence[Params], rows: Sequence[int]) -> Params:
    return {
        name: np.average([g[name] for g in grads], axis=0, weights=rows)
        for name in grads[0]
    }


def _plain_step(rule: Rule, params: Params) -> Callable[[Params], None]:
    """Return a function that applies gradients to `params` in place."""
    slots = {
        name: [np.full_like(w, rule.slot_init.get(s, 0.0)) for s in rule.slots]
        for name, w in params.items()
    }
    count = itertools.count(1)

    def update(grads: Params) -> None:
        scalars = rule.scalars(next(count))
        for name, grad in grads.items():
            found = rule.update(params[name], grad, *slots[name], *scalars)
            # Without slots it is the weights alone.
            params[name], *slots[name] = found if rule.slots else (found,)

    return update
