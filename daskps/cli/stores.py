"""``daskps list``, ``show``, ``watch`` and ``delete``: the stores of a cluster."""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from math import inf
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any, TypeVar

import click
from dask.utils import format_bytes

from daskps import config
from daskps.cli.demo import address
from daskps.cli.group import Failure
from daskps.cluster.caller.finding import (
    StoreView,
    delete_store,
    find_store,
    find_stores,
)
from daskps.store.repr import counted_tables, printable, shards_line, text_table
from daskps.training.callbacks import is_watched

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

T = TypeVar("T")
CONNECT_SECONDS = 30.0
NO_DASKPS = "no daskps stores on this cluster"
#: Counters of a shard that are shown, in this order.
COUNTERS = (
    "generation",
    "version",
    "nbytes",
    "segment_nbytes",
    "pushes",
    "duplicates",
    "parked",
)
#: The longest time between two looks, in seconds.
_MOST_SECONDS = 86_400
#: Those that are watched.
_WATCHED = ("version", "pushes", "rate", "duplicates", "parked")
#: Shown of shards on devices, and of those that have a second copy.
_OF_DEVICE = ("device", "device_nbytes")
_OF_COPIES = ("copy", "copy_nbytes", "behind")
#: Heads of columns that are not named as their keys.
_BYTES = {
    "nbytes": "bytes",
    "segment_nbytes": "memory",
    "device_nbytes": "device memory",
    "copy_nbytes": "copy's memory",
}
HEADS = {**_BYTES, "time": "time (UTC)", "rate": "pushes/s"}

_scheduler = click.option(
    "--scheduler",
    metavar="ADDRESS",
    callback=address,
    help="The scheduler, such as tcp://host:8786.  [default: $DASK_SCHEDULER_ADDRESS, "
    "or scheduler-address of Dask's configuration]",
)
_as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.command("list", short_help="List the stores of a cluster.")
@_scheduler
@_as_json
def list_(scheduler: str | None, as_json: bool) -> None:
    """List the stores of a cluster.

    Nothing is changed on the cluster, also where it has never seen daskps.
    """
    found = _reach(scheduler, lambda at: find_stores(at, CONNECT_SECONDS))
    rows = [_store(row) for row in found or ()]
    if as_json:
        click.echo(json.dumps(rows, indent=2))
    elif found is None:
        click.echo(NO_DASKPS)
    elif not rows:
        click.echo("no stores")
    else:
        columns = (
            "name",
            "kind",
            "parameters",
            "tables",
            "shards",
            "workers",
            "nbytes",
        )
        click.echo(table(_with_device(columns, rows), rows))


@click.command(short_help="Show the parameters and shards of a store.")
@click.argument("name")
@_scheduler
@_as_json
def show(name: str, scheduler: str | None, as_json: bool) -> None:
    """Show the parameters and shards of the store NAME, which may be its uid.

    Of a shard "bytes" are those of its values, and "memory" is what it takes on its
    worker, with a second buffer, optimizer state and records.

    Nothing is changed on the cluster, also where it has never seen daskps.
    """
    sight = _reach(scheduler, lambda at: find_store(at, name, CONNECT_SECONDS))
    if sight is None:
        raise Failure(NO_DASKPS)
    found = described(sight)
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    click.echo(f"{found['kind']} store {found['name']!r}, uid {found['uid']}\n")
    columns = ("name", "shape", "dtype", "nbytes", "optimizer")
    if found["parameters"]:
        click.echo(table(_placed(columns, found), found["parameters"]))
        click.echo()
    if found["tables"]:
        of_rows = ("name", "rows", "dim", "dtype", "nbytes", "steps", "optimizer")
        click.echo(table(_placed(of_rows, found), found["tables"]))
        click.echo()
    every = ("shard", "worker", *COUNTERS)
    click.echo(table(_with_device(every, found["shards"]), found["shards"]))


@click.command(short_help="Free a store on all workers.")
@click.argument("name")
@click.option("--yes", is_flag=True, help="Do not ask before.")
@_scheduler
def delete(name: str, yes: bool, scheduler: str | None) -> None:
    """Free the store NAME, which may be its uid, even where others use it.

    Its values are gone then, but for what checkpoints have.
    """
    if not yes:
        click.confirm(f"free store {name!r} and all its values?", abort=True)
    found = _reach(scheduler, lambda at: delete_store(at, name, CONNECT_SECONDS))
    if found is None:
        raise Failure(NO_DASKPS)
    click.echo(f"deleted store {found!r}")


