"""What a handle knows of its store without asking."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

from daskps.layout import Layout

if TYPE_CHECKING:
    from collections.abc import Mapping


class Meta:
    """Names, layout, owners and rules of one store.

    Parameters
    ----------
    wire : mapping
        What the directory says of the store.
    """

    def __init__(self, wire: Mapping[str, Any]) -> None:
        self.uid: str = wire["uid"]
        self.name: str = wire["name"]
        self.session: bool = wire["session"]
        self.layout = Layout.from_wire(wire["layout"])
        self.owners: tuple[str, ...] = tuple(wire["owners"])
        self.rules: bytes = wire["rules"]
        self.optimizers: dict[int, str] = dict(wire["optimizers"])

    @cached_property
    def positions(self) -> dict[tuple[int, int], int]:
        """Position of each parameter's piece within each shard."""
        return {
            (shard, piece.parameter.index): position
            for shard, pieces in enumerate(self.layout.pieces)
            for position, piece in enumerate(pieces)
        }

    @property
    def hosts(self) -> dict[str, list[int]]:
        """Shards of each host, in order."""
        hosts: dict[str, list[int]] = {}
        for shard, owner in enumerate(self.owners):
            hosts.setdefault(owner, []).append(shard)
        return hosts
