"""What becomes of a store where something fails while it is made."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from distributed.comm.core import CommClosedError

import daskps
from daskps.cluster.caller.link import Link
from tests import inprocess


@pytest.mark.parametrize("method", ["create", "load"])
def test_an_owner_that_dies_while_the_store_is_made(method, monkeypatch):
    """Its caller gets no error of the connection, and nothing of the store stays."""
    send = Link.reply

    async def gone(self: Link, worker: str, what: str, **about: Any) -> Any:
        if what == method:
            raise CommClosedError("in the middle")
        return await send(self, worker, what, **about)

    monkeypatch.setattr(Link, "reply", gone)
    with inprocess.cluster() as made:
        with pytest.raises(daskps.ShardLostError, match="while the store was made"):
            daskps.create({"w": np.ones(4)}, name="w")
        assert daskps.list_stores() == []
        assert not [host for host in made.hosts if host.shards]


def test_an_initializer_that_finds_no_file():
    """That says nothing of its owner."""

    def lost(shape: Any, dtype: Any, rng: Any) -> Any:
        raise FileNotFoundError("no such file")

    spec = daskps.ArraySpec((4,), "f4", lost)
    with (
        inprocess.cluster(),
        pytest.raises(daskps.DaskPSError, match="FileNotFoundError: no such file"),
    ):
        daskps.create({"w": spec})
