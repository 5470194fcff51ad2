"""The commands ``daskps`` and ``dask ps``: one group under two names."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from daskps.cli.checkpoint import checkpoint
from daskps.cli.demo import demo
from daskps.cli.group import FAILED, INTERRUPTED, MISUSED, Group
from daskps.cli.stores import delete, list_, show, watch
from daskps.version import VERSION

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["FAILED", "INTERRUPTED", "MISUSED", "main", "ps"]


@click.group(
    "ps",
    cls=Group,
    help="A distributed store of named arrays on a Dask cluster.",
    # Without a command: one line, as for every other misuse.
    no_args_is_help=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 88},
)
@click.version_option(VERSION, message=f"daskps {VERSION}")
def ps() -> None:
    """Do nothing yet: the command that follows does."""


for command in (list_, show, watch, delete, checkpoint, demo):
    ps.add_command(command)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Parameters
    ----------
    argv : sequence of str, optional
        Arguments; those of the process by default.

    Returns
    -------
    int
        The exit status: 0, 1 for a failure, 2 for a wrong option or what is missing,
        130 after Ctrl-C.
    """
    try:
        ps.main(argv, prog_name="daskps")
    except SystemExit as end:
        return int(end.code or 0)
