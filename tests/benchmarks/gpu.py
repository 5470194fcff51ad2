"""Shards on a device, in the process that owns them: bits, and times beside its copies."""

from __future__ import annotations

from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np

from daskps import optim
from daskps.backend import checked, find
from daskps.consistency import BSP
from daskps.layout.arrays import Layout
from daskps.shards.arrays.device import DeviceMemory
from daskps.shards.reader import RowsRead, ShardReader
from daskps.shards.steps import GRADIENT, Item, Step, Ticket
from tests.benchmarks.command import benchmark, number
from tests.benchmarks.report import Verdict
from tests.benchmarks.samples import Bar, Job, LeftOutError, lasting, timed
from tests.shards.on_device import asarray, make, program

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable, Iterator

    from daskps.backend.stream import Device
    from daskps.shards.shard import Shard

_SEEDS = range(4)
_MANY, _KB = 300, 256
_SECONDS = 0.1


class _Pushes:
    """Pushes to a shard of arrays of some lengths, one after the other."""

    def __init__(self, device: str | None, sizes: list[int], rule: Any) -> None:
        shapes = {f"p{i}": ((n,), "float32") for i, n in enumerate(sizes)}
        layout = Layout.build(shapes, 1)
        rules = dict.fromkeys(range(len(sizes)), rule)
        self.shard: Shard = make(layout, 0, rules, device)
        self.numbers = count()

    def __call__(self, arrays: list[Any]) -> None:
        items = tuple(Item(i, 0, a) for i, a in enumerate(arrays))
        of: dict[str, Any] = {
            "producer": 1,
            "sequence": next(self.numbers),
            "check": True,
        }
        _submit(self.shard, Step(GRADIENT, items, **of))


def _submit(shard: Shard, step: Step) -> None:
    ticket = Ticket(step)
    shard.submit([ticket])
    if isinstance(ticket.outcome, Exception):
        raise ticket.outcome


def _round(device: str | None, n: int, given: Callable[[Any], Any]) -> Any:
    """Return a function that makes a round of two trainers."""
    layout = Layout.build({"w": ((n,), "float32")}, 1)
    shard, clocks = make(layout, 0, {0: optim.SGD(0.1)}, device), count()
    shard.begin_run(1, BSP(), 2, "mean")
    arrays = [given(np.full(n, 0.1, "f4")) for _ in range(2)]

    def step() -> None:
        clock = next(clocks)
        for rank, array in enumerate(arrays):
            of: dict[str, Any] = {
                "run": 1,
                "rank": rank,
                "clock": clock,
                "sequence": clock,
            }
            _submit(shard, Step(GRADIENT, (Item(0, 0, array),), tick=True, **of))

    return step


def stepped(**sides: Callable[[], Any]) -> dict[str, Any]:
    """Return sides that are timed step by step."""
    return {name: lasting(_SECONDS, partial(timed, act)) for name, act in sides.items()}


@benchmark(
    "gpu",
    "shards on a GPU, beside copies within it",
    ("--device", {"default": "cuda", "help": "the device [%(default)s]"}),
    number("--mib", 256, "MiB of large arrays"),
)
def gpu(options: Namespace) -> Iterator[Job | str | Verdict]:
    """Yield the device, whether bits are those of host shards, and the jobs."""
    device = checked(options.device)
    try:
        of = find(device)
    except ValueError as why:
        raise LeftOutError(str(why)) from why
    yield f"{device}: {of.info()}"
    for seed in _SEEDS:
        is_same = program(seed, device) == program(seed, None)
        yield Verdict(f"program {seed} has the bits of host shards", is_same)
    n = options.mib * 2**18
    there = partial(asarray, device=device)
    large, out = there(np.full(n, 0.1, "f4")), of.array((n,), np.dtype("f4"))
    memory, one = DeviceMemory(of), of.array((1,), np.dtype("f4"))

    def copy() -> None:
        with of.lend() as stream:
            stream.copy(out, large)
            stream.wait()

    def empty_launch() -> None:
        memory.fill(one, 0.0)
        memory.wait()

    for rule, moved in ((optim.SGD(0.1), 3), (optim.Adam(0.1), 7)):
        push = _Pushes(device, [n], rule)
        sides = stepped(push=partial(push, [large]), copy=copy)
        # As many bytes: a copy reads and writes, an update has so many arrays more.
        bar = Bar("push", "copy", 1.3 * moved / 2)
        yield Job(f"push of {options.mib} MiB, {rule}", sides, [bar])
    small = np.full(_KB, 0.1, "f4")
    push = _Pushes(device, [_KB], optim.SGD(0.1))
    for name, array, most in (("device", there(small), 5), ("NumPy", small, 8)):
        sides = stepped(push=partial(push, [array]), launch=empty_launch)
        bar = Bar("push", "launch", most)
        yield Job(f"push of 1 kB, {name} array", sides, [bar])
    many = _Pushes(device, [_KB] * _MANY, optim.SGD(0.1))
    whole = _Pushes(device, [_KB * _MANY], optim.SGD(0.1))
    sides = stepped(
        many=partial(many, [there(small) for _ in range(_MANY)]),
        one=partial(whole, [there(np.full(_KB * _MANY, 0.1, "f4"))]),
    )
    yield Job(f"push of {_MANY} arrays of 1 kB", sides, [Bar("many", "one", 4)])
    segment = _Pushes(device, [n], optim.SGD(0.1)).shard.segment
    weights = segment.weights_of(segment.current, 0)
    read = segment.payload.read
    sides = stepped(pull=lambda: read([(out, weights)]), copy=copy)
    bar = Bar("pull", "copy", 1.2)
    yield Job(f"pull of {options.mib} MiB into device memory", sides, [bar])
    quarter = max(1, n // 4)
    sides = stepped(
        device=_round(device, quarter, there), host=_round(None, quarter, lambda a: a)
    )
    bar = Bar("device", "host", 10, at_least=True)
    yield Job(f"round of 2 trainers, {options.mib / 4:g} MiB each", sides, [bar])
    yield from _rows(of, options.mib * 2**14)


def _rows(of: Device, n: int) -> Iterator[Job]:
    """Yield jobs of some rows of a table that has so many, beside a look-up of them."""
    k, dim = min(n // 4, 100_000), 64
    layout, numbers = Layout.build({}, 1, {"emb": (n, dim, "float32")}), count()
    shard = make(layout, 0, {0: optim.Adagrad(0.1)}, of.name)
    ids = np.random.default_rng(0).permutation(n)[:k]
    rows, out = of.array((n, dim), np.dtype("f4")), of.array((k, dim), np.dtype("f4"))
    g = asarray(np.full(k * dim, 0.1, "f4"), of.name)

    def take() -> None:
        rows[ids]
        of.settle()

    def push() -> None:
        said: dict[str, Any] = {"producer": 1, "sequence": next(numbers), "check": True}
        _submit(shard, Step(GRADIENT, (Item(0, 0, g, ids),), **said))

    def pull() -> None:
        wanted = [RowsRead(0, ids, out.reshape(-1))]
        ShardReader(shard.segment).read_at(shard.segment.flip, (), wanted)

    for act, most in ((pull, 1.5), (push, 4)):
        name = act.__name__
        sides = stepped(take=take, **{name: act})
        yield Job(f"{name} of {k:,} of {n:,} rows", sides, [Bar(name, "take", most)])
