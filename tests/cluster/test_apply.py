"""Putting parameters through a function of the user's, on the owners."""

from __future__ import annotations

import sys
import threading
from functools import partial
from typing import Any

import numpy as np
import pytest

import daskps
from daskps import optim
from daskps.cluster import upstream
from daskps.cluster.caller.client import ShardClient
from daskps.cluster.host import owner_steps
from daskps.errors import ConsistencyError, PushRejectedError
from tests.inprocess import cluster


@pytest.fixture(scope="module")
def here() -> Any:
    with cluster(3) as made:
        yield made


def half(block: Any, name: str) -> Any:
    return block / 2 if block.dtype.kind == "f" else block // 2


def test_each_shard_makes_one_update_of_it(way):
    """Of all parameters, or of those that are named; optimizer state stays."""
    w = np.arange(12.0).reshape(3, 4)
    params = {
        "w": w,
        "h": np.full(5, 3, "f2"),
        "n": np.arange(6),
        "e": np.zeros(0),
        "t": daskps.TableSpec(3, 2),
    }
    with daskps.create(params, optimizer=optim.SGD(1.0), shards=3) as store:
        assert store.apply(half) == 1
        found: Any = store.pull()
        assert found["w"].tolist() == (w / 2).tolist()
        assert found["h"].tolist() == [1.5] * 5
        assert (found["h"].dtype, found["n"].tolist()) == ("f2", [0, 0, 1, 1, 2, 2])
        version = store.apply(lambda b, name: b + len(name), ["w"])
        assert version == 2
        np.testing.assert_array_equal(
            store.pull("w", min_version=version)["w"], w / 2 + 1
        )
        assert store.versions == (2, 2, 2)
        assert store.apply(half, "e") == 0
        assert store.apply(half, []) == 0
        assert store["h"].pull().tolist() == [1.5] * 5


def at_seven(deed: Any) -> Any:
    """A function that does something where an element is 7, and adds 1 elsewhere."""

    def f(block: Any, name: str) -> Any:
        return deed(block) if (block == 7).any() else block + 1

    return f


def leave(_: Any) -> Any:
    sys.exit(3)


class Leaving:
    """An array-like that ends its process."""

    def __array__(self, *_: Any, **__: Any) -> Any:
        sys.exit(3)


def fail(_: Any) -> Any:
    raise ZeroDivisionError("no")


def write_to(block: Any) -> Any:
    block[:] = 99
    raise KeyError("late")


@pytest.mark.parametrize(
    ("deed", "said"),
    [
        (leave, r"raised RuntimeError.*called sys\.exit\(3\)"),
        (fail, "raised ZeroDivisionError for 'w' in shard 1: no"),
        (write_to, "raised KeyError"),
        (
            lambda b: b[:1],
            r"returned shape \(1,\) and dtype float64 for 'w' in shard 1",
        ),
        (lambda b: 7.0, r"returned shape \(\)"),
        (lambda b: Leaving(), r"called sys\.exit\(3\)"),
        (lambda b: None, "dtype object"),
        (lambda b: b.astype("c16"), "dtype complex128"),
        (
            lambda b: b * np.nan,
            r"returned NaN or Inf \(as float64\) for 'w' in shard 1",
        ),
    ],
)
def test_what_fails_on_one_shard_changes_nothing_there(here, deed, said):
    """Others have applied it, and the error says which."""
    with daskps.create({"w": np.arange(9.0), "v": np.zeros(9)}, shards=3) as store:
        with pytest.raises(PushRejectedError, match=said) as caught:
            store.apply(at_seven(deed))
        assert "2 shards (0, 2) had applied it" in str(caught.value)
        found = store.pull()
        # Shard 1 has the rest of "w" and begins with "v", which is as it was too.
        layout = store.layout
        mine = {p.parameter.name: slice(p.start, p.stop) for p in layout.pieces[1]}
        for name, first in (("w", np.arange(9.0)), ("v", np.zeros(9))):
            wanted = first + 1
            wanted[mine.get(name, slice(0, 0))] = first[mine.get(name, slice(0, 0))]
            np.testing.assert_array_equal(found[name], wanted)
        # The next one is another step.
        assert store.apply(lambda b, name: b * 0) == 2
        assert not any(v.any() for v in store.pull().values())


def test_what_cannot_be_a_function_or_a_name_is_refused(here):
    with daskps.create({"w": np.zeros(3), "t": daskps.TableSpec(3, 2)}) as store:
        with pytest.raises(TypeError, match="f is a function"):
            store.apply(3)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="f cannot be pickled"):
            store.apply(partial(at_seven, threading.Lock()))
        for name in ("x", "t"):
            with pytest.raises(daskps.UnknownParameterError, match=repr(name)):
                store.apply(half, name)
        assert store.version == 0


def loop_with_apply(trainer: Any, store: Any) -> Any:
    try:
        store.apply(half)
    except ConsistencyError as error:
        said = str(error)
    else:
        said = ""
    trainer.push({"w": np.ones(4)})
    return said


@pytest.mark.parametrize("sync", ["bsp", "asp"])
def test_it_is_refused_in_a_run_in_rounds(here, sync):
    with daskps.create({"w": np.full(4, 8.0)}, optimizer=optim.SGD(1.0)) as store:
        [said] = daskps.run(store, loop_with_apply, [store], sync=sync)
        assert ("has this store to itself" in said) == (sync == "bsp")
        assert store["w"].pull().tolist() == [7.0] * 4 if said else [3.0] * 4


def test_it_counts_once_where_it_is_sent_again(here, monkeypatch):
    """The answer is lost, and the function not called again where it was applied."""
    send = ShardClient._tell
    lost: list[str] = []
    calls: list[int] = []

    async def lossy(self: Any, worker: str, method: str, of: Any) -> Any:
        found = await send(self, worker, method, of)
        if method == "apply" and not lost:
            lost.append(worker)
            raise OSError("the answer is lost")
        return found

    monkeypatch.setattr(ShardClient, "_tell", lossy)
    loads = upstream.loads

    def counting(pickled: Any) -> Any:
        f = loads(pickled)

        def g(block: Any, name: str) -> Any:
            calls.append(len(block))
            return f(block, name)

        return g

    monkeypatch.setattr(owner_steps, "loads", counting)
    with daskps.create({"w": np.zeros(9)}, shards=3) as store:
        assert store.apply(lambda b, name: b + 1) == 1
        assert store["w"].pull().tolist() == [1.0] * 9
        assert (calls, len(lost)) == ([3, 3, 3], 1)
        assert store.versions == (1, 1, 1)


def test_pushes_that_come_in_between_are_not_lost(here, monkeypatch):
    """The function is called again; in the end the shard is held for it."""
    with daskps.create({"w": np.zeros(4)}, shards=1) as store:
        [hosted] = [s for h in here.hosts for s in h.shards.values()]
        made = owner_steps._made
        calls: list[float] = []

        def pushed(hosted_: Any, work: Any, flip: int) -> Any:
            items = made(hosted_, work, flip)
            assert items is not None
            calls.append(items[0].data[0] / 10)
            if len(calls) <= owner_steps.TRIES:
                store.add({"w": np.ones(4)})
            return items

        monkeypatch.setattr(owner_steps, "_made", pushed)
        store.apply(lambda b, name: b * 10)
        assert calls == [0.0, 1.0, 2.0, 3.0, 4.0]
        assert store["w"].pull().tolist() == [40.0] * 4
        assert hosted.locked_by() == 0
