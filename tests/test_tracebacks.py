"""What is left of a traceback where a call of the user's has entered."""

from __future__ import annotations

import asyncio
import traceback

import dask
import numpy as np
import pytest

import daskps
from daskps import optim
from daskps.errors import IllegalStateError
from daskps.tracebacks import entrance
from tests.support import gen_cluster


@pytest.fixture(autouse=True)
def shortened():
    """As users have it: other tests show all frames."""
    with dask.config.set({"admin.traceback.shorten": [r"dask[\\/]base\.py"]}):
        yield


def packages(error):
    frames = [f for f, _ in traceback.walk_tb(error.__traceback__)]
    return [f.f_globals["__name__"].partition(".")[0] for f in frames]


def ours(source, **known):
    """Return a function `f` as one of our modules would define it."""
    space = {"__name__": "daskps.made_up", **known}
    exec(source, space)
    return entrance(space["f"])


def users():
    raise KeyError("the user's")


def test_frames_of_users_stay_between_ours():
    f = ours("def g(h):\n    h()\ndef f(h):\n    g(h)")
    with pytest.raises(KeyError) as caught:
        f(users)
    assert packages(caught.value) == ["tests", "tests"]


def test_the_setting_shows_all():
    f = ours("def f():\n    raise ValueError('no')")
    with dask.config.set({"admin.traceback.shorten": []}):
        with pytest.raises(ValueError, match="no") as caught:
            f()
        assert packages(caught.value) == ["tests", "daskps", "daskps"]
    with pytest.raises(ValueError, match="no") as caught:
        f()
    assert packages(caught.value) == ["tests"]


@pytest.mark.parametrize("kind", [IllegalStateError, AttributeError, IndexError])
def test_what_is_our_bug_is_shown_whole(kind):
    f = ours("def f():\n    raise kind('bug')", kind=kind)
    with pytest.raises(kind) as caught:
        f()
    assert packages(caught.value) == ["tests", "daskps", "daskps"]


def test_causes_that_say_nothing_more_are_dropped():
    source = (
        "def f(h, text):\n    try:\n        h()\n"
        "    except Exception as error:\n        raise RuntimeError(text) from error"
    )
    quiet = ours("def f():\n    raise OSError('refused')").__wrapped__
    f = ours(source)
    with pytest.raises(RuntimeError) as caught:
        f(quiet, "it was refused")
    assert caught.value.__cause__ is caught.value.__context__ is None
    with pytest.raises(RuntimeError) as caught:
        f(quiet, "gone")
    assert repr(caught.value.__cause__) == "OSError('refused')"
    with pytest.raises(RuntimeError) as caught:
        f(users, '"the user\'s" and more')
    assert packages(caught.value.__cause__) == ["tests"]


def test_what_the_user_was_handling_stays():
    f = ours("def f():\n    raise ValueError('no')")

    def handling():
        try:
            users()
        except KeyError:
            f()

    with pytest.raises(ValueError, match="no") as caught:
        handling()
    assert packages(caught.value.__context__) == ["tests", "tests"]


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)])
async def test_what_is_awaited(c, s, a):
    store = await daskps.aio.create({"w": np.zeros(2)}, optimizer=optim.SGD(1.0))
    bad = {"w": np.full(2, np.nan)}
    with dask.config.set({"admin.traceback.shorten": [r"dask[\\/]base\.py"]}):
        with pytest.raises(daskps.PushRejectedError) as caught:
            await store.push(bad)
        assert packages(caught.value) == ["tests"]
        with pytest.raises(daskps.PushRejectedError) as caught:
            await asyncio.wrap_future(store.push_async(bad))
        assert packages(caught.value) == ["tests"]
        with pytest.raises(daskps.StoreNotFoundError) as missing:
            await daskps.aio.open("nothing")
        assert packages(missing.value) == ["tests"]
    await store.close()
