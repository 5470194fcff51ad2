"""What is said to those who make a mistake: what, where, why and what to do instead."""

from __future__ import annotations

import asyncio
import operator
import pickle
import re
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import dask
import dask.array as da
import numpy as np
import pytest
from distributed import Client
from distributed.client import _current_client, _global_clients

import daskps
from daskps import optim
from daskps.cluster.protocol.handlers import HOST
from daskps.errors import (
    LayoutError,
    ProtocolError,
    PushRejectedError,
    StoreClosedError,
    StoreExistsError,
    StoreNotFoundError,
    UnknownParameterError,
)
from daskps.layout.arrays import Layout
from daskps.layout.trees import MOST_LEVELS, flatten
from daskps.store.arguments import least_version, number
from tests.support import served_by, store

#: Deeper than Python follows.
NESTED: list[Any] = []
for _ in range(5000):
    NESTED = [NESTED]

# -- without a cluster ---------------------------------------------------------


@pytest.fixture
def no_client() -> Iterator[None]:
    """Hide the clients of other tests."""
    clients = dict(_global_clients)
    _global_clients.clear()
    current = _current_client.set(None)
    yield
    _current_client.reset(current)
    _global_clients.update(clients)


@pytest.mark.parametrize(
    "call",
    [
        lambda: daskps.create({"w": np.zeros(2)}),
        lambda: daskps.open("model"),
        daskps.list_stores,
        lambda: daskps.delete("model"),
        lambda: daskps.ParameterStore("0", "model").pull(),
    ],
)
@pytest.mark.usefixtures("no_client")
def test_without_a_client_it_says_how_to_make_one(call):
    said = r"scheduler is gone has closed; make one with client = distributed\.Client"
    with pytest.raises(ValueError, match=said):
        call()


def test_what_is_no_client_is_refused():
    with pytest.raises(TypeError, match=r"client is a distributed\.Client, found 'tcp"):
        daskps.create({"w": np.zeros(2)}, client="tcp://127.0.0.1:8786")


def test_a_client_that_was_closed_is_refused(cluster):
    closed = Client(cluster.scheduler.address, set_as_default=False)
    closed.close()
    with pytest.raises(ValueError, match=r"is closed; make another one with client ="):
        daskps.create({"w": np.zeros(2)}, client=closed)


def itself():
    params: Any = {"w": np.zeros(1)}
    params["a"] = params
    return params


def endless() -> list[Any]:
    array: list[Any] = [np.zeros(1)]
    array += [array, array]
    return array


def nested(levels):
    params: Any = {"w": np.zeros(1)}
    for _ in range(levels):
        params = {"a": params}
    return params


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (itself(), r"the mapping under 'a/' contains itself"),
        ({"x": {"y": itself()}}, r"under 'x/y/a/' contains itself"),
        (nested(5000), "nested more than 100 levels deep"),
        (
            {"w\ud800": np.zeros(1)},
            r"parameter name 'w\\ud800' has half of a character",
        ),
        ([np.zeros(2), endless()], r"the list under '1/1/' contains itself"),
        ({"w/0": 1.0, "w": [np.zeros(2)]}, r"'w/0' is given twice"),
    ],
)
def test_parameters_that_cannot_be(params, message):
    with pytest.raises(LayoutError, match=message):
        daskps.create(params)


def test_shared_and_deep_mappings_are_fine():
    shared = {"w": np.zeros(1)}
    assert set(flatten({"a": shared, "b": {"c": shared}})) == {"a/w", "b/c/w"}
    assert len(flatten(nested(MOST_LEVELS))) == 1


def test_bfloat16_of_torch_is_refused_with_the_fix():
    torch = pytest.importorskip("torch")
    with pytest.raises(LayoutError, match=r"Tensor of bfloat16.*float32.*\.float\(\)"):
        daskps.create({"w": torch.zeros(2, dtype=torch.bfloat16)})


def test_bfloat16_of_others_is_refused_in_their_words():
    other = SimpleNamespace(dtype="bfloat16")
    with pytest.raises(LayoutError, match=r"of bfloat16.*\.astype\('float32'\)"):
        daskps.create({"w": other})


