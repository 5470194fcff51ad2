"""``daskps checkpoint``: what checkpoints there are, without a cluster."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from dask.utils import format_time

from daskps.checkpoint import listing
from daskps.checkpoint.manifest import MANIFEST
from daskps.checkpoint.reading import faults
from daskps.checkpoint.storage import Storage, full_url
from daskps.cli.files import FORMATS, export_to, import_from
from daskps.cli.group import Failure, Group, Misuse
from daskps.cli.stores import table
from daskps.store.checkpoints import info_of
from daskps.store.repr import printable

if TYPE_CHECKING:
    from daskps.checkpoint.manifest import Manifest

_as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
_options = click.option(
    "--storage-options",
    "options",
    metavar="FILE",
    callback=lambda ctx, param, value: _read_options(value),
    help="A file of JSON with options of the URL's filesystem, such as keys.",
)
_url = click.argument("url", callback=lambda ctx, param, value: _checked(value))


def _checked(url: str) -> str:
    try:
        return full_url(url)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


def _read_options(file: str | None) -> dict[str, Any]:
    if file is None:
        return {}
    try:
        found = json.loads(Path(file).read_text("utf-8"))
    except (OSError, ValueError) as error:
        # Not what it holds: that may be secret.
        raise click.BadParameter(f"{file}: {type(error).__name__}") from None
    if not isinstance(found, dict):
        raise click.BadParameter(f"{file} holds no JSON object")
    return found


@click.group(cls=Group, no_args_is_help=False, short_help="Look after checkpoints.")
def checkpoint() -> None:
    """List, show, verify, remove, export and import checkpoints.

    URL is that of one checkpoint, or of a folder of them, of which the newest is meant.
    No cluster is needed.
    """


@checkpoint.command("ls", short_help="List the checkpoints of an URL.")
@_url
@_options
@_as_json
def ls(url: str, options: dict[str, Any], as_json: bool) -> None:
    """List the checkpoints of URL, the newest last, and what is wrong with any of them."""
    storage, rows = Storage(url, options), list[dict[str, Any]]()
    for entry in listing.entries(storage):
        row: dict[str, Any] = {"checkpoint": entry.folder}
        if entry.manifest is None:
            row["error"] = str(entry.error)
        else:
            row |= _row(f"{url}/{entry.folder}", entry.manifest)
        rows.append(row)
    for folder, seconds in listing.unfinished(storage, time.time()).items():
        rows.append({"checkpoint": folder, "error": _unfinished(seconds)})
    rows.sort(key=lambda row: (listing.number_of(row["checkpoint"]), row["checkpoint"]))
    if as_json:
        click.echo(json.dumps(rows, indent=2))
    elif not rows:
        click.echo(f"no checkpoints at {storage.url}")
    else:
        columns = ("checkpoint", "store", "version", "parameters", "tables")
        click.echo(table((*columns, "files", "nbytes", "time"), rows))


def _unfinished(seconds: float | None) -> str:
    since = ""
    if seconds is not None:
        since = f", last written to {format_time(max(0.0, seconds))} ago"
    return f"unfinished{since}: it has no {MANIFEST}, and is no checkpoint"


def _row(url: str, manifest: Manifest) -> dict[str, Any]:
    info = info_of(url, manifest)
    return vars(info) | {"time": f"{info.time:%Y-%m-%d %H:%M:%S}"}


@checkpoint.command(short_help="Show what a checkpoint holds.")
@_url
@_options
@_as_json
def show(url: str, options: dict[str, Any], as_json: bool) -> None:
    """Show the parameters and tables of a checkpoint."""
    found = listing.find(url, options)
    manifest = found.manifest
    rules = [*(rule.told for rule in manifest.rules), None]
    parameters = [
        {
            "name": p.name,
            "shape": list(p.shape),
            "dtype": p.dtype,
            "optimizer": rules[-1 if p.rule is None else p.rule],
            "steps": p.steps,
        }
        for p in manifest.parameters
    ]
    tables = [
        {
            "name": t.name,
            "rows": t.n_rows if t.unbounded else t.rows,
            "dim": t.dim,
            "dtype": t.dtype,
            "optimizer": rules[-1 if t.rule is None else t.rule],
            "steps": t.steps,
        }
        for t in manifest.tables
    ]
    head = _row(found.url, manifest)
    if as_json:
        more = {"parameters": parameters, "tables": tables}
        click.echo(json.dumps(head | more, indent=2))
        return
    click.echo(
        f"{found.url.rpartition('/')[2]}: store {manifest.store or '-'!r} at version "
        f"{manifest.version}, {head['time']} UTC, daskps {printable(manifest.daskps)}"
    )
    for rows in (parameters, tables):
        if rows:
            click.echo(f"\n{table([*rows[0]], rows)}")


@checkpoint.command(short_help="Read all files, and compare them with their digests.")
@_url
@_options
def verify(url: str, options: dict[str, Any]) -> None:
    """Read all files of a checkpoint, and compare them with their digests."""
    found = listing.find(url, options)
    wrong = 0
    for error in faults(Storage(found.url, options), found.manifest):
        click.echo(str(error), err=True)
        wrong += 1
    n = len(found.manifest.files)
    if wrong:
        raise Failure(f"{wrong:,} of {n:,} files are not what was written")
    click.echo(f"{n:,} files, {found.manifest.nbytes:,} bytes: all as written")


@checkpoint.command(short_help="Remove a checkpoint.")
@_url
@_options
def rm(url: str, options: dict[str, Any]) -> None:
    """Remove the one checkpoint that URL names, also one that is damaged."""
    above, _, folder = url.rpartition("/")
    if listing.number_of(folder) < 0:
        raise Misuse("give the URL of one checkpoint, which ends with its ckpt-...")
    storage = Storage(above, options)
    if folder not in storage.folders():
        raise Failure(f"there is no {folder} at {storage.url}")
    listing.remove(storage, folder)
    click.echo(f"removed {folder}")


@checkpoint.command("export", short_help="Write the values to a .npz or .safetensors.")
@_url
@click.argument("file", type=click.Path(dir_okay=False))
@click.option("--overwrite", is_flag=True, help="Replace FILE where it exists.")
@_options
def export(url: str, file: str, options: dict[str, Any], overwrite: bool) -> None:
    """Write the values of a checkpoint to FILE, a .npz or .safetensors.

    Arrays go under their names, as the rows of tables do; of an unbounded table there
    are NAME.ids and NAME.rows. Optimizer state is left out.
    """
    _check_format(file)
    found = listing.find(url, options)
    storage, manifest = Storage(found.url, options), found.manifest
    n = export_to(Path(file), storage, manifest, overwrite=overwrite)
    click.echo(f"wrote {n:,} arrays to {file}")


@checkpoint.command("import", short_help="Make a checkpoint of a .npz or .safetensors.")
@click.argument("file", type=click.Path(dir_okay=False, exists=True))
@_url
@_options
def import_(file: str, url: str, options: dict[str, Any]) -> None:
    """Make a checkpoint at URL of FILE, a .npz or .safetensors.

    ``daskps.restore(URL)`` makes a store of it, at version 0 and without an optimizer.
    """
    _check_format(file)
    folder = import_from(Path(file), Storage(url, options))
    click.echo(f"wrote {url}/{folder}")


def _check_format(file: str) -> None:
    if Path(file).suffix not in FORMATS:
        raise Misuse(f"{file}: give a name that ends with {' or '.join(FORMATS)}")
