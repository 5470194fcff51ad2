"""Manifests: what they say comes back, and nothing else is believed."""

from __future__ import annotations

import json
import pickle
import re
from dataclasses import replace
from typing import Any

import pytest

from daskps import optim
from daskps.checkpoint import grid
from daskps.checkpoint.digests import StoredFile, check_content, digest
from daskps.checkpoint.fields import Fields
from daskps.checkpoint.manifest import FORMAT, sealed
from daskps.checkpoint.rules import StoredRule
from daskps.checkpoint.texts import from_bytes, to_bytes
from daskps.errors import CheckpointError
from daskps.layout.slots import PerRow, marked
from tests.checkpoint.writing import State, manifest_of, mixed_state

STATE = State({"w": ((3,), "float32"), "b/c": ((2, 2), "int8")}, slots={"w": (0.0,)})


def small(**more):
    return manifest_of(STATE, STATE.files(1), **more)


def body(content):
    return json.loads(b"{" + content.split(b"\n", 1)[1])


@pytest.mark.parametrize("policy", [(0, 0, 1), (1000, 50, 2)])
def test_it_comes_back(policy, monkeypatch):
    monkeypatch.setattr(grid, "CHUNK_NBYTES", 256)
    state = mixed_state(*policy)
    progress = {"epochs": 3, "loss": float("inf"), "names": ["a", None]}
    history = [{"loss": 0.25, "metrics": {"x": 1}}]
    manifest = manifest_of(state, state.files(1), progress=progress, history=history)
    again = from_bytes(to_bytes(manifest))
    for name in manifest.__dataclass_fields__:
        found = getattr(again, name)
        assert (tuple(found) if name == "history" else found) == (
            tuple(history) if name == "history" else getattr(manifest, name)
        )
    assert again.layout(5) == manifest.layout(5)
    assert [(a.path, a.chunk) for a in again.arrays] == [
        (a.path, a.chunk) for a in state.arrays()
    ]
    unbounded_table = again.layout(1).table_by_name["any"].index
    assert marked(again.slots[unbounded_table]) == [1]


def test_whose_a_file_is():
    state = mixed_state()
    manifest = manifest_of(state, state.files(1))
    paths = [a.path for a in manifest.arrays if a.path.startswith("weights/a_b")]
    told = {p: manifest.parameter_of(f"{p}/c/0/0") for p in paths}
    assert sorted(told.values()) == ["a/b", "a_b"]
    assert manifest.parameter_of("zarr.json") == ""
    assert manifest.nbytes == sum(map(len, state.files(1).values()))


def test_every_flipped_byte_and_every_cut_is_found():
    content = to_bytes(small())
    assert from_bytes(content) == replace(small(), history=())
    for i in range(len(content)):
        for flipped in (content[i] ^ 1, content[i] ^ 0xFF):
            damaged = content[:i] + bytes([flipped]) + content[i + 1 :]
            with pytest.raises(CheckpointError, match=r"ckpt-1/manifest\.json"):
                from_bytes(damaged, "ckpt-1")
        with pytest.raises(CheckpointError) as caught:
            from_bytes(content[:i], "ckpt-1")
        assert caught.value.file == "ckpt-1/manifest.json"


def test_a_newer_format_is_told_from_a_damaged_one():
    newer = body(to_bytes(small())) | {"format": FORMAT + 1, "daskps": "9.0"}
    with pytest.raises(
        CheckpointError, match=r"format 2, written by daskps 9.0.*upgrade"
    ):
        from_bytes(sealed(newer))
    for wrong in (0, "1", None, True, [1]):
        with pytest.raises(CheckpointError, match="has the format"):
            from_bytes(sealed(newer | {"format": wrong}))


def test_digests_of_another_algorithm_are_told_from_damage():
    content = to_bytes(small())
    assert content.startswith(b'{"digest": "xxh128:')
    for said, told in (
        (b'"sha3-256:' + b"0" * 64, "has digests by 'sha3-256', and this daskps knows"),
        (b'"' + b"0" * 32, "of which it says no algorithm.*read it with the daskps"),
    ):
        other = re.sub(rb'"xxh128:\w+', said, content, count=1)
        with pytest.raises(CheckpointError, match=told) as caught:
            from_bytes(other, "ckpt-1")
        assert caught.value.file == "ckpt-1/manifest.json"


@pytest.mark.parametrize(
    "path", ["../w", "/etc/passwd", "a/../../b", "a//b", "./a", "a\\b", "", "a/"]
)
def test_files_outside_the_folder_are_refused(path):
    said = body(to_bytes(small()))
    said["files"][0][0] = path
    with pytest.raises(CheckpointError, match="outside its folder"):
        from_bytes(sealed(said))