@click.command(short_help="Show a store again and again.")
@click.argument("name")
@click.option(
    "--interval",
    type=click.FloatRange(0.1),
    default=2.0,
    show_default=True,
    metavar="SECONDS",
    help="Between two looks.",
)
@click.option(
    "--count", type=click.IntRange(1), metavar="N", help="Look so often, then end."
)
@_scheduler
def watch(name: str, interval: float, count: int | None, scheduler: str | None) -> None:
    """Show the shards of the store NAME with their pushes per second, until Ctrl-C.

    Nothing is changed on the cluster.
    """
    if not interval <= _MOST_SECONDS:
        raise click.UsageError(f"--interval {interval:g} is not up to {_MOST_SECONDS}")
    before: dict[int, int] = {}
    began = 0.0
    for number in itertools.count(1):
        sight = _reach(scheduler, lambda at: find_store(at, name, CONNECT_SECONDS))
        if sight is None:
            raise Failure(NO_DASKPS)
        now = monotonic()
        seconds, began = now - began, now
        rows = [
            row | {"rate": (row["pushes"] - before[row["shard"]]) / seconds}
            # Fewer: its store was made anew, or cut anew.
            if before.get(row["shard"], inf) <= row.get("pushes", -1)
            else row
            for row in described(sight)["shards"]
        ]
        before = {row["shard"]: row["pushes"] for row in rows if "pushes" in row}
        if is_watched(sys.stdout):
            click.clear()
        columns = ("shard", "worker", *_WATCHED)
        click.echo(table(_with_device(columns, rows), rows))
        if number == count:
            return
        sleep(interval)


def _with_device(
    columns: tuple[str, ...], rows: Sequence[dict[str, Any]]
) -> tuple[str, ...]:
    """Add on which device each is, and how much of it, where any is on one."""
    every = [_of_device(row) for row in rows]
    return (*columns, *max(every, key=len, default=()))


def _of_device(row: dict[str, Any]) -> tuple[str, ...]:
    """Return what a row tells of a device or a second copy, nothing where none is."""
    found = tuple(key for key in _OF_DEVICE if row.get(key) and row["device"])
    return found + _OF_COPIES * bool(row.get("copy"))


def _placed(columns: tuple[str, ...], found: dict[str, Any]) -> tuple[str, ...]:
    """Add over which shards each is cut, where one is placed on some of them."""
    every = [*found["parameters"], *found["tables"]]
    is_placed = any(row["shards"] is not None for row in every)
    return (*columns, "shards") if is_placed else columns


def described(sight: StoreView) -> dict[str, Any]:
    """Return a store as ``daskps show --json`` prints it.

    Parameters
    ----------
    sight : StoreView
        The store.

    Returns
    -------
    dict
        name, uid, kind, parameters, tables and shards; plain values throughout.
    """
    meta = sight.meta
    parameters = [
        {
            "name": p.name,
            "shape": list(p.shape),
            "dtype": p.dtype,
            "nbytes": p.nbytes,
            "optimizer": meta.optimizers.get(p.index),
            "shards": p.shards and list(p.shards),
        }
        for p in meta.layout.parameters
    ]
    counted = counted_tables(meta.layout, sight.shards)
    tables = [
        {
            "name": t.name,
            **counted[t.name],
            "optimizer": meta.optimizers.get(t.index),
            "shards": t.shards and list(t.shards),
        }
        for t in meta.layout.tables
    ]
    keys = ("shard", "worker", *COUNTERS, "error")
    shards = [
        {k: row[k] for k in (*keys, *_of_device(row)) if k in row}
        for row in sight.shards
    ]
    head = {"name": meta.name, "uid": meta.known_as, "kind": _kind(meta.session)}
    return {**head, "parameters": parameters, "tables": tables, "shards": shards}


def _reach(scheduler: str | None, look: Callable[[str], Coroutine[Any, Any, T]]) -> T:
    """Look at the cluster the user means."""
    at = scheduler or config.scheduler_address()
    if not at:
        raise click.UsageError(
            "which cluster? Give --scheduler ADDRESS, or set DASK_SCHEDULER_ADDRESS"
        )
    try:
        return asyncio.run(look(at))
    except (OSError, ValueError, MemoryError) as error:
        # MemoryError: what answers is no Dask, and its first bytes read as a length.
        reason = str(error) or f"no answer within {CONNECT_SECONDS:g} s"
        raise Failure(f"cannot reach a scheduler at {at}: {reason}") from error


def _store(row: dict[str, Any]) -> dict[str, Any]:
    keys = ("parameters", "tables", "shards", "workers", "nbytes", *_of_device(row))
    head = {"name": row["name"], "uid": row["uid"], "kind": _kind(row["session"])}
    return {**head, **{key: row[key] for key in keys}}


def _kind(session: bool) -> str:
    return "session" if session else "named"


def table(columns: Sequence[str], rows: Sequence[dict[str, Any]]) -> str:
    """Lay rows out in columns as wide as their longest entry.

    Parameters
    ----------
    columns : sequence of str
        The keys to print, in order.
    rows : sequence of dict
        The entries; a row's "error" stands in place of the entries it lacks.

    Returns
    -------
    str
        Lines without one at the end.

    Examples
    --------
    >>> print(table(("name", "nbytes"), [{"name": "w", "nbytes": 2048}]))
    name  bytes
    w     2.00 kiB
    """
    heads = [HEADS.get(column, column) for column in columns]
    cells = [[_cell(column, row) for column in columns] for row in rows]
    lines = text_table(heads, cells)
    for number, row in enumerate(rows, 1):
        if "error" in row:
            lines[number] += f"  {printable(row['error'])}"
    return "\n".join(lines)


def _cell(column: str, row: dict[str, Any]) -> str:
    value = row.get(column)
    if column == "shards" and not isinstance(value, int):
        return shards_line(value)
    if value is None:
        return "" if "error" in row else "-"
    if column in _BYTES:
        return str(format_bytes(value))
    if column == "rate":
        return f"{value:.1f}"
    if column == "shape":
        return str(tuple(value))
    return str(value)
