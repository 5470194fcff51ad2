"""The table of mutants fits the code, and what runs them tells caught from survived."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.mutants.__main__ import ROOT, check
from tests.mutants.mutant import Mutant, UnfitError
from tests.mutants.running import Ground, Ran, survey
from tests.mutants.table import MUTANTS, ROOMS

LEAST = 40
CODE = """\
class Sum:
    def of(self, a, b):
        # Not a - b.
        return a + b

    def twice(self, a):
        b = a
        return a + b


async def nothing():
    def inner():
        return 0

    return inner()
"""
TESTS = """\
from tiny.sums import Sum


def test_sum():
    assert Sum().of(2, 2) == 4


class TestTwice:
    def test_twice(self):
        assert Sum().twice(0) == 0
"""


@pytest.fixture
def tiny(tmp_path: Path) -> Ground:
    """A project of one module and two tests."""
    for name, text in {"tiny/sums.py": CODE, "tests/test_sums.py": TESTS}.items():
        file = tmp_path / "root" / name
        file.parent.mkdir(parents=True)
        file.write_text(text)
    return Ground(tmp_path / "root", "tiny", tmp_path)


def mutant(where: str, line: str, becomes: str = "pass", test: str = "sum") -> Mutant:
    tests = {
        "sum": "tests/test_sums.py::test_sum",
        "twice": "tests/test_sums.py::TestTwice::test_twice",
    }
    return Mutant("m", f"tiny.sums:{where}", line, becomes, (tests.get(test, test),))


# -- the table ---------------------------------------------------------------


def test_every_mutant_has_its_line_and_its_tests() -> None:
    wrong = []
    for one in MUTANTS:
        try:
            one.broken(ROOT)
        except UnfitError as error:
            wrong.append(str(error))
        wrong += [f"{one.name}: no test {test}" for test in one.missing(ROOT)]
        if not one.tests or one.line == one.becomes:
            wrong.append(f"{one.name} breaks nothing, or has no test")
    assert wrong == []


def test_there_are_mutants_of_every_room() -> None:
    names = Counter(one.name for one in MUTANTS)
    assert [name for name, n in names.items() if n > 1] == []
    assert not names.keys() & ROOMS.keys()
    assert len(MUTANTS) >= LEAST
    assert all(ROOMS.values())


# -- one mutant --------------------------------------------------------------


def test_one_line_is_changed_and_no_other(tiny: Ground) -> None:
    made = mutant("Sum.of", "return a + b", "return a - b").broken(tiny.root)
    assert made == CODE.replace("return a + b", "return a - b", 1)
    made = mutant("nothing.inner", "return 0", "return 1").broken(tiny.root)
    assert made == CODE.replace("return 0", "return 1")


@pytest.mark.parametrize(
    ("where", "line", "becomes", "said"),
    [
        ("Sum.of", "return a - b", "pass", "stands 0 times in tiny.sums:Sum.of"),
        ("Sum", "return a + b", "pass", "stands 2 times in tiny.sums:Sum"),
        ("Sum.off", "return a + b", "pass", "tiny.sums:Sum.off stands 0 times"),
        ("Sum.of", "return a + b", "return (", "makes no Python"),
    ],
)
def test_a_line_that_is_not_there_once_is_refused(
    tiny: Ground, where: str, line: str, becomes: str, said: str
) -> None:
    one = mutant(where, line, becomes)
    with pytest.raises(UnfitError, match=said):
        one.broken(tiny.root)
    outcome = tiny.judge(one)
    assert not outcome.is_caught
    assert outcome.said.startswith("UNFIT")


def test_a_module_that_is_not_there_is_refused(tiny: Ground) -> None:
    one = Mutant("m", "tiny.other:f", "pass", "", ("tests/test_sums.py::test_sum",))
    with pytest.raises(UnfitError, match=r"no tiny/other\.py"):
        one.broken(tiny.root)


@pytest.mark.parametrize(
    ("test", "is_there"),
    [
        ("sum", True),
        ("twice", True),
        ("tests/test_sums.py::test_sum[1-2]", True),
        ("tests/test_sums.py::test_other", False),
        ("tests/test_sums.py::TestTwice::test_sum", False),
        ("tests/test_others.py::test_sum", False),
        # Of a whole file nobody can say which test it is.
        ("tests/test_sums.py", False),
    ],
)
def test_tests_are_found_by_their_names(
    tiny: Ground, test: str, is_there: bool
) -> None:
    assert (mutant("Sum.of", "", "", test).missing(tiny.root) == []) is is_there


# -- what is said of it ------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "output", "is_caught", "said"),
    [
        (0, "2 passed", False, "SURVIVED"),
        (
            1,
            "FAILED tests/a.py::test_b[c d] - no",
            True,
            "caught by tests/a.py::test_b[c d]",
        ),
        (1, "ERROR tests/a.py::test_b", True, "caught by tests/a.py::test_b"),
        (
            2,
            "ERROR tests/a.py\n1 error",
            False,
            "UNFIT: its tests do not begin: 1 error",
        ),
        (-11, "", True, "caught: SIGSEGV has ended its tests"),
        (None, "", True, "caught: its tests hang"),
    ],
)
def test_the_end_of_the_tests_decides(
    code: int | None, output: str, is_caught: bool, said: str
) -> None:
    outcome = Ran(code, output, 1.0).outcome
    assert (outcome.is_caught, outcome.said) == (is_caught, said)


def test_caught_survived_and_failing_without(tiny: Ground, capsys: Any) -> None:
    """The three ends of a run; the checkout stays as it is."""
    caught = mutant("Sum.of", "return a + b", "return a - b")
    # 2 + 2 is 2 * 2.
    survives = mutant("Sum.of", "return a + b", "return a * b")
    found = dict(survey(tiny, [caught, survives], 2))
    assert found[caught].said == "caught by tests/test_sums.py::test_sum"
    assert found[survives].said == "SURVIVED"
    assert not found[survives].is_caught
    file = tiny.root / "tiny" / "sums.py"
    assert file.read_text() == CODE
    file.write_text(CODE.replace("a + b", "a - b"))
    assert not check(tiny, [caught], 1)
    assert "1 of 1 tests fail without any mutant" in capsys.readouterr().out
