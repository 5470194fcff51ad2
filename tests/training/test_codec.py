"""Runs whose gradients are bfloat16: what is rounded, what travels, what is refused."""

from __future__ import annotations

import threading
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import daskps
from daskps import codecs, optim
from daskps.cluster import upstream
from daskps.cluster.host import host as hosts
from daskps.cluster.host.contributions import Contribution, Contributions, RoundId
from daskps.cluster.host.reductions import sums
from daskps.cluster.protocol import encoding as words
from daskps.cluster.protocol.messages import Call
from daskps.cluster.protocol.packing import INLINE_NBYTES
from daskps.layout.arrays import Layout
from tests.seams import session_of
from tests.support import CARRIERS, gen_cluster, mostly_inside

#: A number and the bfloat16 next to it.
GIVEN, ROUNDED = 1.111111, 1.109375
RNG = np.random.default_rng(11)
X = RNG.normal(size=(48, 12)).astype("f4")
Y = (X @ np.arange(12, dtype="f4")).astype("f4")
START = {"w": np.zeros(12, "f4"), "b": np.float64(0), "h": np.zeros(5, "f2")}


def rounded(a):
    a = np.asarray(a)
    made, out = np.empty(a.size, "u2"), np.empty(a.size, a.dtype)
    codecs.BFloat16().encode(a.reshape(-1), made)
    codecs.BFloat16().decode(made, out)
    return out.reshape(a.shape)


def gradient(params, X, y):
    error = X @ params["w"] + np.float32(params["b"]) - y
    return float((error**2).mean()), {
        "w": X.T @ error / len(X),
        "b": np.asarray(error.mean(dtype="f8")),
        "h": np.full(5, error.max(), "f4"),
    }


# -- the numbers --------------------------------------------------------------


def push_twice(trainer, part):
    trainer.push({"w": np.full(3, GIVEN, "f4")}, tick=False)
    return trainer.pushpull({"b": np.full(2, 2 * GIVEN)}, weight=part)["b"].tolist()


@mostly_inside("sync", ["bsp", "ssp", "asp"])
def test_every_contribution_is_rounded_by_every_way(way, sync):
    """Two trainers: under BSP the mean of equal numbers, else one step after another."""
    params = {"w": np.zeros(3, "f4"), "b": np.zeros(2)}
    with daskps.create(params, optimizer=optim.SGD(1.0)) as store:
        daskps.run(store, push_twice, [1.0, 1.0], sync=sync, codec="bf16")
        steps = 1 if sync == "bsp" else 2
        found = store.pull()
    np.testing.assert_array_equal(found["w"], np.full(3, -ROUNDED * steps, "f4"))
    np.testing.assert_array_equal(found["b"], np.full(2, -2 * ROUNDED * steps))


#: Bits of the weights, of all ways, executions and shards: they must agree.
FOUND: set[bytes] = set()


@mostly_inside("shards", [1, 3], real=[3], train=True)
def test_no_way_and_no_execution_changes_a_bit(way, train, shards):
    with daskps.create(START, optimizer=optim.SGD(0.05), shards=shards) as store:
        result = train(
            store, gradient, X, Y, trainers=3, batch_size=8, epochs=2, codec="bf16"
        )
    # float16 weights never come back as words either.
    assert {n: a.dtype.str for n, a in result.weights.items()} == {
        "w": "<f4",
        "b": "<f8",
        "h": "<f2",
    }
    FOUND.add(b"".join(result.weights[n].tobytes() for n in START))
    assert len(FOUND) == 1


def test_the_mean_is_that_of_rounded_gradients(client):
    """By NumPy: one round of two trainers, 3 rows and 2."""
    grads = [RNG.normal(size=12).astype("f4") for _ in range(2)]
    rows = np.float32(3), np.float32(2)
    expected = sum(rounded(g) * n for g, n in zip(grads, rows, strict=True)) / 5

    def loop(trainer, part):
        trainer.push({"w": part[0]}, weight=float(part[1]))

    with daskps.create({"w": np.zeros(12, "f4")}, optimizer=optim.SGD(1.0)) as store:
        daskps.run(store, loop, list(zip(grads, rows, strict=True)), codec="bf16")
        np.testing.assert_array_equal(store["w"].pull(), -expected.astype("f4"))


class OneByte(codecs.Codec):
    """Of a user's: whole numbers up to 255."""

    def n_words(self, n):
        return n

    def encode(self, array, words):
        words[:] = array

    def decode(self, words, out):
        out[:] = words


def push_ones(trainer, part):
    given = {"w": np.full(5, 3.0, "f4"), "b": np.full(3, 7.0)}
    return trainer.pushpull(given, weight=part)["b"].tolist()


