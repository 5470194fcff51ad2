"""The description of a run before it begins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from daskps.cluster.runs.graph.epochs import Schedule
    from daskps.codecs import Codec
    from daskps.consistency import Policy
    from daskps.epochs import Epochs

#: A resident trainer's function of its session and its part of the data; for graph
#: execution a function of the store's `Meta` that makes a thread's stepper.
Body = Callable[..., Any]


@dataclass(frozen=True)
class Launch:
    """One run, before it begins."""

    uid: str
    policy: Policy
    reduce: Any
    reset: bool
    restartable: bool
    gated: bool
    body: Body
    #: The data of each trainer: a `DataPart`, a future of it, or the data itself.
    parts: Sequence[Any]
    name: str
    #: Whether somebody wants to hear how far its trainers are.
    watched: bool = False
    #: How gradients travel; None as they are.
    codec: Codec | None = None
    #: How pulled weights travel; None as they are.
    read_codec: Codec | None = None
    #: The rounds of graph execution; None for resident trainers.
    graph: Schedule | None = None
    #: Where in the store's epochs it begins; None where it has none.
    epochs: Epochs | None = None
    #: Text about it for a caller that goes on with these epochs.
    described: str = ""
    #: The workers its trainers may be on; all, where it names none.
    workers: Sequence[str] = ()

    @property
    def n_ranks(self) -> int:
        """Ranks that the shards know: a round of the graph, reduced, comes from one."""
        return 1 if self.graph else len(self.parts)
