"""Files of checkpoints: local ones, those in memory, and filesystems that fail."""

from __future__ import annotations

import os
import pickle
import traceback
from pathlib import Path

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from daskps.checkpoint.storage import Storage, full_url, shown
from daskps.errors import CheckpointError

SECRET = "hunter2-very-secret"


@pytest.fixture(params=["local", "file", "memory"])
def url(request, tmp_path):
    if request.param == "memory":
        yield "memory://ckpts/here"
        MemoryFileSystem.store.clear()
        MemoryFileSystem.pseudo_dirs[:] = [""]
    else:
        yield f"{'file://' if request.param == 'file' else ''}{tmp_path}/ckpts/here"


def test_files_come_back_whole_and_in_parts(url):
    storage = Storage(full_url(url))
    content = np.arange(10, dtype="<i4")
    storage.write("weights/w/c/0", content.data)
    storage.write("zarr.json", b"{}")
    storage.put_last("manifest.json", b"m")
    assert storage.read("weights/w/c/0") == content.tobytes()
    assert storage.read("weights/w/c/0", 4, 12) == content[1:3].tobytes()
    assert storage.sizes() == {"weights/w/c/0": 40, "zarr.json": 2, "manifest.json": 1}
    assert storage.sizes("weights") == {"w/c/0": 40}
    assert Storage(full_url(url)).folders() == ["weights"]
    storage.write("zarr.json", b"[1]")
    assert storage.read("zarr.json") == b"[1]"
    assert storage.sizes()["zarr.json"] == 3


@pytest.mark.parametrize("n", [0, 99, 100, 101])
def test_files_are_read_into_memory_that_was_used(url, n):
    """Where that is as long; a file of another length comes as it is."""
    storage, content = Storage(full_url(url)), bytes(range(100))
    storage.write("a/b", content)
    room = np.full(n, 255, np.uint8)
    assert bytes(storage.read_into("a/b", room)) == content
    with pytest.raises(CheckpointError, match="a/c is missing"):
        storage.read_into("a/c", room)


def test_removing(url):
    storage = Storage(full_url(url))
    assert storage.sizes() == {}
    assert storage.folders() == []
    for path in ("a/x", "a/b/y", "c"):
        storage.write(path, b"1")
    assert storage.has("a/x")
    storage.remove("a/x")
    storage.remove("a/x")
    assert not storage.has("a/x")
    assert storage.sizes() == {"a/b/y": 1, "c": 1}
    storage.remove("a")
    storage.remove("never")
    assert storage.sizes() == {"c": 1}


def test_another_instance_sees_what_was_written_since(url):
    """No listing is remembered."""
    one, other = Storage(full_url(url)), Storage(full_url(url))
    assert other.sizes() == {}
    one.write("ckpt/x", b"1")
    assert other.sizes() == {"ckpt/x": 1}
    assert other.folders() == ["ckpt"]
    one.remove("ckpt")
    assert other.sizes() == {}


def test_age(url):
    storage = Storage(full_url(url))
    storage.write("a/x", b"1")
    now = storage.age("a", 0.0)
    assert now is not None
    assert storage.age("a", 500.0 - now) == pytest.approx(500.0)
    assert storage.age("none", 0.0) is None


def test_what_is_missing_is_named(url):
    storage = Storage(full_url(url))
    with pytest.raises(
        CheckpointError, match=r"here/weights/w/c/0 is missing"
    ) as caught:
        storage.read("weights/w/c/0")
    assert caught.value.file == "weights/w/c/0"


def test_a_full_disk_is_said_and_leaves_what_was_there(tmp_path, monkeypatch):
    storage = Storage(str(tmp_path))
    storage.put_last("m", b"1" * 100)

    def full(number):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    for call in (
        lambda: storage.put_last("m", b"2" * 100),
        lambda: storage.write("m2", b"2" * 100),
    ):
        with pytest.raises(CheckpointError, match=r"cannot write .*/m.*No space left"):
            call()
    with pytest.raises(CheckpointError, match=rf"cannot write {tmp_path}: .*No space"):
        storage.sync_names(["m"])
    assert storage.read("m") == b"1" * 100


def test_where_nothing_can_be_written(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(
        CheckpointError, match=r"cannot write .*/file/a/b: NotADirectory"
    ):
        Storage(f"{tmp_path}/file").write("a/b", b"1")


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("nosuch://x/y", "cannot reach nosuch://x/y: ValueError: Protocol not known"),
        ("s3://bucket/x", "the package for s3:// is not installed"),
    ],
)
def test_schemes_without_a_filesystem(url, said):
    with pytest.raises(CheckpointError, match=said):
        Storage(url)


