"""BigDL's parameter by its own words: scenarios B of reference, with their numbers."""

from __future__ import annotations

import pickle
import threading
from functools import partial

import numpy as np
import pytest

import daskps
from daskps.compat import bigdl
from daskps.compat.bigdl import AllReduceParameter, launch
from tests.inprocess import cluster


@pytest.fixture
def inside():
    with cluster() as made:
        yield made


def reduce_once(parameter, gradients, gradient):
    """Put one gradient, return place, slice of the mean and the weights that are seen."""
    place = parameter.init(np.zeros(parameter.size, "f4"))
    parameter.put_gradients(np.full(parameter.size, gradient, "f4"))
    parameter.aggregate_gradient_partition(gradients)
    parameter.weight_partition[:] = parameter.gradient_partition
    parameter.send_weight_partition()
    seen = parameter.get_weights(np.full(parameter.size, np.nan, "f4")).wait_result()
    return place, parameter.gradient_partition.tolist(), seen.tolist()


@pytest.mark.usefixtures("inside")
@pytest.mark.parametrize(
    ("size", "lengths"), [(10, [3, 3, 2, 2]), (2, [1, 1, 0, 0]), (3, [1, 1, 1, 0])]
)
@pytest.mark.parametrize("compress", ["fp16", "NONE"])
def test_b8_b9_mean_of_four_partitions(size, lengths, compress):
    """Also with fewer elements than partitions; the first slices are one longer."""
    parameter = AllReduceParameter(3, 4, size, compress=compress)
    found = launch(partial(reduce_once, parameter, 4), [1.0, 2.0, 3.0, 4.0])
    starts = [0, *np.cumsum(lengths)[:-1]]
    for rank, (place, mean, seen) in enumerate(found):
        assert place == (rank, starts[rank], lengths[rank])
        assert mean == [2.5] * lengths[rank]
        assert seen == [2.5] * size


def test_b10_part_of_a_larger_vector_on_two_processes(client):
    """Elements 10 to 20 of 20: 2.5 there, the rest untouched."""
    parameter = AllReduceParameter.new_parameter(2, 10, param_offset=10)

    def main(gradient):
        whole = np.full(20, -1.0, "f4")
        place = parameter.init(np.zeros(10, "f4"))
        parameter.put_gradients(np.full(10, gradient, "f4"))
        parameter.aggregate_gradient_partition(2)
        parameter.weight_partition[:] += parameter.gradient_partition
        parameter.send_weight_partition()
        parameter.get_weights(whole[10:]).wait_result()
        return place, whole.tolist()

    found = launch(main, [1.0, 4.0], client=client)
    assert [place for place, _ in found] == [(0, 10, 5), (1, 15, 5)]
    assert [w for _, w in found] == [[-1.0] * 10 + [2.5] * 10] * 2


@pytest.mark.usefixtures("inside")
def test_b21_one_partition():
    parameter = AllReduceParameter(0, 1, 4)
    [(place, mean, seen)] = launch(partial(reduce_once, parameter, 1), [3.0])
    assert (place, mean, seen) == ((0, 0, 4), [3.0] * 4, [3.0] * 4)


@pytest.mark.usefixtures("inside")
def test_b2_weights_travel_truncated_and_stay_whole():
    values = np.array([1.111111, 2.111111, 3.111111, 4.111111, 5.111111])
    parameter = AllReduceParameter(0, 2, 5)

    def main(part):
        parameter.init(values)
        seen = parameter.get_weights(np.zeros(5)).wait_result()
        return seen.tolist(), parameter.weight_partition.tolist()

    (first, mine), (second, theirs) = launch(main, [0, 0])
    assert first == second == [1.109375, 2.109375, 3.109375, 4.09375, 5.09375]
    assert mine + theirs == values.tolist()


def bytes_of(compress):
    """Return what a vector of 100 takes that all read, and what each owner is sent."""
    parameter = AllReduceParameter.new_parameter(2, 100, compress=compress)
    parameter.init(np.zeros(100, "f4"))
    mine = parameter._mine()
    return mine.store["wire"].nbytes, mine.store["gradients"].nbytes


@pytest.mark.usefixtures("inside")
@pytest.mark.parametrize(("compress", "width"), [("fp16", 2), ("none", 4)])
def test_what_travels_has_16_bits_or_32(compress, width):
    """Of 100 numbers by two partitions, and a stamp at the end of each of four blocks."""
    assert launch(bytes_of, [compress] * 2) == [(100 * width, (200 + 4) * width)] * 2


@pytest.mark.usefixtures("inside")
@pytest.mark.parametrize(
    ("gradients", "divisor", "expected"),
    [([0.1] * 8, 8, 0.09960938), ([256.0] + [1.0] * 10, 1, 266.0)],
)
def test_sums_are_not_taken_in_16_bits(gradients, divisor, expected):
    """Theirs come to 0.09912109 and to 256."""
    parameter = AllReduceParameter(0, len(gradients), 1)
    (_, mean, _), *_ = launch(partial(reduce_once, parameter, divisor), gradients)
    np.testing.assert_allclose(mean, [expected], rtol=0, atol=5e-9)