@pytest.mark.parametrize("params", [{}, [], (), {"a": {}}])
def test_a_store_of_nothing(params):
    with pytest.raises(LayoutError, match="params is empty; a store needs"):
        daskps.create(params)


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        (None, TypeError, "the name of a store is a str, found None"),
        (3, TypeError, "is a str, found 3"),
        ("", ValueError, "name is empty"),
        ("a\ud800", ValueError, r"name 'a\\ud800' has half of a character"),
        ("a" * 201, ValueError, "201 bytes, at most 200"),
    ],
)
def test_names_that_no_store_has(name, error, message):
    with pytest.raises(error, match=message):
        daskps.open(name)
    if name is not None:
        with pytest.raises(error, match=message):
            daskps.create({"w": np.zeros(1)}, name=name)


@pytest.mark.parametrize("servers", ["resource:\ud800", ["tcp://\ud800:1"]])
def test_servers_that_cannot_be_sent(servers):
    with pytest.raises(ValueError, match=r"ud800.* has half of a character"):
        daskps.create({"w": np.zeros(1)}, servers=servers)


@pytest.mark.parametrize(
    ("value", "least", "error", "message"),
    [
        (float("nan"), None, ValueError, "lr must be a finite number, found nan"),
        (10**400, 0.0, ValueError, "lr must be a finite number, found 1000"),
        (-1, 0.0, ValueError, "lr must be at least 0, found -1"),
        ("1", 0.0, TypeError, "lr is a number, found '1'"),
    ],
)
def test_numbers_say_what_they_may_be(value, least, error, message):
    with pytest.raises(error, match=message):
        number(value, "lr", least)


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (-1, ValueError, "must be from 0 to .*, found -1"),
        (10**30, ValueError, "must be from 0 to"),
        (1.5, TypeError, r"a Version that a push returned, or an int, found 1\.5"),
        ("1", TypeError, "found '1'"),
        (True, TypeError, "found True"),
    ],
)
def test_versions_that_no_store_reaches(value, error, message):
    with pytest.raises(error, match=message):
        least_version(value)


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("hidden", UnknownParameterError, r"holds \['hidden/w', 'hidden/b'\]: nested"),
        ("hiden/w", UnknownParameterError, r"'out'\]; did you mean 'hidden/w'\?"),
        ("zzz", UnknownParameterError, r"it holds \['hidden/w', 'hidden/b', 'out'\]$"),
        (3, TypeError, r"names are str, found 3; .*store\.pull\(\[\.\.\.\]\)"),
        (("hidden/w", "out"), TypeError, "names are str"),
        (["out"], TypeError, "names are str"),
    ],
)
def test_names_that_no_parameter_has(name, error, message):
    shapes = dict.fromkeys(["hidden/w", "hidden/b", "out"], ((2,), "float64"))
    with pytest.raises(error, match=message):
        Layout.build(shapes, 2)[name]


# -- the ten common ones ---------------------------------------------------------

TABLE = {"w": np.zeros(2), "emb": daskps.TableSpec(4, 2)}


@pytest.fixture
def few() -> Iterator[Any]:
    """One worker within this process, with little memory, and a client of its own."""
    off = {
        f"distributed.worker.memory.{n}": False for n in ("target", "spill", "pause")
    }
    quiet = {"dashboard_address": "127.0.0.1:0", "silence_logs": 50}
    with (
        dask.config.set(off | {"distributed.worker.memory.terminate": False}),
        Client(processes=False, n_workers=1, memory_limit="4 MB", **quiet) as client,
        daskps.create(TABLE, name="taken", optimizer=optim.SGD(0.1)),
    ):
        yield client


def old_worker() -> None:
    """Have a worker answer as one of another release."""
    about = {"protocol": 1, "version": "0.0.1"}
    old = served_by("hello", lambda host: about)
    with mock.patch.dict(HOST.by_name, {"hello": old}):
        daskps.create({"w": np.zeros(2)})


def closed_store() -> None:
    made = daskps.create({"w": np.zeros(2)})
    made.close()
    made.pull()


def missing_extra() -> None:
    gone = {name: None for name in sys.modules if name.startswith("jax")} | {
        "jax": None
    }
    with mock.patch.dict(sys.modules, gone):
        sys.modules.pop("daskps.jax", None)
        vars(daskps).pop("jax", None)
        daskps.jax  # noqa: B018