def test_urls(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert full_url("a/b/") == str(tmp_path / "a/b")
    assert full_url(Path("a")) == str(tmp_path / "a")
    assert full_url(f"file://{tmp_path}/a") == str(tmp_path / "a")
    assert full_url("memory://a/") == "memory://a"
    for wrong, error in (("", ValueError), (" ", ValueError), (3, TypeError)):
        with pytest.raises(error):
            full_url(wrong)


@pytest.mark.parametrize("wrong", ["s3://", "file://", "memory:///", "s3:", "a::b"])
def test_what_fsspec_would_take_for_another_place(wrong):
    """They would be a folder "s3:", the working folder, and "a:"."""
    with pytest.raises(ValueError, match=r"expected a URL such as|has '::'"):
        full_url(wrong)


def test_local_paths_are_shown_whole(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("q?x=1", "a@b", "k:v@w", "a#b", "%20"):
        assert shown(full_url(name)) == f"{tmp_path}/{name}"
    storage = Storage(full_url("q?x=1"))
    storage.write("a", b"1")
    assert storage.url == f"{tmp_path}/q?x=1"
    assert Storage(storage.url).read("a") == b"1"


@pytest.mark.parametrize(
    "url",
    [
        "s3://key:%s@bucket/x",
        "s3://key:se/%s/cr@bucket/x",
        "ftp://me:p@%s@host/x",
        "s3://%s@bucket/x",
        "https://host/x?sig=%s&by=me@there",
        "simplecache::ftp://me:%s@host/x",
    ],
)
def test_credentials_of_any_form_are_not_shown(url):
    said = shown(url % SECRET)
    assert SECRET not in said
    assert said.endswith("/x")
    assert shown("s3://bucket/a@b:c@d") == "s3://bucket/a@b:c@d"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (3, "storage_options is a mapping .* found a int"),
        ("token", "found a str"),
        ([("key", "v")], "found a list"),
        ({3: "v"}, "has a name that is a int"),
    ],
)
def test_options_that_are_none(options, said):
    with pytest.raises(TypeError, match=said):
        Storage("memory://x", options)


class Talking(MemoryFileSystem):
    """A filesystem that says its options in all it raises."""

    protocol = "talking"
    cachable = True

    def __init__(self, token: str = "", **more: object) -> None:
        super().__init__(**more)
        if token == "no":
            raise ValueError(f"token {token}")
        self.token = token

    def _fail(self, *args: object, **more: object) -> None:
        raise RuntimeError(f"403: token={self.token} was refused for {args}")

    pipe_file = cat_file = find = ls = info = rm = modified = _fail


fsspec.register_implementation("talking", Talking, clobber=True)


def test_secrets_are_never_shown():
    url = f"talking://me:{SECRET}@host/x?sig={SECRET}"
    for given, options in (
        ("talking://host/x", {"token": SECRET}),
        (url, {"token": SECRET}),
        (url, None),
    ):
        storage = Storage(given, options)
        texts = [repr(storage), str(storage), storage.url]
        for call in (
            lambda s=storage: s.write("a", b"1"),
            lambda s=storage: s.put_last("a", b"1"),
            lambda s=storage: s.read("a"),
            lambda s=storage: s.sizes(),
            lambda s=storage: s.folders(),
            lambda s=storage: s.has("a"),
            lambda s=storage: s.age("a", 0.0),
            lambda s=storage: s.remove("a"),
        ):
            with pytest.raises(CheckpointError, match="RuntimeError") as caught:
                call()
            error = caught.value
            assert error.__context__ is error.__cause__ is None
            texts += [repr(error), str(error), repr(pickle.loads(pickle.dumps(error)))]
            texts.append("".join(traceback.format_exception(error)))
        assert not [text for text in texts if SECRET in text]
    assert shown(url) == "talking://***@host/x"


def test_what_is_no_secret_is_said():
    with pytest.raises(CheckpointError, match=r"cannot list .*403: token= was refused"):
        Storage("talking://host/x").sizes()


def test_every_instance_is_its_own():
    """Filesystems are cached by their options; threads must not share one."""
    one, other = (Storage("talking://x", {"token": "t"}) for _ in range(2))
    assert one._fs is not other._fs
    with pytest.raises(TypeError, match="of one thread"):
        pickle.dumps(one)