@mostly_inside("sync", ["bsp", "asp"])
def test_a_codec_of_a_user_s_goes_by_every_way(way, sync):
    params = {"w": np.zeros(5, "f4"), "b": np.zeros(3)}
    with daskps.create(params, optimizer=optim.SGD(1.0), shards=3) as store:
        daskps.run(store, push_ones, [1.0, 1.0], sync=sync, codec=OneByte())
        steps = 1 if sync == "bsp" else 2
        found = store.pull()
    assert found["w"].tolist() == [-3.0 * steps] * 5
    assert found["b"].tolist() == [-7.0 * steps] * 3


# -- what travels -------------------------------------------------------------


def count_steps(trainer, part):
    """Return messages and bytes of five steps of one trainer."""
    grad, out = {"w": np.ones(8000, "f4")}, {"w": np.empty(8000, "f4")}
    trainer.pushpull(grad, out=out)
    counters = session_of(trainer).shards.counters
    before = counters.messages, counters.nbytes
    for _ in range(3):
        trainer.pushpull(grad, out=out)
    for _ in range(2):
        trainer.push(grad)
    return counters.messages - before[0], counters.nbytes - before[1]


@pytest.mark.parametrize(
    ("codec", "each"), [(None, 4), ("bf16", 2), ("fp16", 2), (OneByte(), 1)]
)
@pytest.mark.parametrize("shards", [2, 6])
def test_one_message_per_trainer_host_and_step(rpc_cluster, codec, each, shards):
    """Two hosts and five steps, three of which read: weights stay float32."""
    params, where = {"w": np.zeros(8000, "f4")}, {"client": rpc_cluster}
    with daskps.create(
        params, optimizer=optim.SGD(0.1), shards=shards, **where
    ) as store:
        found = daskps.run(store, count_steps, [0, 1], codec=codec, sync="asp")
    assert found == [(5 * 2, 5 * 8000 * each + 3 * 8000 * 4)] * 2


LAYOUT = Layout.build({"w": ((20_000,), "float32"), "b": ((3,), "float64")}, 2)


def kept(weights):
    """A worker's contributions: one per rank, all of them rounded ones."""
    held = Contributions("w")
    for rank, weight in weights.items():
        grads = {0: RNG.normal(size=20_000).astype("f4"), 1: np.full(3, GIVEN)}
        made = words.rounded(
            LAYOUT, grads, codecs.BFloat16(), finite=True, empty=np.empty
        )
        one = Contribution(LAYOUT, weight, made, codecs.BFloat16(), weight)
        held.leave(RoundId(1, 0, 0), rank, one)
    return held


def test_what_one_rank_delivers_travels_between_hosts_as_words():
    """In half the bytes, as views of what is kept, and is the same when it arrives."""
    held = kept({0: 3.0, 1: 2.0})
    near = held.sums(RoundId(1, 0, 0), [0, 1], [0, 1], [(0, 1), (1, 2)])
    for shard, row in enumerate(near):
        for rank, parcel in enumerate(row):
            source = held._runs[1].by_rank[rank].arrays
            piece = LAYOUT.pieces[shard][0]
            data = parcel[0].data
            assert data.dtype == "u2"
            assert np.shares_memory(data, source[0])
            numbers = parcel[0].numbers(piece, np.empty)
            assert numbers.dtype == "f4"
            expected = np.empty(piece.size, "f4")
            codecs.BFloat16().decode(source[0][piece.start : piece.stop], expected)
            np.testing.assert_array_equal(numbers, expected * np.float32(3 - rank))
            assert parcel[0].weight == 3.0 - rank
    assert near[0][0][1].numbers(LAYOUT.pieces[0][1], np.empty).dtype == "f8"


def test_sums_of_several_ranks_travel_as_numbers():
    held = kept({0: 3.0, 1: 2.0})
    [[both]] = held.sums(RoundId(1, 0, 0), [0], [0, 1], [(0, 2)])
    one, two = (
        held.sums(RoundId(1, 0, 0), [0], [r], [(r, r + 1)])[0][0][0].numbers(
            LAYOUT.pieces[0][0], np.empty
        )
        for r in range(2)
    )
    assert both[0].codec is None
    np.testing.assert_array_equal(both[0].data, one + two)
    assert both[0].weight == 5.0


@gen_cluster(nthreads=[])
async def test_the_reply_with_sums_names_the_codec(s):
    held = kept({0: 3.0, 1: 2.0})
    host: Any = SimpleNamespace(contributions=held, inline_nbytes=2**40)
    ask = partial(sums, host, place=(1, 0, 0), shards=[0], ranks=[0, 1])
    [[one, two]], words = await ask(nodes=[(0, 1), (1, 2)])
    assert one == [(position, 3.0, -1, "bf16", 3.0) for position in (0, 1)]
    assert [scale for *_, scale in two] == [2.0, 2.0]
    assert len(words) == 4
    [[both]], numbers = await ask(nodes=[(0, 2)])
    assert [of for *_, of, _ in both] == ["", ""]
    assert upstream.unframe(numbers[0]).nbytes == 4 * 10_000
    assert upstream.unframe(words[0]).nbytes == 2 * 10_000


