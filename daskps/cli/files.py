"""Values of checkpoints in files of other libraries, chunk by chunk.

A ``.safetensors`` has a length, a header of JSON and the values; a ``.npz`` is a zip of
``.npy`` files. Neither needs more memory than a chunk, and none is ever unpickled. (The
package of that name writes only what is in memory as a whole; tests compare with it.)
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import time
import zipfile
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from daskps.checkpoint.arrays import stored_arrays
from daskps.checkpoint.digests import StoredFile, digest
from daskps.checkpoint.listing import next_folder
from daskps.checkpoint.manifest import MANIFEST, Manifest, StoredParameter
from daskps.checkpoint.reading import blocks
from daskps.checkpoint.texts import to_bytes
from daskps.checkpoint.zarr import nodes
from daskps.cli.group import Failure
from daskps.layout.arrays import DTYPES, Layout
from daskps.layout.spans import IDS, ROWS, WEIGHTS
from daskps.limits import check_parameters
from daskps.version import VERSION

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from daskps.checkpoint.arrays import StoredArray
    from daskps.checkpoint.storage import Storage
    from daskps.typing import Array

FORMATS = (".npz", ".safetensors")
#: Names of dtypes in a .safetensors.
_CODES = {
    **{f"float{bits}": f"F{bits}" for bits in (16, 32, 64)},
    **{f"int{bits}": f"I{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"U{bits}" for bits in (8, 16, 32, 64)},
    "bool": "BOOL",
}
_DTYPES = {code: dtype for dtype, code in _CODES.items()}
#: A longer header is none.
_MOST_HEADER = 100 * 2**20


class _Exported(NamedTuple):
    """One array of a file."""

    array: StoredArray
    member: int
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.array.itemsize


def export_to(
    file: Path, storage: Storage, manifest: Manifest, *, overwrite: bool = False
) -> int:
    """Write the values of a checkpoint to a file; return how many arrays.

    Raises
    ------
    CheckpointError
        If the checkpoint is not whole; then there is no file.
    Failure
        If the file cannot be written, or exists and is not to be overwritten.
    """
    taken = Failure(f"{file} exists; give another name, or --overwrite")
    # A link counts, wherever it leads.
    if os.path.lexists(file) and not overwrite:
        raise taken
    arrays = _exported(manifest)

    def values(one: _Exported) -> Iterator[Array]:
        return blocks(storage, manifest, one.array, one.member)

    part = file.with_name(f"{file.name}.{secrets.token_hex(4)}.part")
    write = _write_npz if file.suffix == ".npz" else _write_safetensors
    try:
        write(part, arrays, values)
        # One that came meanwhile stays, too.
        if os.path.lexists(file) and not overwrite:
            raise taken
        part.replace(file)
    except OSError as error:
        raise Failure(f"cannot write {file}: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
    return len(arrays)


def _exported(manifest: Manifest) -> dict[str, _Exported]:
    """Return what goes to a file, by name."""
    n, found = len(manifest.parameters), dict[str, _Exported]()
    for array in manifest.arrays:
        if array.area not in (WEIGHTS, ROWS, IDS):
            continue
        for number, member in enumerate(array.members):
            if member.index < n:
                of = manifest.parameters[member.index]
                name, shape = of.name, of.shape
            else:
                table = manifest.tables[member.index - n]
                more = f".{array.area}" if table.unbounded else ""
                name = f"{table.name}{more}"
                shape = array.shape if table.unbounded else (table.rows, table.dim)
            if name in found:
                raise Failure(
                    f"two arrays would be named {name!r}; nothing was written"
                )
            found[name] = _Exported(array, number, shape)
    return found


def _write_npz(
    file: Path,
    arrays: Mapping[str, _Exported],
    values: Callable[[_Exported], Iterator[Array]],
) -> None:
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        for name, one in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as to:
                head = {
                    "descr": np.lib.format.dtype_to_descr(
                        np.dtype(one.array.dtype).newbyteorder("<")
                    ),
                    "fortran_order": False,
                    "shape": one.shape,
                }
                np.lib.format.write_array_header_1_0(to, head)
                for block in values(one):
                    to.write(block.data)


def _write_safetensors(
    file: Path,
    arrays: Mapping[str, _Exported],
    values: Callable[[_Exported], Iterator[Array]],
) -> None:
    head, at = dict[str, Any](), 0
    for name, one in arrays.items():
        if name == "__metadata__" or not _is_text(name):
            raise Failure(
                f"no .safetensors can have an array named {name!a:.60}; export a .npz"
            )
        code, stop = _CODES[one.array.dtype], at + one.nbytes
        head[name] = {"dtype": code, "shape": one.shape, "data_offsets": [at, stop]}
        at = stop
    text = json.dumps(head).encode("ascii")
    # Values begin at a multiple of 8.
    text += b" " * (-len(text) % 8)
    with file.open("wb") as to:
        to.write(len(text).to_bytes(8, "little") + text)
        for one in arrays.values():
            for block in values(one):
                to.write(block.data)


def _is_text(name: str) -> bool:
    """Return whether a name has no halves of characters, which UTF-8 has not."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


