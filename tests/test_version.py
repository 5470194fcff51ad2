from __future__ import annotations

import copy
import pickle

import pytest

from daskps.version import VERSION, Version


def test_it_is_the_largest_shard_version_and_knows_the_rest():
    version = Version.of([(0, 3), (1, 7), (2, 5)])
    assert version == 7
    assert version.pairs == ((0, 3), (1, 7), (2, 5))
    assert Version.of([]) == 0


@pytest.mark.parametrize("version", [Version.of([(0, 3), (4, 1)]), Version(5)])
def test_it_travels_whole(version):
    for other in (pickle.loads(pickle.dumps(version)), copy.deepcopy(version)):
        assert type(other) is Version
        assert (other, other.pairs) == (version, version.pairs)


def test_a_plain_number_has_no_pairs():
    assert Version(5).pairs == ()


def test_the_package_has_a_version():
    assert VERSION