def not_awaited() -> Any:
    """Forget to await what an asynchronous client returns."""

    async def main(address: str) -> None:
        async with Client(address, asynchronous=True, set_as_default=False) as client:
            made: Any = daskps.create({"w": np.zeros(2)}, client=client)
            try:
                made.pull()
            finally:
                await (await made).close()

    asyncio.run(main(Client.current().scheduler.address))


@pytest.mark.parametrize(
    ("mistake", "error", "cause", "fix"),
    [
        (
            lambda: daskps.open("taken").push({"w": np.ones(3)}),
            PushRejectedError,
            r"gradient of 'w' has shape \(3,\), the parameter \(2,\)",
            "shapes must be equal",
        ),
        (
            lambda: daskps.create({"w": np.zeros(10**6)}),
            LayoutError,
            r"worker inproc://.* need .* memory limit of 4,000,000",
            r"daskps\.memory-share",
        ),
        (missing_extra, ImportError, "jax", r"install daskps\[jax\]"),
        (
            old_worker,
            ProtocolError,
            r"inproc://.* speaks protocol 1 \(",
            "install the same",
        ),
        (closed_store, StoreClosedError, "'session-.*' was closed", "create it again"),
        (
            lambda: daskps.open("taken")["emb"].pull([1.0]),
            ValueError,
            "'emb' takes ids that are integers, .*: float",
            "use int64",
        ),
        (
            lambda: daskps.create({"w": np.array(["a"])}),
            LayoutError,
            "'w' has dtype <U1, which a store cannot hold",
            "convert it to one of float16",
        ),
        (
            not_awaited,
            AttributeError,
            "still being made by an asynchronous client",
            r"write store = await daskps\.create",
        ),
        (
            lambda: daskps.create(TABLE, name="taken"),
            StoreExistsError,
            "a store named 'taken' exists",
            r"daskps\.open\('taken'\), or pass overwrite=True",
        ),
    ],
)
@pytest.mark.usefixtures("few")
def test_a_common_mistake_gives_cause_and_fix_in_a_line(mistake, error, cause, fix):
    """And the tenth, no client, above."""
    with pytest.raises(error) as caught:
        mistake()
    said = [str(caught.value), *getattr(caught.value, "__notes__", ())]
    text = "; ".join(said)
    assert re.search(f"{cause}.*{fix}", text), text
    assert "\n" not in text


# -- with one ------------------------------------------------------------------


@pytest.fixture
def s(client: Client):
    params = {"w": np.zeros(2), "hidden": {"b": np.zeros(3)}}
    return store(client, params=params, optimizer=optim.SGD(0.1))


#: Out of mypy's sight, which finds these mistakes as well.
run: Any = daskps.run


def loop(trainer, part):
    raise AssertionError("begun")


