"""Copies of tables that are kept by what others say they have changed."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import daskps
from daskps import RowGrad, TableSpec, init, optim
from daskps.cluster.caller import questions as asking
from daskps.cluster.protocol import row_messages as wire_rows
from daskps.errors import ConsistencyError
from daskps.store import changes
from tests.inprocess import cluster
from tests.seams import push_as_another, shards_of

ROWS, MANY = 500, 12
#: Among others those that a hash sends to any shard.
IDS = np.concatenate([np.arange(-30, 30), np.arange(2**62, 2**62 + 10)])


@contextmanager
def stored() -> Iterator[Any]:
    params = {
        "few": TableSpec(ROWS, 1, "int64"),
        "any": TableSpec(None, 2, "float64", init=init.normal(1.0, 0.5)),
    }
    with cluster(), daskps.create(params, shards=3, seed=3) as store:
        yield store


def another(store: Any) -> Any:
    """A handle whose pushes are those of another process."""
    found = store.bound()
    push_as_another(found)
    return found


def some(table: Any, rng: Any) -> None:
    """Change a few rows, now and then many of them."""
    n = int(rng.choice([1, 4, 60], p=[0.5, 0.4, 0.1]))
    ids = rng.permutation(ROWS if table.rows else IDS)[:n]
    if not table.rows and rng.random() < 0.3:
        table.remove(ids)
    else:
        table.add(ids, np.ones((n, table.dim), table.dtype))


class Follower:
    """Has a copy of a table, and hears of changes alone."""

    def __init__(self, table: Any) -> None:
        self.table, self.since = table, None
        self.rows: dict[int, Any] = {}
        self.n_complete = 0

    def hear(self) -> None:
        found = self.table.pull_changed(self.since)
        assert (np.diff(found.ids) > 0).all()
        assert found.rows.dtype == self.table.dtype
        if not found.complete:
            self.rows.clear()
        self.n_complete += found.complete
        self.rows.update(zip(found.ids.tolist(), found.rows.tolist(), strict=True))
        self.since = pickle.loads(pickle.dumps(found.since))

    def check(self, first: dict[int, Any]) -> None:
        ids = [*first]
        expected = dict(zip(ids, self.table.pull(ids).tolist(), strict=True))
        assert first | self.rows == expected


@pytest.mark.parametrize("name", ["few", "any"])
def test_who_hears_of_changes_has_the_table(name, monkeypatch):
    """While others push between all steps, and more has changed than an answer holds."""
    rng = np.random.default_rng(5)
    monkeypatch.setattr(wire_rows, "MOST_ROWS", MANY)
    # Tables are read as a whole at first, and where little of the past is kept.
    with stored() as store:
        writers = [another(store)[name] for _ in range(2)]
        ids = range(ROWS) if name == "few" else IDS
        at_first = writers[0].pull(ids).tolist()
        first = dict(zip(map(int, ids), at_first, strict=True))
        readers = [Follower(store[name]), Follower(another(store)[name])]
        look, busy = asking.look, [True]

        def meanwhile(*args: Any) -> Any:
            if busy[0]:
                some(writers[int(rng.integers(2))], rng)
            # Both routes, as chance has it.
            return look(*args) if rng.random() < 0.5 else None

        monkeypatch.setattr(asking, "look", meanwhile)
        for i in range(40):
            some(writers[i % 2], rng)
            readers[i % 2].hear()
            if i % 10 == 9:
                busy[0] = False
                for reader in readers:
                    reader.hear()
                    reader.check(first)
                busy[0] = True
        assert all(reader.n_complete for reader in readers)


def test_a_shard_that_has_forgotten_has_all_told_anew():
    """Also what the others would have known of."""
    with stored() as store:
        few, writer = store["few"], another(store)["few"]
        since = few.pull_changed().since
        for i in range(20):  # all of the first shard, which is more than it keeps
            writer.add([0, 1, 400], np.full((3, 1), i))
        writer.add([3], [[1]])
        found = few.pull_changed(since)
        assert not found.complete
        assert found.ids.tolist() == [*range(ROWS)]
        assert found.rows[[0, 1, 3, 400], 0].tolist() == [190, 190, 1, 190]
        assert few.pull_changed(found.since).ids.tolist() == []


def test_nobody_looks_at_a_shard_that_was_handed_over():
    """As a process that has its memory mapped: its owner has yet to free that."""
    with cluster() as made, daskps.create({"t": TableSpec(4, 1)}, shards=1) as store:
        state = store["t"].pull_changed().since
        shards = shards_of(store)
        [hosted] = [h for host in made.hosts for h in host.shards.values()]
        [table] = shards.meta.layout.tables
        asked = asking.Question(table, {0: state.versions[0]}, 0)
        assert asking.look(shards, asked) is not None
        hosted.enqueue(lambda _: hosted.hand_over(2))
        hosted.serve()
        assert asking.look(shards, asked) is None


@pytest.mark.parametrize("looks", [True, False])
def test_rows_that_time_or_others_take_away_are_told(looks, monkeypatch):
    """Nobody has named them in the pushes that made them go."""
    params = {
        "aged": TableSpec(None, 1, "int64", ttl=2),
        "full": TableSpec(None, 1, "int64", max_rows=4),
    }
    if not looks:
        monkeypatch.setattr(asking, "look", lambda *_: None)
    with cluster(), daskps.create(params, shards=2) as store:
        aged, full, other = store["aged"], store["full"], another(store)
        other["aged"].add([1, 2], [[7], [8]])
        other["full"].add([1, 2, 3, 4], np.ones((4, 1), "int64"))
        since = aged.pull_changed().since, full.pull_changed().since
        other["aged"].add([2], [[1]])
        found = aged.pull_changed(since[0])
        assert (found.ids.tolist(), found.rows.tolist()) == ([2], [[9]])
        other["aged"].add([3], [[1]])  # the second push that does not name row 1
        gone = aged.pull_changed(found.since)
        assert gone.complete
        assert (gone.ids.tolist(), gone.rows.tolist()) == ([1, 3], [[0], [1]])
        assert aged.contains([1, 2, 3]).tolist() == [False, True, True]
        # Also of a push of this process: that did not name it.
        aged.add([3], [[1]])
        gone = aged.pull_changed(gone.since)
        assert (gone.ids.tolist(), gone.rows.tolist()) == ([2], [[0]])
        other["full"].add([9], [[5]])  # in place of the oldest of them
        gone = full.pull_changed(since[1])
        assert gone.complete
        assert (gone.ids.tolist(), gone.rows.tolist()) == ([1, 9], [[0], [5]])
        full.add([8], [[6]])
        gone = full.pull_changed(gone.since)
        assert (gone.ids.tolist(), gone.rows.tolist()) == ([2], [[0]])


@pytest.mark.parametrize("sync", ["bsp", "asp"])
def test_rows_are_removed_in_runs_that_leave_the_store_to_others(sync):
    spec = TableSpec(None, 1, "float64")
    with (
        cluster(),
        daskps.create({"any": spec}, optimizer=optim.SGD(1.0), shards=2) as store,
    ):
        store["any"].assign([1, -2, 3], np.ones((3, 1)))

        def loop(trainer: Any, ids: Any) -> tuple[str, list[int]]:
            trainer.push({"any": RowGrad(ids, -np.ones((len(ids), 1)))})
            trainer.barrier()
            said = ""
            before = store.version
            try:
                store["any"].remove([-2, 3])
            except ConsistencyError as error:
                said = str(error)
                assert store.version == before
            return said, store["any"].ids().tolist()

        [(said, left)] = daskps.run(store, loop, [[1, 5]], sync=sync)
        if sync == "bsp":
            assert "has this store to itself (sync='bsp'), a remove from out" in said
            assert left == [-2, 1, 3, 5]
            store["any"].remove([-2, 3])
        assert store["any"].ids().tolist() == [1, 5]
        assert store["any"].pull([-2, 1, 3, 5]).ravel().tolist() == [0, 2, 0, 1]


def test_a_token_is_of_its_table_and_its_store():
    with stored() as store, stored() as other:
        since = store["few"].pull_changed().since
        assert len(pickle.dumps(since)) < 250
        assert "'few' at version 0" in repr(since)
        with pytest.raises(ValueError, match=r"of another store, .*since=None"):
            other["few"].pull_changed(since)
        with pytest.raises(ValueError, match=r"of this store, .*'any'"):
            store["any"].pull_changed(since)
        # Of a version that shards have not reached they know nothing.
        ahead = changes.TableState(since.uid, "few", (7, 7, 7))
        assert not store["few"].pull_changed(ahead).complete
        assert (
            not store["few"]
            .pull_changed(changes.TableState(since.uid, "few", ()))
            .complete
        )


@pytest.mark.parametrize(
    "wrong", [{"by": -1}, {"asked": [(0, -2)]}, {"table": 5}, {"table": -1}]
)
def test_what_no_caller_asks_is_refused(wrong):
    with stored() as store:
        said = {"table": 0, "asked": [(0, 0)], "by": 0, **wrong}
        shards = shards_of(store)
        worker = shards.meta.owners[0]
        tell = shards.link.control
        with pytest.raises(daskps.DaskPSError, match="changes"):
            shards.link.run(
                lambda: tell(worker, "row_changes", store=store.uid, **said)
            )
