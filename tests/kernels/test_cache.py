"""Compiled code on disk: found by the next process, harmless when it is not there."""

from __future__ import annotations

import fcntl
import logging
import os
from pathlib import Path
from tempfile import mkdtemp
from types import ModuleType

import numpy as np
import pytest

from daskps import kernels, optim
from daskps.kernels import cache
from tests.kernels.compiling import hits, misses
from tests.test_readme import run_python

PROGRAM = """
import sys
import cloudpickle
import numpy as np
from daskps import kernels, optim

rate = float(sys.argv[2])

class Mine(optim.Rule):
    slots = ("s",)
    def prepare(self, step, lr):
        return (lr,)
    @property
    def update(self):
        return lambda w, g, s, lr: (w - lr * g / (np.sqrt(s) + rate), s + g * g)

rules = [optim.SGD(0.1), optim.Adam(), cloudpickle.loads(cloudpickle.dumps(Mine(0.1)))]
hits = misses = 0
for rule in rules:
    for dtype in ("f2", "f4"):
        bound = optim.bind(rule, dtype, cache_dir=sys.argv[1])
        w, g = np.ones(9, dtype), np.ones(9, dtype)
        slots = tuple(np.ones(9, bound.kernel.compute_dtype) for _ in rule.slots)
        bound.publish(w.copy(), w, g, slots, bound.scalars(1))
        bound.inplace(w, g, slots, bound.scalars(2))
        assert w[0] < 1
        if dtype != "f2":
            for made in bound.kernel.module.functions.values():
                hits += sum(made.stats.cache_hits.values())
                misses += sum(made.stats.cache_misses.values())
assert kernels.finite(np.ones(100_000, "f4"), cache_dir=sys.argv[1])
print(hits, misses)
"""


def run(tmp_path, *arguments):
    """Return hits and misses of a new process."""
    folder = Path(mkdtemp(dir=tmp_path))
    said = run_python(f"import sys; sys.argv[1:] = {arguments}\n{PROGRAM}", folder)
    return [int(number) for number in said.split()]


def files(folder):
    return sorted(p for p in folder.rglob("*") if p.is_file())


@pytest.mark.leaky  # the process that its processes are forked from
def test_second_process_compiles_nothing(tmp_path):
    """Rules of the library, lambdas and functions of __main__ alike."""
    kept = tmp_path / "new" / "kernels"
    assert run(tmp_path, str(kept), "0.5") == [0, 6]
    written = files(kept)
    assert run(tmp_path, str(kept), "0.5") == [6, 0]
    assert files(kept) == written
    # An edited constant is another rule, never the old machine code.
    assert run(tmp_path, str(kept), "0.25") == [4, 2]


def update(w, g):
    return w - 0.3 * g


def test_files_are_named_by_content_and_complete(tmp_path):
    kernels.build(update, 0, 0, "f4", str(tmp_path)).warm()
    (source,) = tmp_path.glob("*.py")
    assert source.stem == kernels.content_name(source.read_text())
    assert len(list((tmp_path / "__pycache__").glob(f"{source.stem}.*.nbc"))) == 2
    assert not list(tmp_path.rglob("*.tmp*"))


class Clock:
    """Time that passes while somebody sleeps; `then` happens after the third time."""

    def __init__(self, then=lambda: None):
        self.now, self.naps, self._then = 0.0, 0, then

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        self.naps += 1
        if self.naps == 3:
            self._then()


def compiled_beside_another(tmp_path, monkeypatch, factor, *, ends):
    """Return the time of a process that found another one compiling, and its module."""
    kernel = kernels.build(lambda w, g: w - factor * g, 0, 0, "f4", str(tmp_path))
    kernel.module.function("publish")
    (source,) = (p for p in tmp_path.glob("*.py") if str(factor) in p.read_text())
    other = os.open(source, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    time = Clock((lambda: fcntl.flock(other, fcntl.LOCK_UN)) if ends else lambda: None)
    monkeypatch.setattr(cache, "time", time)
    try:
        kernel.module.function("inplace")
        if ends:  # Given back.
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(other)
    return time


def test_what_another_process_compiles_is_waited_for(tmp_path, monkeypatch):
    time = compiled_beside_another(tmp_path, monkeypatch, 0.123, ends=True)
    assert time.naps == 3


def test_a_process_that_stopped_is_not_waited_for(tmp_path, monkeypatch):
    time = compiled_beside_another(tmp_path, monkeypatch, 0.321, ends=False)
    assert 60 <= time.now < 61


def test_a_process_forked_meanwhile_keeps_nobody_waiting(tmp_path):
    path = tmp_path / "loops.py"
    path.touch()
    module = ModuleType("loops")
    module.__file__ = str(path)
    told, tell = os.pipe()
    with cache.turn(module):
        child = os.fork()
        if not child:
            os.close(tell)
            os.read(told, 1)
            os._exit(0)
    with path.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(tell)
    os.waitpid(child, 0)
    os.close(told)


def test_directory_that_cannot_be_made_is_one_warning(tmp_path, caplog):
    file = tmp_path / "file"
    file.write_text("")
    where = str(file / "kernels")
    with caplog.at_level(logging.WARNING, "daskps"):
        for dtype in ("f4", "f8"):
            w = np.ones(3, dtype)
            kernel = kernels.build(update, 0, 0, dtype, where)
            kernel.inplace(w, np.ones(3, dtype), (), ())
            assert w == pytest.approx(0.7)
            assert misses(kernel.module) == 1
    (record,) = caplog.records
    assert where in record.getMessage()


def test_damaged_files_are_compiled_around(tmp_path, caplog):
    def damaged(w, g):
        return w - 0.7 * g

    kernels.build(damaged, 0, 0, "f4", str(tmp_path)).warm()
    for path in files(tmp_path):
        if path.suffix in (".nbi", ".nbc"):
            path.write_bytes(path.read_bytes()[:20])
    from daskps.kernels.compiled import Module
    from daskps.kernels.update_source import update_source

    module = Module(update_source(damaged, 0, 0, np.dtype("f4")), str(tmp_path))
    w = np.ones(3, "f4")
    module.function("inplace")(w, w.copy(), np.empty(0, "f4"))
    assert w == pytest.approx(0.3)
    assert (hits(module), misses(module)) == (0, 1)
    assert "cannot keep compiled kernels" in caplog.text


def test_a_file_with_another_text_is_replaced_not_run(tmp_path):
    def replaced(w, g):
        return w - 0.9 * g

    from daskps.kernels.update_source import update_source

    text = update_source(replaced, 0, 0, np.dtype("f4"))
    path = tmp_path / f"{kernels.content_name(text)}.py"
    path.write_text("raise SystemExit('never')")
    kernels.build(replaced, 0, 0, "f4", str(tmp_path)).warm()
    assert path.read_text() == text


def test_no_directory_means_memory_without_a_warning(caplog):
    optim.bind(optim.SGD(0.1), "f8").kernel.warm()
    assert not caplog.records
