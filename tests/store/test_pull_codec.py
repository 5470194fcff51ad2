"""Pulls of a handle in the words of a codec, by every way to a shard."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import daskps
from daskps import codecs
from daskps.backend import fake

PARAMS: dict[str, Any] = {
    "w": np.linspace(-3.0, 3.0, 1001, dtype="f4").reshape(7, 143),
    "d": np.linspace(0.0, 1.0, 9),
    "n": np.arange(5),
}


def rounded(value: Any, name: str) -> Any:
    """A value as 16 bits have it, by other means than those of the package."""
    if value.dtype.kind != "f":
        return value
    if name == "fp16":
        return value.astype("f2").astype(value.dtype)
    bits = value.astype("f4").view("u4").astype("u8")
    bits += 0x7FFF + (bits >> 16 & 1)
    return (bits & 0xFFFF0000).astype("u4").view("f4").astype(value.dtype)


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_values_are_rounded_by_every_way(way: Any, name: str) -> None:
    table = daskps.TableSpec(9, 4, init=PARAMS["w"].reshape(-1)[:36].reshape(9, 4))
    with daskps.create({**PARAMS, "emb": table}, client=way) as store:
        ids = np.array([[3, 8], [3, 0]])
        found = store.pull(rows={"emb": ids}, codec=name)
        plain = store.pull(rows={"emb": ids})
        assert found.keys() == plain.keys()
        for key, value in plain.items():
            wanted = rounded(value, name)
            assert found[key].tobytes() == wanted.tobytes()
            assert found[key].dtype == value.dtype
        out = {"w": np.empty((143, 7), "f4").T}
        later = store.pull_async(out=out, codec=name)
        assert later.result()["w"] is out["w"]
        assert out["w"].tobytes() == found["w"].tobytes()
        # The store keeps all digits.
        assert store.pull("w")["w"].tobytes() == PARAMS["w"].tobytes()


def test_refusals(client: Any) -> None:
    with daskps.create(PARAMS, client=client) as store:
        for codec in (codecs.Int8(), "int8", codecs.TopK(0.1)):
            with pytest.raises(ValueError, match="16 bits alone"):
                store.pull(codec=codec)
        with pytest.raises(ValueError, match="'zip'"):
            store.pull(codec="zip")
        with pytest.raises(ValueError, match="in host memory"):
            store.pull("d", device="fake", codec="bf16")
        on_device: Any = fake.asarray(np.ones(9))
        with pytest.raises(ValueError, match="in host memory"):
            store.pull(out={"d": on_device}, codec="bf16")
        with pytest.raises(TypeError, match="mapping"):
            store.pull(out=[np.ones(9)], codec="bf16")  # type: ignore[arg-type]
