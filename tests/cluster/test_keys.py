"""The keys of our tasks, as Dask's dashboard and its metrics see them."""

from __future__ import annotations

import pytest
from dask.utils import key_split
from distributed.utils import key_split_group

from daskps.cluster.keys import (
    anchor_key,
    gradient_key,
    label_of,
    reduction_key,
    trainer_key,
)

LABEL = label_of("my model", "0123456789abcdef" * 2)


@pytest.mark.parametrize(
    ("key", "kind", "numbers"),
    [
        (anchor_key(LABEL, 3), "daskps-anchor", (3,)),
        (gradient_key(LABEL, (7, 0, 5), 3), "daskps-gradient", (7, 0, 5, 3)),
        (reduction_key(LABEL, (7, 0, 5), 3), "daskps-reduce", (7, 0, 5, 3)),
        (trainer_key(LABEL, 7, 3, 1), "daskps-trainer", (7, 3, 1)),
    ],
)
def test_a_key_has_its_kind_and_its_store(key, kind, numbers):
    """Tasks of a kind are one group, with one label for all stores."""
    assert key == (kind, "my model-01234567", *numbers)
    assert key_split(key) == key_split_group(key) == kind
