"""The command ``daskps``."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any, NoReturn

from daskps import demo
from daskps.errors import DaskPSError
from daskps.version import VERSION

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Exit statuses beside 0, as shells use them.
FAILED, MISUSED, INTERRUPTED = 1, 2, 130
MOST_TRAINERS = 1024


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage text."""

    def error(self, message: str) -> NoReturn:
        self.exit(MISUSED, f"{self.prog}: {message}\n")


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
    parser = _parser()
    given = vars(parser.parse_args(argv))
    del given["command"]
    options = demo.Options(**given)
    if options.staleness is not None and options.sync != "ssp":
        parser.error(f"demo: --staleness is for --sync ssp, not {options.sync}")
    try:
        demo.demo(options)
    except demo.DemoError as error:
        print(f"daskps demo: {error}", file=sys.stderr)
        return MISUSED
    except DaskPSError as error:
        print(f"daskps demo: {type(error).__name__}: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("daskps demo: interrupted", file=sys.stderr)
        return INTERRUPTED
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="daskps",
        description="A distributed store of named arrays on a Dask cluster.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"daskps {VERSION}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    _add_demo(commands)
    return parser


def _add_demo(commands: Any) -> None:
    defaults = demo.Options()
    parser = commands.add_parser(
        "demo",
        help="train softmax regression on handwritten digits",
        description="Train softmax regression on the handwritten digits that come "
        "with scikit-learn, through a store on two worker processes of this machine "
        "or on a running cluster; then the same with plain NumPy.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--scheduler",
        type=_address,
        metavar="ADDRESS",
        help="use the running cluster of this scheduler, such as tcp://host:8786",
    )
    parser.add_argument(
        "--sync",
        choices=demo.POLICIES,
        default=defaults.sync,
        help="how trainers are kept together",
    )
    parser.add_argument(
        "--staleness",
        type=_whole(0),
        metavar="CLOCKS",
        help="with --sync ssp: by how many steps the slowest may be behind (3)",
    )
    parser.add_argument(
        "--trainers",
        type=_whole(1, MOST_TRAINERS),
        metavar="N",
        help="number of trainers (one per worker)",
    )
    parser.add_argument(
        "--epochs",
        type=_whole(1),
        default=defaults.epochs,
        metavar="N",
        help="passes over the data",
    )
    parser.add_argument(
        "--batch-size",
        type=_whole(1),
        default=defaults.batch_size,
        metavar="ROWS",
        help="rows per batch and trainer",
    )
    parser.add_argument(
        "--optimizer",
        choices=tuple(demo.RULES),
        default=defaults.optimizer,
        help="the update rule of the store",
    )
    parser.add_argument(
        "--seed",
        type=_whole(0),
        default=defaults.seed,
        metavar="N",
        help="of the held-out rows and the batches",
    )


def _address(text: str) -> str:
    if not text.strip():
        raise argparse.ArgumentTypeError("give an address, such as tcp://host:8786")
    return text


def _whole(least: int, most: int | None = None) -> Any:
    """Return a parser of whole numbers in a range."""
    allowed = f"at least {least}" if most is None else f"{least} to {most}"

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if number < least or (most is not None and number > most):
            raise argparse.ArgumentTypeError(
                f"{text!r} is not a whole number, {allowed}"
            )
        return number

    return parse


if __name__ == "__main__":
    sys.exit(main())
