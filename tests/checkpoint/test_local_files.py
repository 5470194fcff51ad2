"""Files of this machine: what is on the disk when, whichever operation fails."""

from __future__ import annotations

import os

import pytest

from daskps.checkpoint import local_files
from tests.checkpoint.disk import Disk


@pytest.fixture
def disk(monkeypatch):
    found = Disk()
    monkeypatch.setattr(local_files, "os", found)
    return found


def test_content_then_name_then_folder(disk, tmp_path):
    local_files.put(tmp_path, "m", b"1" * 100)
    assert disk.log == ["open", "write", "sync", "rename", "sync folder"]
    assert disk.at_risk == [set()]
    assert not disk.names | disk.content
    assert (tmp_path / "m").read_bytes() == b"1" * 100


def test_what_one_write_leaves_is_written_by_the_next(tmp_path, monkeypatch):
    """As on a disk that is nearly full, or for more than 2 GiB."""

    class Slow(Disk):
        def write(self, file, data):
            return super().write(file, data[:30])

    monkeypatch.setattr(local_files, "os", slow := Slow())
    local_files.write(tmp_path, "a", bytes(range(100)))
    assert (tmp_path / "a").read_bytes() == bytes(range(100))
    assert slow.log == ["open", *["write"] * 4, "sync"]


@pytest.mark.parametrize("dies", [False, True])
def test_a_file_that_counts_is_whole_or_as_it_was(disk, tmp_path, dies):
    """Killed or failed at any operation; who fails leaves nothing else."""
    old, new, seen = b"1" * 100, b"2" * 70, set()
    for at in range(6):
        local_files.put(tmp_path, "m", old)
        disk.reset(at, dies=dies)
        if at == 5:
            local_files.put(tmp_path, "m", new)
        else:
            with pytest.raises(OSError, match="Input/output"):
                local_files.put(tmp_path, "m", new)
        disk.reset()
        found = (tmp_path / "m").read_bytes()
        # The name is new before the folder is synced, which is the last.
        assert found == (new if at >= 4 else old)
        seen.add(found)
        others = [name for name in os.listdir(tmp_path) if name != "m"]
        assert len(others) == (dies and 1 <= at <= 3)
        for name in others:
            assert name.startswith(local_files.UNFINISHED)
            (tmp_path / name).unlink()
    assert seen == {old, new}


def test_all_is_on_the_disk_before_what_counts(disk, tmp_path):
    """Of folders, too, also of those above that were made on the way."""
    root = tmp_path / "made" / "url" / "ckpt"
    paths = ["weights/a/c/0", "weights/a/c/1", "zarr.json"]
    for path in paths:
        local_files.write(root, path, b"1")
    assert "sync folder" not in disk.log
    assert disk.names == {
        *(tmp_path / "made", tmp_path / "made" / "url", root),
        *(root / p for p in paths),
        *(root / p for p in ("weights", "weights/a", "weights/a/c")),
    }
    assert disk.content == set()
    local_files.sync_names(root, paths)
    assert disk.names == set()
    local_files.put(root, "manifest.json", b"m")
    assert disk.at_risk == [set()]


def test_an_empty_file_is_one(disk, tmp_path):
    local_files.write(tmp_path, "a/b", b"")
    assert (tmp_path / "a/b").read_bytes() == b""
    assert disk.log == ["make", "open", "sync"]
