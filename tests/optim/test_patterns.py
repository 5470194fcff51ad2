"""Patterns of parameter names."""

from __future__ import annotations

import pytest

from daskps import optim
from daskps.errors import LayoutError

NAMES = ["layer/w", "layer/b", "table"]
SGD, ADAM = optim.SGD(0.1), optim.Adam()


def test_one_rule_applies_to_all():
    assert optim.resolve(SGD, NAMES) == dict.fromkeys(NAMES, SGD)


def test_first_match_in_mapping_order_holds():
    chosen = optim.resolve({"*/b": SGD, "*": ADAM}, NAMES)
    assert chosen == {"layer/w": ADAM, "layer/b": SGD, "table": ADAM}
    assert list(chosen) == NAMES
    swapped = {"layer/*": ADAM, "table": SGD, "*/b": SGD}
    assert optim.resolve(swapped, NAMES)["layer/b"] == ADAM


def test_patterns_are_case_sensitive():
    with pytest.raises(LayoutError, match="'table'"):
        optim.resolve({"layer/*": SGD, "TABLE": SGD}, NAMES)


def test_none_is_for_parameters_without_a_rule():
    chosen = optim.resolve({"*/b": None, "*": SGD}, NAMES)
    assert chosen == {name: SGD for name in NAMES if not name.endswith("/b")}
    assert 0 < len(chosen) < len(NAMES)


def test_name_without_match_is_refused():
    with pytest.raises(LayoutError, match="no optimizer for parameter 'table'"):
        optim.resolve({"layer/*": SGD}, NAMES)


def test_pattern_without_name_is_refused():
    with pytest.raises(LayoutError, match="'bias\\*' matches no parameter"):
        optim.resolve({"bias*": SGD, "*": ADAM}, NAMES)


@pytest.mark.parametrize(
    ("optimizer", "match"),
    [
        (optim.SGD, r"the class SGD.*SGD\(lr=0.1\)"),
        ("sgd", "'sgd', a str"),
        (None, "None"),
        ({"*": optim.Adam}, r"optimizer\['\*'\] is the class Adam"),
        ({"*": 0.1}, "0.1, a float"),
        ({3: SGD, "*": SGD}, "a text such as 'layer*', found 3".replace("*", r"\*")),
    ],
)
def test_other_types_are_refused_with_the_fix(optimizer, match):
    with pytest.raises(TypeError, match=match):
        optim.resolve(optimizer, NAMES)
