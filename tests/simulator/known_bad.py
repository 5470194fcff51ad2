"""Ways to break the code that a simulation must find: they show that it can.

Each replaces something in the process that simulates, as a mistake would have it.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from daskps.checkpoint.manifest import MANIFEST
from daskps.checkpoint.storage import Storage
from daskps.cluster.caller.producer import Repeated
from daskps.cluster.directory.fencing import RunEnd
from daskps.cluster.host import adoption, copies
from daskps.cluster.host.coming import Coming
from daskps.cluster.host.growth import Growing
from daskps.cluster.host.host import ShardHost
from daskps.cluster.host.hosted import Backing, HostedShard
from daskps.cluster.protocol.messages import Answer
from daskps.cluster.protocol.states import unpack_state
from daskps.cluster.upstream import loads
from daskps.epochs import Epochs
from daskps.kernels.row_index import RowIndex
from daskps.shards import producers, run_record, states
from daskps.shards.cuts.cut import Cut
from daskps.shards.installation import Counted
from daskps.shards.memory.feed import Feed
from daskps.shards.memory.format import (
    N_PRODUCERS,
    PRODUCER,
    ROUNDS,
    SEEN,
)
from daskps.shards.memory.publication import Withdrawal
from daskps.shards.pushes import Pushes
from daskps.shards.rounds.round import Round
from daskps.shards.shard import Shard
from daskps.shards.steps import NOTHING, SCALE, Ready, Ticket
from daskps.store.replica import Replica
from tests.simulator.ground import put

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from daskps.cluster.caller.link import Link
    from daskps.cluster.protocol.messages import Call
    from daskps.kernels.words_log import WordsLog
    from daskps.shards.memory.format import Record
    from daskps.shards.memory.segment import Segment
    from daskps.shards.states import Mark, State
    from daskps.shards.steps import Step, Ticket
    from daskps.typing import Array

#: How late the pushes are applied that were acknowledged before.
LATE_SECONDS = 0.005
#: How long an owner waits for its copy, where it decides alone.
ALONE_SECONDS = 0.05
#: And files that were said to be there.
FILES_LATE_SECONDS = 0.3
#: How long a copy has the half of a state.
HALF_SECONDS = 0.3


def no_deduplication() -> None:
    """Take every push for a new one."""
    put(producers, repeats=lambda *args: False)


def acknowledged_before_applied() -> None:
    """Answer pushes outside runs at once, and apply them a little later."""
    call_now = ShardHost.call
    #: Or the loop would forget what nobody holds.
    late: list[asyncio.Future[None]] = []

    async def call_late(host: ShardHost, call: Call) -> list[Answer]:
        if call.step.run or call.step.kind == NOTHING:
            return await call_now(host, call)

        async def apply() -> None:
            await asyncio.sleep(LATE_SECONDS)
            await call_now(host, call)

        late.append(asyncio.ensure_future(apply()))
        found = [host.get_shard(call.store, part.shard) for part in call.parts]
        return [Answer(s.index, version=s.shard.segment.current.version) for s in found]

    put(ShardHost, call=call_late)


def stale_generation_accepted() -> None:
    """Serve calls that are meant for an owner that died."""
    refused = Shard._refused

    def not_refused(shard: Shard, ticket: Ticket) -> bool:
        # As if every call were meant for whoever gets it.
        ticket.step = ticket.step._replace(generation=shard.generation)
        return refused(shard, ticket)

    put(Shard, _refused=not_refused)


def fence_forgets_a_shard() -> None:
    """End a run on all hosts of its store but that of the first shard."""
    ask = RunEnd._ask

    async def ask_others(
        run_end: RunEnd, worker: str, method: str, **about: Any
    ) -> Mapping[int, Any]:
        owners = run_end._run.entry.owners
        if method != "end_run" or worker != owners[0]:
            return await ask(run_end, worker, method, **about)
        return {shard: () for shard, owner in enumerate(owners) if owner == worker}

    put(RunEnd, _ask=ask_others)


def cut_holds_nothing() -> None:
    """Let pushes through while a cut is made."""
    put(Cut, holds=lambda *args: False)


def adopter_starts_at_the_wrong_round() -> None:
    """Go on in a run a round later than the owner that died."""
    take_over = Shard.take_over

    def take_over_late(shard: Shard) -> list[Ticket]:
        if shard.run_state.is_bsp:
            shard.segment.current.fixed[ROUNDS] += 1
        return take_over(shard)

    put(Shard, take_over=take_over_late)


def changes_forget_a_producer() -> None:
    """Tell nobody of the rows that some producers change."""
    note = Feed.note

    def note_some(feed: Feed, record: Record, ids: Array, by: int) -> None:
        if by % 3 != 1:
            note(feed, record, ids, by)

    put(Feed, note=note_some)


def adopter_cannot_grow() -> None:
    """Adopt shards without what gives them more memory."""
    put(adoption, grow_by=lambda *args: None)


def growth_takes_nothing() -> None:
    """Say that there is more memory, where there is none."""
    put(Growing, take=lambda *args: None)


def manifest_first() -> None:
    """Say that files of a checkpoint are written, and write them after the manifest."""
    write, sizes = Storage.write, Storage.sizes
    said: dict[str, dict[str, int]] = {}

    def write_late(storage: Storage, path: str, content: Any) -> None:
        if path == MANIFEST:
            write(storage, path, content)
            return
        said.setdefault(storage.url, {})[path] = len(content)
        loop, what = asyncio.get_running_loop(), bytes(content)
        loop.call_later(FILES_LATE_SECONDS, write, storage, path, what)

    def sizes_said(storage: Storage, prefix: str = "") -> dict[str, int]:
        return sizes(storage, prefix) | said.get(storage.url, {})

    put(Storage, write=write_late, sizes=sizes_said)


def epoch_counter_not_saved() -> None:
    """Save a store as if it had never been trained."""
    count = Counted.of

    def count_some(segment: Segment, flip: int) -> Counted:
        return replace(count(segment, flip), epochs=Epochs())

    put(Counted, of=count_some)


def half_of_a_log_put_back() -> None:
    """Put back only a part of what a writer that died has changed in an index."""
    restore = RowIndex.restore

    def restore_some(index: RowIndex, log: WordsLog, n: int) -> None:
        restore(index, log, n // 2)

    put(RowIndex, restore=restore_some)


def sync_has_a_new_number_each_time() -> None:
    """Send a sync that is in doubt as if it were another one."""
    begin = Replica._begun

    def begin_anew(replica: Replica, link: Link) -> Any:
        pending = begin(replica, link)
        uid = replica._store._origin
        pending = pending._replace(source=Repeated(link, uid))
        replica._pending = pending
        return pending

    put(Replica, _begun=begin_anew)


def adopter_forgets_who_has_scaled() -> None:
    """Adopt a shard whose learning rates were scaled as if nobody had told it to."""
    note, take_over = Pushes._note, Shard.take_over
    scaled: set[int] = set()

    def note_and_know(pushes: Pushes, ticket: Ticket, *given: Any) -> None:
        note(pushes, ticket, *given)
        if ticket.step.kind == SCALE:
            scaled.add(ticket.step.producer)

    def take_over_some(shard: Shard) -> list[Ticket]:
        for row in shard.segment.current.producers:
            if int(row[PRODUCER]) in scaled:
                row[SEEN] = 0
        return take_over(shard)

    put(Pushes, _note=note_and_know)
    put(Shard, take_over=take_over_some)


def adopter_knows_nothing_of_delays() -> None:
    """Take gradients for fresh once another owner has adopted their shard."""
    find, first = run_record.find_delay, set[int]()

    def find_some(record: Record, step: Step) -> int:
        delay = find(record, step)
        first.add(step.generation)
        return 0 if delay > 0 and step.generation > min(first) else delay

    put(run_record, find_delay=find_some)


def last_state_before_the_owner_stops() -> None:
    """Send the last state of a shard that moves, and let pushes through a little longer."""
    hand_over = HostedShard.hand_over

    def hand_over_late(hosted: HostedShard, *about: Any) -> list[Ticket]:
        def stop() -> None:
            hosted.enqueue(lambda _: hand_over(hosted, *about))
            hosted.serve()

        asyncio.get_running_loop().call_later(LATE_SECONDS, stop)
        return []

    put(HostedShard, hand_over=hand_over_late)


def former_owner_goes_on() -> None:
    """Leave a shard that has moved where it was, too."""
    put(HostedShard, hand_over=lambda *_: [])


def states_forget_producers() -> None:
    """Move shards without what they know of pushes."""
    take = states.take

    def take_some(segment: Segment, since: Mark, *more: Any) -> State | None:
        if (state := take(segment, since, *more)) is not None:
            state.words[0][1][N_PRODUCERS] = 0
        return state

    put(states, take=take_some)


def deliveries_stay_behind() -> None:
    """Have a run go on where a shard has moved, without what came for its open round."""

    def open_empty(
        _: ShardHost, hosted: HostedShard, rounds: Mapping[str, Any] | None, __: Any
    ) -> None:
        state = hosted.shard.run_state
        if state.is_bsp and rounds is not None:
            reduce = loads(rounds["reduce"])
            state.attach_rounds(state.run, state.n_ranks, reduce, None)

    put(copies, _open_round=open_empty)


def answered_before_backed() -> None:
    """Answer before the second copy of a shard has what the answer tells."""

    def answer_at_once(_: HostedShard, ticket: Ticket) -> None:
        ticket.outcome = Ready(0, 0)

    put(HostedShard, back=answer_at_once)


def owner_goes_on_alone() -> None:
    """Answer without the copy where that is silent for a while, as if it were struck off."""
    back = HostedShard.back

    def go_on(backing: Backing, flip: int) -> None:
        for ticket in backing.reach(flip):
            ticket.owner.one_done()

    def back_or_not(hosted: HostedShard, ticket: Ticket) -> None:
        back(hosted, ticket)
        if ticket.outcome is None:
            about: Any = (hosted.backing, hosted.shard.segment.flip)
            asyncio.get_running_loop().call_later(ALONE_SECONDS, go_on, *about)

    put(HostedShard, back=back_or_not)


def reads_of_rounds_that_a_copy_lacks_wait() -> None:
    """Have a copy that takes over wait for a round that its trainers have sent before."""
    put(Round, check_has=lambda *_: None)


def incomplete_copy_takes_over() -> None:
    """Make a copy the owner that nobody has waited for yet."""
    handle = ShardHost.handle_control

    async def handle_anyway(host: ShardHost, method: str, **about: Any) -> Any:
        key = about.get("store"), about.get("shard")
        if method == "move_own" and about.get("alone") and key in host.coming:
            host.coming[key].counts.set()
        return await handle(host, method, **about)

    put(ShardHost, handle_control=handle_anyway)


def copy_hears_of_no_withdrawal() -> None:
    """Take a round back without a mark on the pieces that it had changed."""
    commit = Withdrawal.commit

    def commit_unmarked(withdrawal: Withdrawal) -> None:
        changed = withdrawal.record.changed
        changed[changed == withdrawal.flip] = 0
        commit(withdrawal)

    put(Withdrawal, commit=commit_unmarked)


def states_are_installed_in_halves() -> None:
    """Install the rows of a state a while before its arrays and counts."""

    async def install_rows_first(host: ShardHost, coming: Coming, packed: Any) -> State:
        state, segment = unpack_state(packed), coming.hosted.shard.segment
        if state.tables and coming.counts.is_set():
            record = segment.current
            own = [(part.start, record.words[part].copy()) for part in record.used()]
            half = replace(state, words=own, pieces=())
            await host.in_thread(lambda: states.install(segment, half))
            await asyncio.sleep(HALF_SECONDS)
        turn = coming.turn
        await host.in_thread(lambda: coming.install(state, coming.begin(turn)))
        return state

    put(copies, _install=install_rows_first)


def former_owner_is_followed() -> None:
    """Have a copy that takes over go on to install what its former owner sends."""
    stop = Coming.stop

    async def stop_or_not(coming: Coming) -> None:
        if not coming.owning.locked():
            await stop(coming)

    put(Coming, stop=stop_or_not)


VARIANTS: dict[str, Callable[[], None]] = {
    function.__name__.replace("_", "-"): function
    for function in (
        no_deduplication,
        acknowledged_before_applied,
        stale_generation_accepted,
        fence_forgets_a_shard,
        cut_holds_nothing,
        adopter_starts_at_the_wrong_round,
        growth_takes_nothing,
        changes_forget_a_producer,
        adopter_cannot_grow,
        manifest_first,
        epoch_counter_not_saved,
        half_of_a_log_put_back,
        sync_has_a_new_number_each_time,
        adopter_forgets_who_has_scaled,
        adopter_knows_nothing_of_delays,
        last_state_before_the_owner_stops,
        former_owner_goes_on,
        states_forget_producers,
        deliveries_stay_behind,
        answered_before_backed,
        owner_goes_on_alone,
        reads_of_rounds_that_a_copy_lacks_wait,
        incomplete_copy_takes_over,
        copy_hears_of_no_withdrawal,
        states_are_installed_in_halves,
        former_owner_is_followed,
    )
}
