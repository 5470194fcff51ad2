"""``daskps demo``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import click

from daskps import demo as module
from daskps.cli.group import Failure, Misuse
from daskps.limits import MOST_TRAINERS


def default(name: str, *, words: bool = True) -> str:
    """Return what the help says of a default: that of the digits, then of the words."""
    digits, others = (getattr(module.TASKS[task], name) for task in ("digits", "words"))
    return f"[default: {digits}{f'; words: {others}' if words else ''}]"


def address(ctx: click.Context, param: click.Parameter, value: str | None) -> Any:
    """Refuse an empty address, which Dask would take for none."""
    if value is not None and not value.strip():
        raise click.BadParameter("give an address, such as tcp://host:8786")
    return value


@click.command(short_help="Train on handwritten digits, or vectors of words.")
@click.option(
    "--task",
    type=click.Choice(tuple(module.TASKS)),
    default="digits",
    show_default=True,
    help="The task to train: softmax regression, or vectors of words.",
)
@click.option(
    "--scheduler",
    metavar="ADDRESS",
    callback=address,
    help="Use the running cluster of this scheduler, such as tcp://host:8786.",
)
@click.option(
    "--sync",
    type=click.Choice(module.POLICIES),
    help=f"How trainers are kept together.  {default('sync')}",
)
@click.option(
    "--staleness",
    type=click.IntRange(0),
    metavar="CLOCKS",
    help="With --sync ssp: by how many steps the slowest may be behind.  [default: 3]",
)
@click.option(
    "--trainers",
    type=click.IntRange(1, MOST_TRAINERS),
    metavar="N",
    help="Number of trainers.  [default: one per worker]",
)
@click.option(
    "--epochs",
    type=click.IntRange(1),
    metavar="N",
    help=f"Passes over the data.  {default('epochs')}",
)
@click.option(
    "--batch-size",
    type=click.IntRange(1),
    metavar="ROWS",
    help=f"Rows per batch and trainer.  {default('batch_size')}",
)
@click.option(
    "--optimizer",
    type=click.Choice(tuple(module.RULES)),
    help="With --task digits: the update rule of the store.  "
    f"{default('optimizer', words=False)}",
)
@click.option(
    "--seed",
    type=click.IntRange(0),
    metavar="N",
    help=f"Of the held-out rows and the batches.  {default('seed', words=False)}",
)
def demo(task: str, **given: Any) -> None:
    """Train on handwritten digits, or vectors of words.

    The store is on two worker processes of this machine or on a running cluster. The
    digits come with scikit-learn; softmax regression is trained on them, then the same
    is done with plain NumPy. The words are those of Python's help and docstrings; each
    gets a vector in an unbounded table, and at the end neighbours are looked up.
    """
    chosen = {name: value for name, value in given.items() if value is not None}
    if task == "words" and "optimizer" in chosen:
        raise click.UsageError("--optimizer is for --task digits, not words")
    options = replace(module.TASKS[task], **chosen)
    if options.staleness is not None and options.sync != "ssp":
        raise click.UsageError(f"--staleness is for --sync ssp, not {options.sync}")
    try:
        module.demo(options)
    except module.DemoError as error:
        raise Misuse(str(error)) from error
    except TimeoutError as error:
        # Of a running cluster; in the command's own words for where its limit is.
        raise Failure(f"{error} (daskps.timeout in Dask's configuration)") from error