@pytest.mark.usefixtures("inside")
def test_b13_clipped_to_nothing_between_sum_and_update():
    parameter = AllReduceParameter(0, 2, 3)

    def main(gradient):
        parameter.init(np.ones(3, "f4"))
        parameter.put_gradients(np.full(3, gradient, "f4"))
        parameter.aggregate_gradient_partition(2)
        parameter.gradient_partition.clip(0, 0, out=parameter.gradient_partition)
        parameter.weight_partition[:] -= parameter.gradient_partition
        parameter.send_weight_partition()
        seen = parameter.get_weights(np.zeros(3, "f4")).wait_result()
        return parameter.gradient_partition.tolist(), seen.tolist()

    assert launch(main, [1.0, 2.0]) == [([0, 0], [1, 1, 1]), ([0], [1, 1, 1])]


SENT = threading.Event()


def send_late(rank):
    parameter = AllReduceParameter.new_parameter(2, 2)
    parameter.init(np.zeros(2, "f4"))
    if rank:
        assert SENT.wait(60)
    parameter.weight_partition[:] = rank + 1
    parameter.send_weight_partition()
    result = parameter.get_weights(np.zeros(2, "f4"))
    early = not result.future.done()
    SENT.set()
    return early, result.wait_result().tolist()


@pytest.mark.usefixtures("inside")
def test_get_weights_returns_before_they_are_there():
    SENT.clear()
    (early, first), (_, second) = launch(send_late, [0, 1])
    assert early
    assert first == second == [1.0, 2.0]


@pytest.mark.usefixtures("inside")
def test_init_again_begins_anew_and_two_parameters_are_two():
    one, two = (AllReduceParameter.new_parameter(2, 3) for _ in range(2))
    assert one.id != two.id
    one = pickle.loads(pickle.dumps(one))

    def main(gradient):
        for parameter, first in ((one, 1.0), (two, 5.0), (one, 2.0)):
            parameter.init(np.full(3, first, "f4"))
        two.put_gradients(np.full(3, gradient, "f4"))
        two.aggregate_gradient_partition(1)
        seen = [p.get_weights(np.zeros(3, "f4")).wait_result()[0] for p in (one, two)]
        return seen, one.gradient_partition[0], two.gradient_partition[0]

    assert launch(main, [1.0, 2.0]) == [([2, 5], 0, 3)] * 2


def sum_of_all(parameter, steps, *, puts_last, gradient):
    """Return the sums that were seen; one partition ends earlier than the others."""
    parameter.init(np.zeros(3, "f4"))
    found = []
    for step in range(5):
        if step == steps and not puts_last:
            break
        parameter.put_gradients(np.full(3, gradient, "f4"))
        if step == steps:
            break
        parameter.aggregate_gradient_partition(1)
        found += parameter.gradient_partition.tolist()
    return found


@pytest.mark.usefixtures("inside")
@pytest.mark.parametrize("compress", ["fp16", "none"])
@pytest.mark.parametrize(
    ("puts_last", "expected"), [(False, [7, 7, 5, 5, 5]), (True, [7, 7, 7, 5, 5])]
)
def test_a_partition_that_has_ended_counts_no_longer(compress, puts_last, expected):
    """Gradients 1, 2 and 4; the second partition ends after two sums, or one more put."""
    parameter = AllReduceParameter(0, 3, 3, compress=compress)

    def main(gradient):
        steps = 2 if gradient == 2.0 else 5
        how = {"puts_last": puts_last, "gradient": gradient}
        return sum_of_all(parameter, steps, **how)

    assert launch(main, [1.0, 2.0, 4.0]) == [expected, [7, 7], expected]


@pytest.mark.usefixtures("inside")
@pytest.mark.parametrize(
    ("calls", "said"),
    [
        (("init", "put_gradients"), "'init of a vector of 3, none'"),
        (
            ("aggregate_gradient_partition", "put_gradients"),
            "'aggregate_gradient_partition of parameter 0'",
        ),
    ],
)
def test_partitions_that_make_other_calls_hear_of_it(calls, said):
    """One of them would wait for the other for ever, or take old gradients for new."""
    one, other = (AllReduceParameter(i, 2, 3, compress="none") for i in range(2))
    given = {"aggregate_gradient_partition": 1}

    def main(part):
        rank, *_ = one.init(np.zeros(3, "f4"))
        call = calls[rank]
        what = other if call == "init" else one
        getattr(what, call)(given.get(call, np.ones(3, "f4")))
        one.put_gradients(np.ones(3, "f4"))

    with pytest.raises(ValueError, match=r"bigdl\.launch runs makes the same") as error:
        launch(main, [0, 0], timeout=60)
    assert said in str(error.value)
    assert "'put_gradients of parameter 0'" in str(error.value)