@pytest.mark.parametrize(
    ("mistake", "error", "message"),
    [
        (lambda s: s.w, AttributeError, r"of that name is store\['w'\]$"),
        (lambda s: s.hidden, AttributeError, r"are read as store\['hidden/b'\]$"),
        (lambda s: s.weights, AttributeError, "no attribute 'weights'$"),
        (lambda s: setattr(s, "w", 1), AttributeError, r"store\.assign\(\{'w': value"),
        (lambda s: operator.setitem(s, "w", 1), TypeError, r"use store\.assign\(\{'w'"),
        (lambda s: operator.delitem(s, "w"), TypeError, "cannot be taken out"),
        (lambda s: s["w"] + 1, TypeError, r": store\['w'\]\.pull\(\) \+ \.\.\. comp"),
        (lambda s: 1 - s["w"], TypeError, r": \.\.\. - store\['w'\]\.pull\(\) comp"),
        (lambda s: s["w"] * s["w"], TypeError, r"\.add\(\.\.\.\) or \.assign"),
        (lambda s: s["w"] < 0, TypeError, r"pull\(\) < \.\.\. computes"),
        (lambda s: -s["w"], TypeError, r": -store\['w'\]\.pull\(\) computes"),
        (lambda s: float(s["w"]), TypeError, r": float\(store\['w'\]\.pull\(\)\) comp"),
        (lambda s: s["w"].std(), AttributeError, r"pull\(\)\.std\(\) takes a copy"),
        (lambda s: s["w"].T, AttributeError, r"to_dask_array\(\)\.T works where"),
        (lambda s: s["w"].item_, AttributeError, "no attribute 'item_'$"),
        (lambda s: operator.setitem(s["w"], 0, 1), TypeError, r"\['w'\]\.assign"),
        (lambda s: s.pull(3), TypeError, "name of a parameter or a list of them, fou"),
        (
            lambda s: s.push({s.names[0]: Client.current().scatter(1.0)}),
            PushRejectedError,
            r"is a Future; give what it stands for, by client\.gather",
        ),
        (
            lambda s: s.add({"w": [Client.current().scatter(1.0)] * 2}),
            PushRejectedError,
            r"'w' is a list, of which one element is a Future; give .* client\.gather",
        ),
        (
            lambda s: s.add({"w": SimpleNamespace(toarray=None)}),
            PushRejectedError,
            r"'w' is a SimpleNamespace, and .*; pass \.toarray\(\)",
        ),
        (
            lambda s: s.pull(NESTED),
            TypeError,
            r"names are str, found \[{7}\.\.\.",
        ),
        (lambda s: s.pull(out=["w"]), TypeError, "out is a mapping.*found list"),
        (lambda s: s.pull(min_version=-1), ValueError, "min_version must be from 0"),
        (lambda s: s.pull_async(min_version=1.5), TypeError, "min_version is a Ver"),
        (
            lambda s: s.push({"w": [np.ones(1)] * 2}),
            UnknownParameterError,
            r"one array.*numpy\.stack",
        ),
        (lambda s: s.aggregate(None), TypeError, "contributions is a list.*NoneType"),
        (lambda s: s.aggregate({"w": np.ones(2)}), TypeError, "found dict; pass \\["),
        (lambda s: run(s, loop, None), TypeError, "parts is a list.*NoneType"),
        (lambda s: run(s, loop, "ab"), TypeError, "found str; daskps.partit"),
        (lambda s: run(s, loop, {"a": 1}), TypeError, "found dict; daskps.pa"),
        (lambda s: run(s, loop, da.ones(2)), TypeError, "found Array; daskps"),
        (lambda s: daskps.open(s.name), StoreNotFoundError, "is a session store: it"),
        (lambda s: daskps.open(s.uid), StoreNotFoundError, "is a session store: it"),
    ],
)
def test_a_mistake_is_told_what_was_meant(s, mistake, error, message):
    with pytest.raises(error, match=message):
        mistake(s)
    assert s.version == 0


def test_arrays_and_handles_are_what_they_were(s):
    w = s["w"]
    np.testing.assert_array_equal(w + np.ones(2), [1.0, 1.0])
    np.testing.assert_array_equal(np.ones(2) - w, [1.0, 1.0])
    np.testing.assert_array_equal(w * np.float64(2), [0.0, 0.0])
    np.testing.assert_array_equal(np.eye(2) @ w, [0.0, 0.0])
    assert np.sum(w) == 0.0
    assert np.asarray(w, "f4").dtype == np.float32
    assert np.float64(2) * w == pytest.approx(np.zeros(2))
    assert not hasattr(s, "__len_hint__")
    again = pickle.loads(pickle.dumps(s))
    with pytest.raises(AttributeError, match=r"of that name is store\['w'\]"):
        again.w  # noqa: B018  (it has not met the store yet)
    assert again == s


def test_the_uid_of_a_named_store_is_no_name(client):
    made = store(client, name="by name")
    with pytest.raises(StoreNotFoundError, match="is the uid of store 'by name'; open"):
        daskps.open(made.uid)


@pytest.mark.parametrize(
    ("end", "message"),
    [
        (lambda made, opened: opened.close(), r"daskps\.open\('named'\) gives another"),
        (lambda made, opened: opened.delete(), "was deleted by this handle; create"),
        (lambda made, opened: made.delete(), "^store 'named' was deleted; create it"),
    ],
)
def test_a_handle_that_is_over_says_what_can_be_done(client, end, message):
    made, opened = store(client, name="named"), daskps.open("named")
    opened.pull()
    end(made, opened)
    with pytest.raises(StoreClosedError, match=message):
        opened.pull()


def test_a_closed_session_says_that_it_is_gone(client):
    made = store(client)
    unmet = daskps.ParameterStore(made.uid, made.name)
    made.close()
    with pytest.raises(StoreClosedError, match="freed the store; create it again"):
        made.pull()
    unmet.close()
    with pytest.raises(StoreClosedError, match="if the store was given a name daskps"):
        unmet.pull()
