"""``daskps checkpoint``: what it says, and files of other libraries."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from click.testing import CliRunner

from daskps import cli
from daskps.checkpoint import grid
from daskps.checkpoint.listing import entries, number_of
from daskps.checkpoint.manifest import MANIFEST
from daskps.checkpoint.storage import Storage
from daskps.checkpoint.texts import to_bytes
from daskps.cli import files
from daskps.errors import CheckpointError
from daskps.layout.arrays import DTYPES
from daskps.store.checkpoints import list_checkpoints
from tests.checkpoint.writing import State, manifest_of, mixed_state, write


def called(*argv):
    """Status, standard output and standard error of a command."""
    done = CliRunner().invoke(cli.ps, ["checkpoint", *map(str, argv)])
    return done.exit_code, done.stdout, done.stderr


def saved(folder: Path, state: State, number: int = 1, **more) -> Path:
    at = folder / f"ckpt-{number:012d}-{'a' * 8}"
    files = state.files(2)
    write(at, files)
    manifest = manifest_of(state, files, sequence=number, **more)
    (at / MANIFEST).write_bytes(to_bytes(manifest))
    return at


STATE = State(
    {"w": ((3, 2), "float32"), "b/c": ((4,), "int8")}, slots={"w": (0.0, 0.0)}
)


def test_ls(tmp_path):
    assert called("ls", tmp_path)[:2] == (0, f"no checkpoints at {tmp_path}\n")
    saved(tmp_path, STATE, 1)
    bad = saved(tmp_path, STATE, 2)
    (bad / MANIFEST).write_bytes(b"{}")
    status, out, _ = called("ls", tmp_path)
    head, first, second = out.splitlines()
    assert status == 0
    assert head.split() == [
        *("checkpoint", "store", "version", "parameters", "tables", "files"),
        *("bytes", "time", "(UTC)"),
    ]
    assert first.split()[:5] == ["ckpt-000000000001-aaaaaaaa", "m", "12", "2", "0"]
    assert "no whole manifest" in second
    status, out, _ = called("ls", tmp_path, "--json")
    rows = json.loads(out)
    assert [row["checkpoint"] for row in rows] == [
        f"ckpt-{i:012d}-{'a' * 8}" for i in (1, 2)
    ]
    assert rows[0]["version"] == 12
    assert "manifest" in rows[1]["error"]


def test_what_a_manifest_says_moves_no_cursor(tmp_path):
    """Its digest is right, its texts are somebody's."""
    odd = "\x1b[31mred\nnext"
    state = State({odd: ((2,), "float32")}, slots={})
    saved(tmp_path, state, store=odd, daskps=odd)
    for command in ("ls", "show"):
        status, out, err = called(command, tmp_path)
        assert (status, err) == (0, "")
        assert "\x1b" not in out
        assert r"\x1b[31mred\nnext" in out


def test_ls_of_what_is_no_whole_checkpoint(tmp_path, monkeypatch):
    """One that cannot be read, and one that nobody has finished, are lines of their own."""
    whole, unread, left = (saved(tmp_path, STATE, n) for n in (1, 2, 3))
    (left / MANIFEST).unlink()
    read = Storage.read

    def refused(self, path, *of):
        if path.startswith(unread.name):
            raise CheckpointError(f"cannot read {path}: Input/output error", path)
        return read(self, path, *of)

    monkeypatch.setattr(Storage, "read", refused)
    status, out, err = called("ls", tmp_path)
    lines = out.splitlines()[1:]
    assert (status, err, len(lines)) == (0, "", 3)
    assert lines[0].split()[:2] == [whole.name, "m"]
    assert lines[1].split()[0] == unread.name
    assert "Input/output error" in lines[1]
    assert lines[2].split()[:2] == [left.name, "unfinished,"]
    assert "ago" in lines[2]
    rows = json.loads(called("ls", tmp_path, "--json")[1])
    assert ["error" in row for row in rows] == [False, True, True]
    found = list_checkpoints(tmp_path)
    assert [info.url.rpartition("/")[2] for info in found] == [whole.name]
    assert found.unread == {unread.name: rows[1]["error"]}
    assert f"{unread.name}: " in repr(found)
    assert unread.name in found._repr_html_()