def changed(said, change):
    change(said)
    with pytest.raises(CheckpointError) as caught:
        from_bytes(sealed(said))
    return str(caught.value), caught.value.parameter


def test_its_files_are_those_of_its_arrays():
    said = body(to_bytes(small()))
    paths = [path for path, *_ in said["files"]]
    chunk = paths.index("weights/w/c/0")
    text, of = changed(json.loads(json.dumps(said)), lambda s: s["files"].pop(chunk))
    assert "no digest of weights/w/c/0, of 'w'" in text
    assert of == "w"
    more = ["weights/z/c/0", 4, "0" * 32]
    text, _ = changed(json.loads(json.dumps(said)), lambda s: s["files"].append(more))
    assert "weights/z/c/0" in text
    twice = said["files"][0]
    text, _ = changed(json.loads(json.dumps(said)), lambda s: s["files"].append(twice))
    assert "twice" in text
    longer = ["weights/w/c/0", 13, "0" * 32]
    text, of = changed(
        json.loads(json.dumps(said)), lambda s: s["files"].__setitem__(chunk, longer)
    )
    assert "13 bytes, a chunk of 'w' has 12" in text
    text, _ = changed(
        json.loads(json.dumps(said)),
        lambda s: s["parameters"][0].__setitem__("shape", [2**40]),
    )
    assert "no digest of weights/w/c" in text


WRONG = [None, True, -1, 1.5, 2**70, "x", "", [], [1], [[1]], {}, {"a": 1}, "\ud800"]


def places(value, at=()):
    yield at
    of = value.items() if isinstance(value, dict) else enumerate(value)
    if isinstance(value, (dict, list)):
        for name, below in of:
            yield from (
                places(below, (*at, name))
                if isinstance(below, (dict, list))
                else [(*at, name)]
            )


def test_whatever_it_says_is_believed_or_refused(monkeypatch):
    """With the digest of what it says: any value of any entry replaced, and left out."""
    monkeypatch.setattr(grid, "CHUNK_NBYTES", 4096)
    unbounded = mixed_state(1000, 50, 2)
    for manifest in (small(), manifest_of(unbounded, unbounded.files(1))):
        text = json.dumps(body(to_bytes(manifest)))
        found = [p for p in places(json.loads(text)) if p and p[0] != "files"]
        refused = 0
        for number, place in enumerate(found):
            for wrong in WRONG if number % 3 == 0 or len(found) < 100 else WRONG[::5]:
                said = json.loads(text)
                of = said
                for step in place[:-1]:
                    of = of[step]
                of[place[-1]] = wrong
                try:
                    from_bytes(sealed(said))
                except CheckpointError:
                    refused += 1
            said = json.loads(text)
            of = said
            for step in place[:-1]:
                of = of[step]
            del of[place[-1]]
            try:
                from_bytes(sealed(said))
            except CheckpointError:
                refused += 1
        assert refused > 3 * len(found)


def test_huge_and_nested_manifests_end():
    wrongs: list[Any] = [[], 3, "x", None]
    for wrong in wrongs:
        with pytest.raises(CheckpointError):
            from_bytes(sealed({"format": 1, "rules": wrong}))
    text = b'"format": 1, "x": ' + b"[" * 100_000 + b'"end": true}'
    deep = b'{"digest": "xxh128:' + digest(text).encode() + b'",\n' + text
    with pytest.raises(CheckpointError, match="is no JSON"):
        from_bytes(deep)


@pytest.mark.parametrize("time", [float("nan"), float("inf"), 1e300, -1, "x", True])
def test_a_time_that_no_calendar_has(time):
    """It would end every listing of its folder, of the others too."""
    with pytest.raises(CheckpointError, match=r"time is .*, expected seconds since"):
        from_bytes(sealed(body(to_bytes(small())) | {"time": time}))


def test_integers_that_have_an_optimizer():
    said = body(to_bytes(small()))
    [place] = [i for i, p in enumerate(said["parameters"]) if p["dtype"] == "int8"]
    said["parameters"][place]["rule"] = 0
    with pytest.raises(CheckpointError, match=r"b/c.* of int8 has an optimizer"):
        from_bytes(sealed(said))


def test_content_of_files():
    file = StoredFile("weights/w/c/0", 3, "06b05ab6733a618578af5f94892f3950")
    with pytest.raises(CheckpointError, match=r"weights/w/c/0 of 'w' has 2 bytes, 3"):
        check_content(b"ab", file, "w")
    with pytest.raises(CheckpointError, match=r"weights/w/c/0 of 'w' has the digest"):
        check_content(b"abd", file, "w")


# -- rules ---------------------------------------------------------------------


class Mine(optim.Rule):
    def prepare(self, step, lr):
        return (lr,)

    @staticmethod
    def update(w, g, lr):
        return w - lr * g


