"""Failures of commands: one line on standard error, and a status for the kind."""

from __future__ import annotations

from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any

import click

from daskps.errors import DaskPSError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

#: Exit statuses beside 0, as shells use them.
FAILED, MISUSED, INTERRUPTED = 1, 2, 130


class Failure(click.ClickException):
    """The end of a command that could not do what was asked.

    Parameters
    ----------
    message : str
        The error; printed as one line behind the command's name.
    """

    exit_code = FAILED

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))
        #: The command as the user called it, such as ``dask ps list``.
        self.command = ""

    def show(self, file: IO[Any] | None = None) -> None:
        """Print the line."""
        click.echo(f"{self.command}: {self.message}", file=file, err=True)


class Misuse(Failure):
    """A wrong option, or what a command needs and does not find."""

    exit_code = MISUSED


class Interrupted(Failure):
    """Ctrl-C."""

    exit_code = INTERRUPTED


class Group(click.Group):
    """Commands whose errors are one line, without the usage text."""

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        """Read the options of the group itself."""
        with _one_line(lambda: str(self.name)):
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command that was named."""
        with _one_line(lambda: f"{ctx.command_path} {ctx.invoked_subcommand or ''}"):
            return super().invoke(ctx)


@contextmanager
def _one_line(command: Callable[[], str]) -> Iterator[None]:
    """Turn errors into failures of a command."""
    try:
        yield
    except Failure as failure:
        raise _of(command(), failure) from failure.__cause__
    except click.UsageError as error:
        where = error.ctx.command_path if error.ctx else command()
        raise _of(where, Misuse(error.format_message())) from error
    except DaskPSError as error:
        raise _of(command(), Failure(f"{type(error).__name__}: {error}")) from error
    except KeyboardInterrupt as error:
        raise _of(command(), Interrupted("interrupted")) from error


def _of(command: str, failure: Failure) -> Failure:
    failure.command = command.strip()
    return failure