def test_ls_goes_on_past_a_manifest_that_cannot_be_looked_at(tmp_path):
    whole, other = saved(tmp_path, STATE), tmp_path / "ckpt-000000000009-0a1b2c3d"
    other.mkdir()
    (other / MANIFEST).symlink_to(MANIFEST)
    status, out, _ = called("ls", tmp_path, "--json")
    assert status == 0
    rows = json.loads(out)
    assert [row["checkpoint"] for row in rows] == [whole.name, other.name]
    assert "Too many levels of symbolic links" in rows[1]["error"]
    assert [*list_checkpoints(tmp_path).unread] == [other.name]


def test_ls_of_a_file(tmp_path):
    file = saved(tmp_path, STATE) / MANIFEST
    status, out, err = called("ls", file)
    assert (status, out) == (1, "")
    assert "is a file" in err
    with pytest.raises(CheckpointError, match="is a file"):
        list_checkpoints(file)


def test_ls_of_a_checkpoint(tmp_path):
    """The folder that a restore takes, not the one above it."""
    folder = saved(tmp_path, STATE)
    status, out, err = called("ls", folder)
    assert (status, out) == (1, "")
    assert f"{folder} is one checkpoint, not a folder of them" in err
    with pytest.raises(CheckpointError, match="is one checkpoint"):
        list_checkpoints(folder)


def test_show(tmp_path):
    at = saved(tmp_path, mixed_state())
    status, out, _ = called("show", tmp_path)
    assert status == 0
    lines = out.splitlines()
    assert lines[0].startswith(f"{at.name}: store 'm' at version 12, 1970-01-01")
    assert any(line.split()[:1] == ["a_b"] for line in lines)
    assert any(line.split()[:3] == ["any", "300", "5"] for line in lines)
    status, out, _ = called("show", at, "--json")
    found = json.loads(out)
    assert found["parameters"][1]["name"] == "a/b"
    assert found["parameters"][1]["steps"] == 4
    assert found["tables"][1]["rows"] == 300
    status, _, err = called("show", tmp_path / "none")
    assert status == 1
    assert "CheckpointError: no checkpoint at" in err


