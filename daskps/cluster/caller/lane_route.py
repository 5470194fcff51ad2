"""Routes over lanes: the form of a route's calls for each host."""

from __future__ import annotations

from typing import TYPE_CHECKING

from daskps.cluster.caller.lane_form import LaneForm, WordMove
from daskps.cluster.caller.targets import ReadSlice
from daskps.shards.steps import GRADIENT

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from daskps.cluster.caller.lanes import Lanes
    from daskps.cluster.caller.routes import Request
    from daskps.cluster.caller.shard_map import StoreMap
    from daskps.cluster.caller.targets import Target
    from daskps.cluster.wire.messages import Call

#: Bytes of the arrays of a call to one host.
SMALL_NBYTES = 65_536


def looks_there(request: Request, shards: Sequence[int]) -> bool:
    """Return whether a call's shard is to look for NaN and infinity in its gradients.

    Only where nobody has looked yet and one shard gets all gradients: of several shards
    some would have applied their part when another one finds any.
    """
    check = request.check
    return (
        check is not None
        and not check.done
        and len(shards) == 1
        and request.step.kind == GRADIENT
        and not (request.codec or (request.rows and request.arrays))
    )


def unlooked(call: Call) -> Call:
    """Return a call whose gradients nobody has looked at."""
    parts = [part._replace(step=part.step._replace(check=True)) for part in call.parts]
    return call._replace(parts=tuple(parts))


class LaneRoute:
    """A route over lanes.

    It holds no arrays: arrays that a loop has let go of must not live on here.

    Parameters
    ----------
    lanes : Lanes
        The lanes of this process.
    meta : StoreMap
        The store.
    request : Request
        A call along the route.
    shards : sequence of int
        The shards of the route that the call is for.
    looks : bool
        Whether the shard looks for NaN and infinity in the arrays of its calls.
    """

    __slots__ = (
        "forms",
        "is_small",
        "lanes",
        "looks",
        "may_wait",
        "rest",
        "run",
        "slices",
        "words",
    )

    def __init__(
        self,
        lanes: Lanes,
        meta: StoreMap,
        request: Request,
        shards: Sequence[int],
        *,
        looks: bool = False,
    ) -> None:
        self.lanes, self.run, self.looks = lanes, request.step.run, looks
        #: Whether its calls may have to wait for other trainers.
        self.may_wait = self.run != 0
        target, owners = request.target, meta.where.owners
        #: By shard the elements that are read.
        self.slices: Mapping[int, tuple[ReadSlice, ...]]
        self.slices = {} if target is None else target.slices
        #: The part of it that is read of other shards than those of the call.
        self.rest = {s: of for s, of in self.slices.items() if s not in shards}
        hosts: dict[str, list[int]] = {}
        for shard in shards:
            hosts.setdefault(owners[shard], []).append(shard)
        forms, words = [], list[tuple[str, int]]()
        for worker, of in hosts.items():
            given = [
                (name, start, stop)
                for shard in of
                for _, name, start, stop in request.route.slices[shard]
                if request.arrays
            ]
            call = request.call(meta, of, 0.0, "")
            if looks:
                call = unlooked(call)
            reads, moves = self.slices, list[WordMove]()
            if call.read_codec:
                reads, moves = _in_words(call, reads, words)
            forms.append(LaneForm(worker, call, given, reads, moves=moves))
        self.forms = tuple(forms)
        #: Dtype and length of the arrays that words are received in. A call puts them
        #: behind the arrays of its target, the first one last: so no user of them needs
        #: their number.
        self.words = tuple(words)
        #: Whether its calls cost their hosts little but the interpreter's lock.
        self.is_small = all(form.call_nbytes <= SMALL_NBYTES for form in forms)

    def reads_as(self, target: Target | None) -> bool:
        """Return whether it reads the elements of a target, to the same places."""
        if target is None:
            return True
        return self.slices is target.slices or self.slices == target.slices


def _in_words(
    call: Call,
    slices: Mapping[int, tuple[ReadSlice, ...]],
    words: list[tuple[str, int]],
) -> tuple[dict[int, tuple[ReadSlice, ...]], list[WordMove]]:
    """Return the places of arrays that arrive, in words or not, and how words decode.

    It adds the arrays that words are received in to `words`.
    """
    reads, moves = {}, []
    for part in call.parts:
        found = []
        for one, how in zip(slices.get(part.shard, ()), part.words, strict=True):
            if how is None:
                found.append(one)
                continue
            words.append((how.codec.dtype, how.n_words))
            come = ReadSlice(
                (how.codec.dtype, 0, how.n_words), -len(words), slice(how.n_words)
            )
            moves.append(WordMove(come.number, how, one.number, one.where))
            found.append(come)
        reads[part.shard] = tuple(found)
    return reads, moves