class Faults:
    """Fails at the first few tries; kept here, as a real program would in a file."""

    left = 0


def fail_sometimes(part):
    if part and Faults.left:
        Faults.left -= 1
        raise OSError("a fault")
    return Faults.left


def refuse(part):
    Faults.left -= 1
    raise ValueError("mine")


@pytest.mark.usefixtures("inside")
def test_b17_faults_and_retries():
    """Three faults: a run that may try thrice finishes, others surface the error."""
    Faults.left = 3
    assert launch(fail_sometimes, [0, 1], retries=3)[1] == 0
    Faults.left = 3
    with pytest.raises(OSError, match="a fault"):
        launch(fail_sometimes, [0, 1], retries=2)
    assert Faults.left == 0
    Faults.left = 3
    with pytest.raises(OSError, match="a fault"):
        launch(fail_sometimes, [0, 1])
    assert Faults.left == 2
    # After a window without one they count anew: no two of these are within no time.
    assert launch(fail_sometimes, [0, 1], retries=1, retry_window=0)[1] == 0


@pytest.mark.usefixtures("inside")
def test_arguments_that_cannot_be_are_not_tried_again():
    Faults.left = 4
    with pytest.raises(ValueError, match="mine"):
        launch(refuse, [0], retries=5)
    assert Faults.left == 3


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ((0, 0, 3), ValueError, "partition_num must be at least 1"),
        ((0, 2, 0), ValueError, "size must be at least 1"),
        ((0, 2, 3, -1), ValueError, "param_offset must be at least 0"),
        ((0, 2, 3, 0, "int8"), ValueError, '"fp16" or "none"'),
        ((0, 2, 3, 0, None), TypeError, '"fp16" or "none"'),
        (("a", 2, 3), TypeError, "id is an int"),
    ],
)
def test_wrong_parameters(given, error, said):
    with pytest.raises(error, match=said):
        AllReduceParameter(*given)


def refused(parameter, call):
    """Return what a call raises, in a launch of two."""

    def main(part):
        try:
            call(parameter)
        except Exception as error:  # noqa: BLE001 - shown
            return f"{type(error).__name__}: {error}"
        return ""

    return launch(main, [0, 0])[0]


@pytest.mark.usefixtures("inside")
@pytest.mark.parametrize(
    ("options", "call", "said"),
    [
        (
            {},
            lambda p: p.init(np.zeros(4, "f4")),
            r"ValueError: parameter has shape (4,)",
        ),
        (
            {},
            lambda p: p.init(np.zeros(3, "i4")),
            "TypeError: parameter is an array of",
        ),
        ({}, lambda p: p.init([0.0] * 3), "TypeError: parameter is an array of"),
        (
            {"compress": "none"},
            lambda p: p.init(np.zeros(3)),
            'TypeError: parameter is float64, and compress="none" sends float32',
        ),
        (
            {"partition_num": 3},
            lambda p: p.init(np.zeros(3)),
            "ValueError: parameter 0 has partition_num=3, but there are 2",
        ),
        (
            {},
            lambda p: p.put_gradients(np.zeros(3)),
            "RuntimeError: parameter 0 has no",
        ),
        ({}, lambda p: p.weight_partition, "RuntimeError: parameter 0 has no weights"),
        (
            {},
            lambda p: p.aggregate_gradient_partition(0),
            "ValueError: avg_numbers must",
        ),
        (
            {},
            lambda p: p.init(np.full(3, np.inf)),
            "PushRejectedError: there are numbers",
        ),
        (
            {},
            lambda p: p.init(np.full(3, 1e300)),
            "PushRejectedError: there are numbers",
        ),
        (
            {"compress": "none"},
            lambda p: p.init(np.full(3, np.nan, "f4")),
            "PushRejectedError: there are numbers",
        ),
    ],
)
def test_wrong_calls(options, call, said):
    given = {"partition_num": 2, "size": 3} | options
    assert refused(AllReduceParameter(0, **given), call).startswith(said)


def test_outside_of_a_launch():
    parameter = AllReduceParameter(0, 1, 3)
    with pytest.raises(RuntimeError, match=r"bigdl\.launch runs"):
        parameter.init(np.zeros(3))
    with pytest.raises(TypeError, match=r"main is a function main\(part\)"):
        launch(None, [0])  # type: ignore[arg-type] # what is refused
    with pytest.raises(ValueError, match="retries must be at least 0"):
        launch(print, [0], retries=-1)
    assert not hasattr(daskps, "bigdl")
    assert bigdl.__all__ == ["AllReduceParameter", "FutureResult", "launch"]