# -- the other way -------------------------------------------------------------


def import_from(file: Path, storage: Storage) -> str:
    """Make a checkpoint of a file; return its folder.

    Raises
    ------
    Failure
        If the file is none of its kind, or holds what no store does.
    CheckpointError
        If the checkpoint cannot be written.
    """
    read = _read_npz if file.suffix == ".npz" else _read_safetensors
    try:
        given = read(file)
        parameters = [(n, a.shape, a.dtype.name) for n, a in given.items()]
        wrong = [n for n, _, dtype in parameters if dtype not in DTYPES or not n]
        if wrong or not parameters:
            what = f"{wrong[0]!r:.60}, which no store can hold" if wrong else "no array"
            raise Failure(f"{file} has {what}")
        check_parameters(parameters, len(parameters), 1)
    except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile) as error:
        raise Failure(f"cannot read {file}: {error}") from error
    shapes = {name: (shape, dtype) for name, shape, dtype in parameters}
    arrays = stored_arrays(Layout.build(shapes, 1), {})
    folder, sequence = next_folder(storage, secrets.token_hex(4))
    values, files = [*given.values()], list[StoredFile]()

    def write(path: str, content: bytes) -> None:
        storage.write(f"{folder}/{path}", content)
        files.append(StoredFile(path, len(content), digest(content)))

    for array in arrays:
        for chunk in array.grid.chunks():
            write(
                array.path_of(chunk), _content(array, chunk.start, chunk.stop, values)
            )
    for path, content in nodes(arrays, {"store": "", "version": 0}).items():
        write(path, content)
    manifest = Manifest(
        store="",
        lineage=secrets.token_hex(16),
        parent="",
        sequence=sequence,
        time=time.time(),
        seed=0,
        version=0,
        parameters=tuple(StoredParameter(*of) for of in parameters),
        tables=(),
        rules=(),
        files=tuple(files),
        daskps=VERSION,
    )
    storage.sync_names(f"{folder}/{file.path}" for file in files)
    storage.put_last(f"{folder}/{MANIFEST}", to_bytes(manifest))
    return folder


def _content(array: StoredArray, start: int, stop: int, values: list[Array]) -> bytes:
    """Return the content of a chunk."""
    content = np.zeros(array.grid.chunk_size, np.dtype(array.dtype).newbyteorder("<"))
    for member in array.members:
        a, b = max(start, member.start), min(stop, member.stop)
        if a < b:
            of = values[member.index].reshape(-1)
            content[a - start : b - start] = of[a - member.start : b - member.start]
    return content.tobytes()


def _read_npz(file: Path) -> dict[str, Array]:
    with np.load(file, allow_pickle=False) as found:
        return {name: found[name] for name in found.files}


def _read_safetensors(file: Path) -> dict[str, Array]:
    with file.open("rb") as of:
        n = int.from_bytes(of.read(8), "little")
        size = os.fstat(of.fileno()).st_size
        if n > min(_MOST_HEADER, size - 8):
            raise ValueError("it has no header of a .safetensors")
        head = json.loads(of.read(n))
    if not isinstance(head, dict):
        raise ValueError("its header is no object of JSON")
    found = {}
    for name, about in head.items():
        if name == "__metadata__":
            continue
        dtype = _DTYPES.get(about["dtype"])
        if dtype is None:
            raise ValueError(
                f"{name!r:.60} has dtype {about['dtype']!r:.20}, which no store can hold"
            )
        (start, stop), shape = about["data_offsets"], tuple(about["shape"])
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        if not 0 <= start <= stop <= size - 8 - n or stop - start != nbytes:
            raise ValueError(f"{name!r:.60} lies where the file has nothing of it")
        found[name] = (
            np.memmap(
                file, np.dtype(dtype).newbyteorder("<"), "r", 8 + n + start, shape
            )
            if nbytes
            else np.empty(shape, dtype)
        )
    return found
