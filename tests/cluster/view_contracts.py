"""What a region of a parameter does, as contracts of `caller/test_verbs.py`."""

from __future__ import annotations

import numpy as np
import pytest

import daskps


async def regions(s, get):
    """A run of elements in C order is an array of its own, with all verbs."""
    w = np.arange(15, dtype="f4")
    view = s["w"].region(4, 13)
    assert (view.shape, view.size, view.ndim, view.nbytes) == ((9,), 9, 1, 36)
    assert (view.name, view.dtype, len(view)) == ("w", np.dtype("f4"), 9)
    np.testing.assert_array_equal(await get(view.pull()), w[4:13], strict=True)
    out = np.empty((9, 2), "f4")[:, 0]
    assert await get(view.pull(out)) is out
    np.testing.assert_array_equal(out, w[4:13])
    for index in (np.s_[2:5], np.s_[-1], np.s_[::-2], np.s_[...]):
        np.testing.assert_array_equal(await get(view[index]), w[4:13][index])
    inner = view.region(2, 4)
    np.testing.assert_array_equal(await get(inner.pull()), w[6:8])
    await get(view.add(np.full(9, 10)))
    w[4:13] += 10
    await get(inner.assign([-1, -2]))
    w[6:8] = [-1, -2]
    version = await get(view.push(np.ones(9), weight=2.0))
    w[4:13] -= 1
    await get(inner.push([4, 4], lr=0.25))
    w[6:8] -= 1
    found = await get(s.pull(min_version=version))
    np.testing.assert_array_equal(found["w"], w.reshape(5, 3), strict=True)
    for name in ("b", "net/k", "n"):
        assert (await get(s[name].region(0, 0).pull())).shape == (0,)
    await get(s["n"].region(1, 3).add([5, 5]))
    await get(s["b"].region(0, 1).assign([7.0]))
    await get(s["e"].region(0, 0).push(np.zeros(0)))
    await get(s["w"].region(3, 3).add(np.zeros(0)))
    found = await get(s.pull(["n", "b"]))
    assert (found["n"].tolist(), float(found["b"])) == ([0, 6, 7, 3], 7.0)


async def refuses_regions(s, get):
    """What is no region, and arrays that do not fit one, change nothing."""
    before = await get(s.pull())
    w = s["w"]
    for start, stop in ((-1, 3), (3, 2), (0, 16), (16, 16)):
        with pytest.raises(IndexError, match=rf"region\({start}, {stop}\) of 'w'.*15"):
            w.region(start, stop)
    with pytest.raises(IndexError, match="has elements 0 to 2"):
        w.region(3, 5).region(0, 3)
    for wrong in (1.0, None, True, "3"):
        with pytest.raises(TypeError, match="start is an int"):
            w.region(wrong, 5)
    view, refused = w.region(2, 6), daskps.PushRejectedError
    for value in (np.ones((2, 2)), np.ones(5), 1.0):
        with pytest.raises(refused, match=r"'w: elements 2 to 6' has shape"):
            await get(view.push(value))
    with pytest.raises(refused, match="'w: elements 2 to 6' has NaN or Inf"):
        await get(view.add([1, 2, np.nan, 4]))
    with pytest.raises(refused, match="times weight=1e"):
        await get(view.push(np.full(4, 1e30), weight=1e30))
    with pytest.raises(refused, match="takes no gradient"):
        await get(s["n"].region(0, 2).push([1.0, 2.0]))
    with pytest.raises(ValueError, match="elements 2 to 6"):
        await get(view.pull(np.empty(3, "f4")))
    after = await get(s.pull())
    for name, value in before.items():
        np.testing.assert_array_equal(after[name], value)


VIEW_CONTRACTS = [regions, refuses_regions]
