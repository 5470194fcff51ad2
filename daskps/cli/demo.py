"""``daskps demo``."""

from __future__ import annotations

from typing import Any

import click

from daskps import demo as module
from daskps.cli.group import Failure, Misuse
from daskps.limits import MOST_TRAINERS

DEFAULTS = module.Options()


def address(ctx: click.Context, param: click.Parameter, value: str | None) -> Any:
    """Refuse an empty address, which Dask would take for none."""
    if value is not None and not value.strip():
        raise click.BadParameter("give an address, such as tcp://host:8786")
    return value


@click.command(short_help="Train softmax regression on handwritten digits.")
@click.option(
    "--scheduler",
    metavar="ADDRESS",
    callback=address,
    help="Use the running cluster of this scheduler, such as tcp://host:8786.",
)
@click.option(
    "--sync",
    type=click.Choice(module.POLICIES),
    default=DEFAULTS.sync,
    show_default=True,
    help="How trainers are kept together.",
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
    default=DEFAULTS.epochs,
    show_default=True,
    metavar="N",
    help="Passes over the data.",
)
@click.option(
    "--batch-size",
    type=click.IntRange(1),
    default=DEFAULTS.batch_size,
    show_default=True,
    metavar="ROWS",
    help="Rows per batch and trainer.",
)
@click.option(
    "--optimizer",
    type=click.Choice(tuple(module.RULES)),
    default=DEFAULTS.optimizer,
    show_default=True,
    help="The update rule of the store.",
)
@click.option(
    "--seed",
    type=click.IntRange(0),
    default=DEFAULTS.seed,
    show_default=True,
    metavar="N",
    help="Of the held-out rows and the batches.",
)
def demo(**given: Any) -> None:
    """Train softmax regression on handwritten digits.

    The digits come with scikit-learn. The store is on two worker processes of this
    machine or on a running cluster; then the same is done with plain NumPy.
    """
    options = module.Options(**given)
    if options.staleness is not None and options.sync != "ssp":
        raise click.UsageError(f"--staleness is for --sync ssp, not {options.sync}")
    try:
        module.demo(options)
    except module.DemoError as error:
        raise Misuse(str(error)) from error
    except TimeoutError as error:
        # Of a running cluster; in the command's own words for where its limit is.
        raise Failure(f"{error} (daskps.timeout in Dask's configuration)") from error