def test_verify_reads_every_byte(tmp_path):
    """Any byte of any file flipped: the file and whose it is are named."""
    at = saved(tmp_path, STATE)
    status, out, _ = called("verify", tmp_path)
    n = sum(path.is_file() for path in at.rglob("*")) - 1
    assert (status, out.startswith(f"{n} files, ")) == (0, True)
    for path in [p for p in at.rglob("*") if p.is_file()]:
        content, name = path.read_bytes(), str(path.relative_to(at))
        of = {"weights/w": "'w'", "slots/w.": "'w'", "weights/b": "'b/c'"}.get(name[:9])
        for i in range(0, len(content), max(1, len(content) // 8)):
            path.write_bytes(
                content[:i] + bytes([content[i] ^ 0x40]) + content[i + 1 :]
            )
            status, out, err = called("verify", at)
            assert (status, out) == (1, "")
            assert name in err
            assert name == MANIFEST or of is None or of in err
        path.write_bytes(content)
    (at / "weights/w/c/0/0").unlink()
    (at / "zarr.json").write_bytes(b"")
    status, _, err = called("verify", at)
    assert status == 1
    assert "weights/w/c/0/0 is missing" in err
    assert "zarr.json has 0 bytes" in err
    assert err.splitlines()[-1].endswith(f"2 of {n} files are not what was written")


def test_rm(tmp_path):
    one, two = saved(tmp_path, STATE, 1), saved(tmp_path, STATE, 2)
    status, _, err = called("rm", tmp_path)
    assert (status, "ckpt-" in err) == (2, True)
    assert called("rm", one)[:2] == (0, f"removed {one.name}\n")
    assert not one.exists()
    status, _, err = called("rm", one)
    assert (status, "there is no" in err) == (1, True)
    (two / MANIFEST).unlink()
    assert called("rm", f"{two}/")[0] == 0
    assert [*tmp_path.iterdir()] == []


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(grid, "CHUNK_NBYTES", 64)


def expected(state):
    """What goes to a file: weights by name, rows and ids."""
    layout, found = state.layout(1), {}
    for p in layout.parameters:
        found[p.name] = state.values[p.index, "weights"]
    for t in layout.tables:
        if t.is_bounded:
            found[t.name] = state.values[t.index, "rows"]
        else:
            found[f"{t.name}.ids"] = state.values[t.index, "ids"]
            found[f"{t.name}.rows"] = state.values[t.index, "rows"]
    return found


def many():
    """Enough small parameters that they are packed."""
    return State({f"p{i}": ((i % 3, 2), "float32") for i in range(100)})


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("make", [mixed_state, many], ids=["mixed", "packed"])
@pytest.mark.parametrize("kind", ["npz", "safetensors"])
def test_export_and_back(tmp_path, kind, make):
    state = make()
    saved(tmp_path / "c", state)
    file = tmp_path / f"x.{kind}"
    of = expected(state)
    status, out, err = called("export", tmp_path / "c", file)
    assert (status, out, err) == (0, f"wrote {len(of)} arrays to {file}\n", "")
    found = arrays(file) if kind == "npz" else tensors(file)
    assert [*found] == [*of]
    for name, values in of.items():
        assert found[name].dtype == values.dtype
        assert found[name].shape == values.shape
        assert (found[name] == values).all()
    status, out, _ = called("import", file, tmp_path / "d")
    assert (status, out.startswith("wrote ")) == (0, True)
    assert called("verify", tmp_path / "d")[0] == 0
    (entry,) = entries(Storage(str(tmp_path / "d")))
    assert number_of(entry.folder) == 1
    again = tmp_path / f"y.{kind}"
    assert called("export", tmp_path / "d", again)[0] == 0
    assert again.read_bytes() == file.read_bytes() or kind == "npz"
    if kind == "npz":
        both = arrays(file), arrays(again)
        assert all((both[0][n] == both[1][n]).all() for n in of)


def test_a_file_is_not_overwritten_unless_told(tmp_path):
    saved(tmp_path / "c", STATE)
    file = tmp_path / "x.npz"
    file.write_bytes(b"mine")
    status, out, err = called("export", tmp_path / "c", file)
    assert (status, out) == (1, "")
    assert "exists" in err
    assert "--overwrite" in err
    assert file.read_bytes() == b"mine"
    assert called("export", tmp_path / "c", file, "--overwrite")[0] == 0
    assert {*arrays(file)} == {"w", "b/c"}
    assert {p.name for p in tmp_path.iterdir()} == {"c", "x.npz"}


def test_a_link_and_a_file_that_comes_meanwhile_are_not_overwritten(
    tmp_path, monkeypatch
):
    saved(tmp_path / "c", STATE)
    link, file = tmp_path / "link.npz", tmp_path / "x.npz"
    link.symlink_to("nowhere")
    write = files._write_npz

    def written(part, *of):
        write(part, *of)
        file.write_bytes(b"mine")

    monkeypatch.setattr(files, "_write_npz", written)
    for to in (link, file):
        status, out, err = called("export", tmp_path / "c", to)
        assert (status, out) == (1, "")
        assert "--overwrite" in err
    assert link.is_symlink()
    assert file.read_bytes() == b"mine"
    assert {p.name for p in tmp_path.iterdir()} == {"c", "link.npz", "x.npz"}


def test_the_published_reader_reads_a_safetensors(tmp_path):
    """Every dtype, no elements, no axes, and names of any kind."""
    shapes: dict[str, Any] = {dtype: ((3, 2), dtype) for dtype in DTYPES}
    shapes |= {
        "empty": ((0, 4), "int8"),
        "one": ((), "float64"),
        "ä/..": ((1,), "bool"),
    }
    state = State(shapes)
    saved(tmp_path / "c", state)
    file = tmp_path / "x.safetensors"
    assert called("export", tmp_path / "c", file)[0] == 0
    found = safetensors.numpy.load_file(file)
    of = expected(state)
    assert {*found} == {*of}
    for name, values in of.items():
        assert (found[name].dtype, found[name].shape) == (values.dtype, values.shape)
        assert found[name].tobytes() == values.tobytes()
    theirs = tmp_path / "y.safetensors"
    safetensors.numpy.save_file(of, theirs, metadata={"made": "by them"})
    assert called("import", theirs, tmp_path / "d")[0] == 0
    again = tmp_path / "z.safetensors"
    assert called("export", tmp_path / "d", again)[0] == 0
    found = safetensors.numpy.load_file(again)
    assert all(found[name].tobytes() == of[name].tobytes() for name in of)


@pytest.mark.parametrize("name", ["__metadata__", "half \ud800"])
def test_names_that_no_safetensors_has(tmp_path, name):
    saved(tmp_path / "c", State({name: ((2,), "int8")}))
    status, _, err = called("export", tmp_path / "c", tmp_path / "x.safetensors")
    assert (status, "no .safetensors" in err) == (1, True)
    assert not (tmp_path / "x.safetensors").exists()


def arrays(file):
    with np.load(file) as found:
        return dict(found)


def tensors(file):
    """A reader of its own, by the format's description."""
    content = file.read_bytes()
    (n,) = struct.unpack("<Q", content[:8])
    head = json.loads(content[8 : 8 + n])
    assert (8 + n) % 8 == 0
    codes = {"F": "f", "I": "i", "U": "u"}
    found = {}
    for name, of in head.items():
        code = of["dtype"]
        dtype = "?" if code == "BOOL" else f"<{codes[code[0]]}{int(code[1:]) // 8}"
        start, stop = of["data_offsets"]
        data = content[8 + n + start : 8 + n + stop]
        found[name] = np.frombuffer(data, dtype).reshape(of["shape"])
    return found


def test_a_damaged_checkpoint_is_not_exported(tmp_path):
    at = saved(tmp_path, STATE)
    chunk = next((at / "weights").glob("b_c.*/c/0"))
    chunk.write_bytes(b"\1\1\1\1")
    status, _, err = called("export", at, tmp_path / "x.npz")
    assert status == 1
    assert "'b/c' has the digest" in err
    assert [p.name for p in tmp_path.iterdir()] == [at.name]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("x.npz", b"PK nonsense", "cannot read"),
        ("x.safetensors", b"", "no header"),
        ("x.safetensors", b"\xff" * 8, "no header"),
        ("x.safetensors", b"\2" + b"\0" * 7 + b"[]", "cannot read"),
        ("x.safetensors", b"\2" + b"\0" * 7 + b"{}", "no array"),
        ("x.txt", b"", "ends with .npz or .safetensors"),
    ],
)
def test_files_that_are_none(tmp_path, name, content, said):
    (tmp_path / name).write_bytes(content)
    status, _, err = called("import", tmp_path / name, tmp_path / "c")
    assert status in (1, 2)
    assert said in err
    assert not (tmp_path / "c").exists()