class Adam(optim.Adam):
    """Another one of that name."""


SCHEDULE = optim.schedules.warmup(optim.schedules.cosine(0.1, 90), 10)
RULES = [
    optim.SGD(0.1),
    optim.SGD(SCHEDULE, momentum=0.9, weight_decay=1e-4),
    optim.Adagrad(0.1, rowwise=True),
    optim.Adam(optim.schedules.step(0.1, 10), beta1=0.8),
    optim.AdamW(1e-3),
    optim.RMSprop(0.01),
    optim.Adam(bias_correction=False, eps_root=0.5),
    optim.Adadelta(rho=0.5),
    optim.Adamax(0.1),
    optim.Ftrl(0.1, l1=0.5),
    optim.DCASGD(0.1, 0.5, adaptive=True, ranks=3),
    optim.WithMaster(optim.chain(optim.DCASGD(0.1, ranks=2))),
    optim.chain(optim.clip_by_value(-1, 1), optim.SGD(SCHEDULE)),
    optim.scaled(optim.chain(optim.SGD(0.1, weight_decay=0.5)), 2.0, 0.5),
    optim.SGD(optim.schedules.by_epoch(optim.schedules.piecewise([1, SCHEDULE], [9]))),
]


def stored(rule):
    first = [rule.slot_init.get(n, 0.0) for n in rule.slots]
    of_rows = [n in rule.row_slots for n in rule.slots]
    values = tuple(PerRow(v) if r else v for v, r in zip(first, of_rows, strict=True))
    return StoredRule.of(rule, values)


def fields(rule):
    return Fields(json.loads(json.dumps(rule.to_json())), "manifest.json", "rules[0]")


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_rules_of_daskps_come_back(rule):
    again = StoredRule.from_json(fields(stored(rule)))
    assert again == stored(rule)
    assert again.make("manifest.json", "w") == rule


@pytest.mark.parametrize(
    "rule",
    [
        Mine(0.1),
        Adam(0.1),
        optim.SGD(lambda n: 0.1),
        optim.chain(optim.clip_by_value(-1, 1), Mine(0.1)),
    ],
    ids=["own", "name", "lr", "inside"],
)
def test_rules_of_ones_own_have_to_be_passed(rule):
    again = StoredRule.from_json(fields(stored(rule)))
    with pytest.raises(
        CheckpointError, match=r"'w' is updated by .* optimizer="
    ) as caught:
        again.make("manifest.json", "w")
    assert caught.value.parameter == "w"
    assert type(rule).__name__ in str(caught.value)
    assert pickle.loads(pickle.dumps(caught.value)).parameter == "w"


@pytest.mark.parametrize(
    "arguments",
    [
        {"lr": "0.1"},
        {"lr": -1},
        {"lr": 0.1, "more": 1},
        {"lr": {"schedule": "system", "arguments": {"command": "true"}}},
        {"lr": {"schedule": "constant"}},
        {"lr": {"schedule": "constant", "arguments": []}},
        {"lr": {"schedule": [], "arguments": {}}},
        {},
    ],
)
def test_arguments_that_no_rule_has(arguments):
    rule = replace(stored(optim.SGD(0.1)), arguments=arguments)
    with pytest.raises(CheckpointError, match="no SGD has the arguments"):
        rule.make("manifest.json", "w")


def test_schedules_that_never_end():
    deep = {"schedule": "constant", "arguments": {"lr": 0.1}}
    for _ in range(50):
        deep = {"schedule": "warmup", "arguments": {"after": deep, "steps": 1}}
    rule = replace(stored(optim.SGD(0.1)), arguments={"lr": deep})
    with pytest.raises(CheckpointError, match="no SGD has the arguments"):
        rule.make("manifest.json", "w")


@pytest.mark.parametrize(
    "parts",
    [[], [{"rule": "Mine"}], [{"part": "system", "arguments": {}}], [1.0], 7, [{}]],
)
def test_parts_that_no_chain_has(parts):
    rule = replace(stored(optim.chain(optim.SGD(0.1))), arguments={"parts": parts})
    with pytest.raises(CheckpointError, match="no chain has the arguments"):
        rule.make("manifest.json", "w")


def test_slots_of_another_rule():
    kept = stored(optim.Adam(0.1))
    kept.check(optim.AdamW(0.2), "manifest.json", "w")
    for wrong in (optim.SGD(0.1), optim.Adagrad(0.1), optim.SGD(0.1, momentum=0.9)):
        with pytest.raises(CheckpointError, match="the slots of 'w' are"):
            kept.check(wrong, "manifest.json", "w")
    with pytest.raises(CheckpointError, match="per row"):
        stored(optim.Adagrad(0.1)).check(optim.Adagrad(0.1, rowwise=True), "m", "w")
