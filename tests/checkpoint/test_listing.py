"""Checkpoints of an URL: in order, by lineage, and what may go."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from daskps.checkpoint.digests import digest
from daskps.checkpoint.listing import (
    ABANDONED_SECONDS,
    entries,
    find,
    is_one,
    newest,
    next_folder,
    not_within,
    number_of,
    retain,
    sweep,
    unfinished,
)
from daskps.checkpoint.manifest import MANIFEST
from daskps.checkpoint.storage import Storage
from daskps.checkpoint.texts import to_bytes
from daskps.errors import CheckpointError
from tests.checkpoint.writing import State, manifest_of

STATE = State({"w": ((3,), "float32")})
FILES = STATE.files(1)
MADE = manifest_of(STATE, FILES)


def saved(storage, folder, lineage="a", *, whole=True):
    for path, content in FILES.items():
        storage.write(f"{folder}/{path}", content)
    if whole:
        of = replace(MADE, lineage=lineage, sequence=number_of(folder))
        storage.put_last(f"{folder}/{MANIFEST}", to_bytes(of))
    return folder


@pytest.fixture
def storage(tmp_path):
    return Storage(str(tmp_path))


def name(number, digits):
    return f"ckpt-{number:012d}-{digits * 8}"


def test_numbers_go_on_above_the_highest_there(storage):
    assert next_folder(storage, "0" * 8) == (name(1, "0"), 1)
    saved(storage, name(3, "a"))
    saved(storage, name(7, "b"), whole=False)
    storage.write("ckpt-x/a", b"")
    storage.write("ckpt-000000000009-zzzzzzzz/a", b"")
    assert next_folder(storage, "f" * 8) == (name(8, "f"), 8)
    assert number_of(name(10**12, "a")) == 10**12


def test_they_are_in_order_and_only_whole_ones(storage):
    folders = [saved(storage, f) for f in (name(2, "b"), name(10, "a"), name(2, "a"))]
    saved(storage, name(11, "a"), whole=False)
    assert [e.folder for e in entries(storage)] == sorted(folders)
    assert [e.manifest and e.manifest.sequence for e in entries(storage)] == [2, 2, 10]


def test_two_savers_at_once_both_stay(storage):
    """Both have looked before either has written: one number, two folders."""
    one, other = next_folder(storage, "a" * 8), next_folder(storage, "b" * 8)
    assert one[1] == other[1] == 1
    saved(storage, other[0], "b")
    saved(storage, one[0], "a")
    assert [e.folder for e in entries(storage)] == [one[0], other[0]]
    found = [newest(storage, of) for of in ("a", "b", None, "c")]
    assert [e and e.folder for e in found] == [one[0], other[0], other[0], None]


def test_a_damaged_one_says_so_and_the_others_count(storage, tmp_path):
    saved(storage, name(1, "a"))
    bad = saved(storage, name(2, "a"))
    at = tmp_path / bad / MANIFEST
    at.write_bytes(at.read_bytes()[:-3])
    good, damaged = entries(storage)
    assert good.error is None
    assert damaged.manifest is None
    assert damaged.error is not None
    assert damaged.error.file == f"{bad}/{MANIFEST}"
    assert newest(storage, "a") == good
    # What was not written to its end is none.
    assert find(str(tmp_path)).url == f"{tmp_path}/{good.folder}"
    with pytest.raises(CheckpointError, match="no whole manifest"):
        find(f"{tmp_path}/{bad}")
    # But who asks for the newest is not given an older one where it was damaged.
    content = bytearray((tmp_path / good.folder / MANIFEST).read_bytes())
    content[200] ^= 1
    at.write_bytes(content)
    with pytest.raises(CheckpointError, match="another digest"):
        find(str(tmp_path))
    found = find(f"{tmp_path}/{good.folder}")
    assert found.url == f"{tmp_path}/{good.folder}"
    assert found.manifest == good.manifest
    assert found.digest == digest((tmp_path / good.folder / MANIFEST).read_bytes())


def test_one_that_cannot_be_read_says_so_and_the_others_count(storage, monkeypatch):
    """A disk that fails, or rights that are missing: it may be whole."""
    folders = [saved(storage, name(n, "a")) for n in (1, 2, 3)]
    read = Storage.read

    def refused(self, path, *of):
        if path.startswith(folders[1]):
            raise CheckpointError("cannot read it: Input/output error", path)
        return read(self, path, *of)

    monkeypatch.setattr(Storage, "read", refused)
    found = entries(storage)
    assert [e.folder for e in found] == folders
    assert [e.manifest is None for e in found] == [False, True, False]
    assert [e.is_unread for e in found] == [False, True, False]
    assert "Input/output error" in str(found[1].error)
    # It is not taken for one that may go, and neither hides what is older.
    assert retain(storage, "a", 1) == folders[:1]
    assert storage.folders() == folders[1:]


def test_what_has_no_manifest_has_an_age(storage, tmp_path):
    old, young = (saved(storage, name(n, "a"), whole=False) for n in (1, 2))
    saved(storage, name(3, "a"))
    now = os.stat(tmp_path / young).st_mtime
    for path in (tmp_path / old).rglob("*"):
        os.utime(path, (now - 90.0,) * 2)
    ages = unfinished(storage, now + 5.0)
    assert [*ages] == [old, young]
    assert ages[old] == pytest.approx(95.0, abs=0.01)
    assert ages[young] == pytest.approx(5.0, abs=1.0)


def test_where_there_is_none(storage, tmp_path):
    saved(storage, name(1, "a"), whole=False)
    with pytest.raises(CheckpointError, match=r"no checkpoint at .*store\.save"):
        find(str(tmp_path))
    with pytest.raises(CheckpointError, match=r"manifest\.json is missing"):
        find(f"{tmp_path}/{name(1, 'a')}")
    with pytest.raises(CheckpointError, match="no checkpoint at"):
        find(f"{tmp_path}/nothing")


def test_retention_keeps_to_its_lineage(storage, tmp_path):
    own = [saved(storage, name(n, "a"), "a") for n in (1, 3, 5, 6)]
    others = [saved(storage, name(n, "b"), "b") for n in (2, 4)]
    torn = saved(storage, name(0, "c"))
    (tmp_path / torn / MANIFEST).write_bytes(b"{")
    assert retain(storage, "a", 2) == own[:2]
    assert storage.folders() == sorted([*own[2:], *others, torn])
    assert retain(storage, "a", 2) == []


def test_the_manifest_goes_first(storage, monkeypatch):
    folder = saved(storage, name(1, "a"))
    gone: list[str] = []
    monkeypatch.setattr(storage, "remove", gone.append)
    assert retain(storage, "a", 0) == [folder]
    assert gone == [f"{folder}/{MANIFEST}", folder]


def test_what_nobody_finishes_is_swept_after_a_day(storage, tmp_path):
    whole, old, young, strange = (
        saved(storage, name(1, "a")),
        saved(storage, name(2, "a"), whole=False),
        saved(storage, name(3, "a"), whole=False),
        saved(storage, "ckpt-mine", whole=False),
    )
    now = os.stat(tmp_path / young).st_mtime
    for folder in (whole, old, strange):
        for path in (tmp_path / folder).rglob("*"):
            os.utime(path, (now - 2 * ABANDONED_SECONDS,) * 2)
    assert sweep(storage, now) == [old]
    assert storage.folders() == sorted([whole, young, strange])


def test_what_cannot_be_looked_at_is_not_swept(storage, tmp_path, monkeypatch):
    """A filesystem that fails says nothing of a manifest."""
    whole = saved(storage, name(1, "a"))
    now = os.stat(tmp_path / whole).st_mtime + 2 * ABANDONED_SECONDS
    fs = type(storage._fs)
    info = fs.info

    def refused(self, path, **more):
        if os.fspath(path).endswith(MANIFEST):
            raise PermissionError(13, "x")
        return info(self, path, **more)

    monkeypatch.setattr(fs, "info", refused)
    assert sweep(storage, now) == []
    monkeypatch.undo()
    assert storage.has(f"{whole}/{MANIFEST}")


def test_one_file_that_was_written_lately_keeps_all(storage, tmp_path):
    old = saved(storage, name(2, "a"), whole=False)
    now = os.stat(tmp_path / old).st_mtime
    for path in (tmp_path / old).rglob("*"):
        os.utime(path, (now - 2 * ABANDONED_SECONDS,) * 2)
    os.utime(tmp_path / old / "weights/w/c/0", (now, now))
    assert sweep(storage, now) == []


def test_none_is_saved_into_another_one(storage, tmp_path):
    """By its name, or by what is in it where somebody has renamed it."""
    assert is_one("s3://b/ckpt-000000000007-5f0c12ab")
    assert is_one("/a/ckpt-000000000007-5f0c12ab/")
    assert not is_one("s3://b/ckpt-7")
    assert not is_one("ckpt")
    storage.put_last("renamed/manifest.json", b"m")
    with pytest.raises(CheckpointError, match=rf"renamed is a .* it, {tmp_path}, and"):
        next_folder(Storage(f"{tmp_path}/renamed"), "0" * 8)
    said = str(not_within("s3://key:hush@b/x/ckpt-000000000007-5f0c12ab"))
    assert "hush" not in said
    assert "the folder that has it, s3://***@b/x, and" in said