@gen_cluster(
    client=True,
    nthreads=[("127.0.0.1", 1), ("127.0.0.1", 1)],
    config=CARRIERS["rpc"],
)
async def test_large_gradients_are_widened_off_the_event_loop(c, s, a, b):
    """Small ones on it: a thread would cost more."""
    loop_thread = threading.get_ident()
    seen: dict[bool, set[bool]] = {}

    def watched(call, layout, empty):
        on_loop = threading.get_ident() == loop_thread
        seen.setdefault(call.nbytes > INLINE_NBYTES, set()).add(on_loop)
        return words.widened(call, layout, empty)

    def loop(trainer, part):
        for name, n in (("large", 400_000), ("small", 10)):
            trainer.push({name: np.ones(n, "f4")})

    params = {"large": np.zeros(400_000, "f4"), "small": np.zeros(10, "f4")}
    store = await daskps.aio.create(
        params, optimizer=optim.SGD(1.0), servers=[a.address]
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hosts, "widened", watched)
        await daskps.aio.run(store, loop, [None], codec="bf16")
    assert seen == {True: {False}, False: {True}}
    await store.close()


# -- what is refused ----------------------------------------------------------

TOO_LARGE = np.array([1.0, 3.4e38, -3.4e38], "f4")


def push_too_large(trainer, part):
    with pytest.raises(daskps.PushRejectedError, match=r"'w'.*codec='bf16'.*clip"):
        trainer.push({"w": TOO_LARGE})
    clock = trainer.clock
    trainer.push({"w": np.full(3, 3.38e38, "f4")})
    return clock, trainer.clock


def test_a_gradient_that_would_become_infinite_is_refused(client):
    """Before any shard has seen it: the clock stays and the next one is fine."""
    with daskps.create({"w": np.zeros(3, "f4")}, optimizer=optim.SGD(1e-38)) as store:
        assert daskps.run(store, push_too_large, [None], codec="bf16") == [(0, 1)]
        assert np.isfinite(store["w"].pull()).all()
        assert store.version == 1


def too_large(params, X, y):
    return {"w": TOO_LARGE}


def test_so_is_one_of_train(client, train):
    with (
        daskps.create({"w": np.zeros(3, "f4")}, optimizer=optim.SGD(1.0)) as store,
        pytest.raises(daskps.PushRejectedError, match=r"'w'.*too large") as caught,
    ):
        train(store, too_large, X[:2], codec="bf16", trainers=1)
    assert any("trainer 0 of 1 at clock 0" in n for n in caught.value.__notes__)


def test_where_infinities_are_allowed_they_become_infinite():
    layout = Layout.build({"w": ((3,), "float32")}, 1)
    make = partial(words.encoded, layout, {0: TOO_LARGE}, codecs.BFloat16())
    found = make(finite=False, empty=np.empty)[0][0, 0]
    out = words.decoded(codecs.BFloat16(), found, layout.pieces[0][0], np.empty)
    np.testing.assert_array_equal(out, [1, np.inf, -np.inf])
    with pytest.raises(daskps.PushRejectedError):
        make(finite=True, empty=np.empty)


def no_loop(trainer, part):
    raise AssertionError("it has begun")


@pytest.mark.parametrize(
    ("start", "function"),
    [(daskps.train, gradient), (daskps.run, no_loop)],
    ids=["train", "run"],
)
@pytest.mark.parametrize(
    ("codec", "error", "words"),
    [
        (
            "bfloat16",
            ValueError,
            "'bfloat16' is not known; choose one of bf16, fp16, int8, or None",
        ),
        ("", ValueError, "'' is not known"),
        (codecs.BFloat16, TypeError, "'bf16'"),
        (16, TypeError, "found 16"),
        (True, TypeError, "found True"),
    ],
)
def test_what_is_no_codec_is_refused_before_anything_starts(
    start, function, codec, error, words
):
    with pytest.raises(error, match=words):
        start(None, function, [X], codec=codec)


def test_a_mean_of_models_takes_no_codec():
    store: Any = None
    with pytest.raises(ValueError, match=r"average='models'.*round.*leave it at None"):
        daskps.train(store, gradient, X, Y, average="models", codec="bf16")


def test_names_and_objects_are_the_same():
    assert (
        codecs.choose("bf16") == codecs.choose(codecs.BFloat16()) == codecs.BFloat16()
    )
    assert codecs.choose(None) is None
    assert codecs.choose("fp16") == codecs.Float16()
    assert codecs.BFloat16(truncate=True) != codecs.BFloat16()
    assert Call("u", ()).codec == ""
