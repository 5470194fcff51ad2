"""Running the tests of mutants, each in a process and a copy of the package of its own.

Nothing is ever written to the checkout. What is compiled is kept by its content, so a
mutant cannot leave wrong machine code to another one; those of the compiler itself,
which could, have a cache of their own.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.mutants.mutant import Mutant, UnfitError

#: What a copy needs beside the package.
BESIDE = ("docs", "tests", "pyproject.toml")
#: Longest that the tests of one mutant may take: what hangs is caught too.
MUTANT_SECONDS, BASELINE_SECONDS = 120.0, 900.0
#: The part that names what it compiles.
COMPILER = "daskps.kernels."
#: Says of a run of pytest: all passed, some failed.
_PASSED, _FAILED = 0, 1


@dataclass(frozen=True)
class Outcome:
    """What became of the tests of one mutant."""

    is_caught: bool
    said: str
    seconds: float


@dataclass(frozen=True)
class Ran:
    """How a run of pytest has ended; `code` is None where it took too long."""

    code: int | None
    output: str
    seconds: float

    @property
    def failed(self) -> list[str]:
        """The tests that failed."""
        words = [line.partition(" ") for line in self.output.splitlines()]
        ends = [rest for end, _, rest in words if end in ("FAILED", "ERROR")]
        return [rest.partition(" - ")[0] for rest in ends]

    @property
    def outcome(self) -> Outcome:
        """What that says of a mutant whose tests these were."""
        if self.code is None:
            return Outcome(True, "caught: its tests hang", self.seconds)
        if self.code == _PASSED:
            return Outcome(False, "SURVIVED", self.seconds)
        if self.code == _FAILED:
            by = self.failed[0] if self.failed else "pytest"
            return Outcome(True, f"caught by {by}", self.seconds)
        if self.code < 0:
            end = signal.Signals(-self.code).name
            return Outcome(True, f"caught: {end} has ended its tests", self.seconds)
        last = "".join(self.output.strip().splitlines()[-1:])
        return Outcome(False, f"UNFIT: its tests do not begin: {last}", self.seconds)


class Ground:
    """The project, and a place for copies of it.

    Parameters
    ----------
    root : Path
        The checkout.
    package : str
        Name of the package in it.
    scratch : Path
        Where copies go.
    """

    def __init__(self, root: Path, package: str, scratch: Path) -> None:
        self.root, self.package, self.scratch = root, package, scratch

    def judge(self, mutant: Mutant) -> Outcome:
        """Return what the tests of a mutant say of it."""
        try:
            text = mutant.broken(self.root)
            if missing := mutant.missing(self.root):
                raise UnfitError(f"{mutant.name}: no test {', '.join(missing)}")
        except UnfitError as error:
            return Outcome(False, f"UNFIT: {error}", 0.0)
        with self._copy() as folder:
            mutant.file(folder).write_text(text)
            own = mutant.where.startswith(COMPILER)
            return self._run(
                folder, MUTANT_SECONDS, mutant.tests, "-x", own_cache=own
            ).outcome

    def baseline(self, tests: Sequence[str]) -> Ran:
        """Run tests on the package as it is."""
        with self._copy() as folder:
            return self._run(folder, BASELINE_SECONDS, tests)

    def _copy(self) -> _Copy:
        return _Copy(self)

    def _run(
        self,
        folder: Path,
        seconds: float,
        tests: Sequence[str],
        *more: str,
        own_cache: bool = False,
    ) -> Ran:
        command = [sys.executable, "-m", "pytest", "-q", "--tb=no", "-rfE"]
        # The same examples and numbers each time.
        command += ["-p", "no:cacheprovider", "--hypothesis-seed=0", *more, *tests]
        env = {**os.environ, "PYTHONPATH": str(folder), "DASKPS_TEST_SEED": "0"}
        cache = (folder if own_cache else self.scratch) / "cache"
        env["DASK_DASKPS__CACHE_DIRECTORY"] = str(cache)
        began = time.monotonic()
        with subprocess.Popen(
            command,
            cwd=folder,
            env=env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            # A group of its own: with it end the workers that its tests have started.
            start_new_session=True,
        ) as process:
            try:
                output, _ = process.communicate(timeout=seconds)
                code: int | None = process.returncode
            except subprocess.TimeoutExpired:
                output, code = "", None
            finally:
                _end(process.pid)
        return Ran(code, output, time.monotonic() - began)


class _Copy:
    """A copy of a project, while it is needed."""

    def __init__(self, ground: Ground) -> None:
        self._ground = ground
        self._folder = TemporaryDirectory(
            dir=ground.scratch, ignore_cleanup_errors=True
        )

    def __enter__(self) -> Path:
        root, to = self._ground.root, Path(self._folder.name)
        for name in (self._ground.package, *BESIDE):
            if (root / name).is_dir():
                # With what is compiled of it: whatever changes is written later.
                shutil.copytree(root / name, to / name)
            elif (root / name).exists():
                shutil.copy2(root / name, to)
        return to

    def __exit__(self, *_: object) -> None:
        self._folder.cleanup()


def _end(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return


def survey(
    ground: Ground, mutants: Iterable[Mutant], jobs: int
) -> Iterator[tuple[Mutant, Outcome]]:
    """Give mutants and what became of them, so many at a time, as they end."""
    with ThreadPoolExecutor(jobs) as pool:
        work = {pool.submit(ground.judge, mutant): mutant for mutant in mutants}
        try:
            for future in as_completed(work):
                yield work[future], future.result()
        finally:
            pool.shutdown(cancel_futures=True)