def header(**about):
    text = json.dumps(
        {"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | about}
    )
    return struct.pack("<Q", len(text)) + text.encode() + b"\0" * 8


@pytest.mark.parametrize(
    "about",
    [
        {"dtype": "BF16"},
        {"dtype": 3},
        {"shape": [3]},
        {"shape": "ab"},
        {"shape": [-2]},
        {"data_offsets": [8, 16]},
        {"data_offsets": [-8, 0]},
        {"data_offsets": [0]},
        {"shape": [2**62], "data_offsets": [0, 2**64]},
    ],
)
def test_headers_that_say_what_is_not_there(tmp_path, about):
    (tmp_path / "x.safetensors").write_bytes(header(**about))
    status, _, err = called("import", tmp_path / "x.safetensors", tmp_path / "c")
    assert (status, "cannot read" in err) == (1, True)
    assert not (tmp_path / "c").exists()


def test_objects_are_never_unpickled(tmp_path):
    np.savez(tmp_path / "x.npz", w=np.array([{}], object))
    status, _, err = called("import", tmp_path / "x.npz", tmp_path / "c")
    assert (status, "allow_pickle" in err) == (1, True)


def test_options_of_filesystems(tmp_path):
    """They come from a file, and what it holds is never shown."""
    (tmp_path / "o.json").write_text('{"token": "hunter2"')
    status, _, err = called("ls", tmp_path, "--storage-options", tmp_path / "o.json")
    assert (status, "hunter2" in err, "JSONDecodeError" in err) == (2, False, True)
    (tmp_path / "o.json").write_text("[1]")
    assert called("ls", tmp_path, "--storage-options", tmp_path / "o.json")[0] == 2
    (tmp_path / "o.json").write_text('{"auto_mkdir": true}')
    assert called("ls", tmp_path, "--storage-options", tmp_path / "o.json")[0] == 0
    assert called("ls", tmp_path, "--storage-options", tmp_path / "none")[0] == 2


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "Missing command"),
        (["ls"], "URL"),
        (["ls", ""], "expected a URL"),
        (["sh", "x"], "sh"),
        (["ls", "nosuch://x"], "Protocol not known"),
    ],
)
def test_misuse_is_one_line(argv, said):
    status, out, err = called(*argv)
    assert status in (1, 2)
    assert out == ""
    assert said in err
    assert len(err.splitlines()) == 1
