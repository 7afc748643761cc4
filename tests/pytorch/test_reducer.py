from __future__ import annotations

import math
import re
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dovetail.errors import ConfigError, DataError, UnknownNameError
from dovetail.pytorch.reducer import FunctionReducer, MetricReducer, Reducer, Reducers, reduce_validation

Batches = list[tuple[dict[str, Any], int]]


def alone(own: Any) -> list[Any]:
    return [own]


def no_slot(own: Any) -> list[Any]:
    raise AssertionError("nothing to exchange")


def reduced(slots: list[Batches], how: Any = Reducer.AVG) -> list[dict[str, float]]:
    """Return what every slot gets, where `slots` are the batches of each and each is a thread."""
    messages: list[Any] = [None] * len(slots)
    all_reported = Barrier(len(slots), timeout=120)

    def slot(rank: int) -> dict[str, float]:
        def exchange(own: Any) -> list[Any]:
            messages[rank] = own
            all_reported.wait()
            return messages

        batches = slots[rank]
        return reduce_validation([metrics for metrics, _ in batches], [size for _, size in batches], how, exchange)

    with ThreadPoolExecutor(len(slots)) as pool:
        return list(pool.map(slot, range(len(slots))))


# Rules


def test_an_average_is_weighted_by_samples() -> None:
    batches = [({"loss": 1.0}, 4), ({"loss": 2.0}, 4), ({"loss": 9.0}, 1)]
    assert reduced([batches]) == [{"loss": 21.0 / 9.0}]


@pytest.mark.parametrize(
    ("how", "value"), [(Reducer.AVG, -0.5), (Reducer.SUM, 6.0), (Reducer.MAX, 9.0), (Reducer.MIN, -3.0)]
)
def test_each_reduction_rule_computes_its_known_answer(how: Reducer, value: float) -> None:
    first, second = [({"x": 0.0}, 1), ({"x": 9.0}, 1)], [({"x": -3.0}, 4)]
    assert reduced([first, second], how) == [{"x": value}] * 2


def test_a_metric_may_have_a_separate_rule_and_is_averaged_by_default() -> None:
    batches = [({"loss": 1.0, "worst": 1.0, "seen": 2}, 2), ({"loss": 4.0, "worst": 7.0, "seen": 1}, 1)]
    rules = {"worst": Reducer.MAX, "seen": Reducer.SUM}
    assert reduced([batches], rules) == [{"loss": 2.0, "worst": 7.0, "seen": 3.0}]


def test_a_slot_without_batches_contributes_nothing() -> None:
    batches: Batches = [({"loss": 1.0}, 2), ({"loss": 4.0}, 1)]
    assert reduced([[], batches, []]) == [{"loss": 2.0}] * 3


def test_a_batch_without_samples_has_weight_zero() -> None:
    batches: Batches = [({"loss": 5.0}, 0), ({"loss": 2.0}, 2), ({"loss": math.nan}, 0)]
    assert reduced([batches], Reducer.SUM) == reduced([batches]) == [{"loss": 2.0}]


@given(
    st.lists(
        st.tuples(st.floats(-1e6, 1e6, width=32), st.integers(0, 100)).map(lambda pair: ({"x": pair[0]}, pair[1])),
        min_size=1,
    ).filter(lambda batches: any(size for _, size in batches)),
    st.integers(1, 5),
    st.sampled_from(Reducer),
)
def test_any_number_of_slots_gives_the_result_of_one(batches: Batches, num_slots: int, how: Reducer) -> None:
    (one,) = reduced([batches], how)
    many = reduced([batches[rank::num_slots] for rank in range(num_slots)], how)
    scale = max(abs(metrics["x"]) for metrics, _ in batches)
    assert many == [many[0]] * num_slots
    assert many[0]["x"] == pytest.approx(one["x"], rel=1e-12, abs=1e-12 * (1 + scale))


def test_sums_are_computed_in_double_precision() -> None:
    batches: Batches = [({"x": torch.tensor(16_777_216.0)}, 1), ({"x": torch.tensor(1.0)}, 1)]
    assert reduced([batches], Reducer.SUM) == [{"x": 16_777_217.0}]


@pytest.mark.parametrize("how", list(Reducer))
@pytest.mark.parametrize("values", [[math.nan, 1.0], [1.0, math.nan]])
def test_nan_is_not_hidden_by_a_reduction(how: Reducer, values: list[float]) -> None:
    (metrics,) = reduced([[({"x": value}, 1) for value in values]], how)
    assert math.isnan(metrics["x"])


@pytest.mark.parametrize(
    "value",
    [2, 2.0, torch.tensor(2), torch.tensor([2.0], requires_grad=True), np.float32(2), np.array(2), np.array([[2.0]])],
)
def test_a_value_may_be_any_kind_of_scalar(value: Any) -> None:
    assert reduced([[({"x": value}, 1)]]) == [{"x": 2.0}]


def test_batches_without_metrics_give_no_metrics() -> None:
    assert reduced([[({}, 3)]]) == [{}]


# Mistakes


@pytest.mark.parametrize(
    ("batches", "sentence"),
    [
        ([], "validation: expected at least one batch with samples, got none"),
        ([({"x": 1.0}, 0)], "validation: expected at least one batch with samples, got none"),
        (
            [({"x": 1.0}, 1), ({"x": 1.0, "y": 2.0}, 1)],
            "evaluate_batch: batch 1 has the metric 'y', batch 0 has not",
        ),
        ([({"x": 1.0}, 1)] * 2 + [({}, 1)], "evaluate_batch: batch 0 has the metric 'x', batch 2 has not"),
        ([(1.0, 1)], "evaluate_batch: batch 0: expected a dict of metrics, got float 1.0"),
        (
            [({"x": torch.zeros(2, 3)}, 1)],
            "evaluate_batch: the metric 'x' of batch 0: expected a number, got a tensor of shape (2, 3)",
        ),
        (
            [({"x": np.zeros(2)}, 1)],
            "evaluate_batch: the metric 'x' of batch 0: expected a number, got an array of shape (2,)",
        ),
        ([({"x": "high"}, 1)], "evaluate_batch: the metric 'x' of batch 0: expected a number, got str 'high'"),
        ([({"x": None}, 1)], "evaluate_batch: the metric 'x' of batch 0: expected a number, got NoneType None"),
    ],
)
def test_metrics_that_do_not_fit_are_named_in_the_error(batches: Any, sentence: str) -> None:
    with pytest.raises(DataError, match=f"^{re.escape(sentence)}$"):
        reduce_validation([metrics for metrics, _ in batches], [size for _, size in batches], Reducer.AVG, alone)


def test_a_metric_missing_in_some_slots_is_named() -> None:
    with pytest.raises(DataError, match="the metric 'y' is there in some processes only"):
        reduced([[({"x": 1.0}, 1)], [({"x": 1.0, "y": 1.0}, 1)]])


def test_a_rule_for_an_unknown_metric_suggests_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match=r"metric of evaluation_reducer 'los': did you mean 'loss'\?"):
        reduce_validation([{"loss": 1.0}], [1], {"los": Reducer.SUM}, alone)


@pytest.mark.parametrize("how", ["avg", {"x": "avg"}, None])
def test_an_unknown_reduction_rule_is_rejected(how: Any) -> None:
    with pytest.raises(ConfigError, match=r"expected AVG, SUM, MAX or MIN of pytorch\.Reducer, got "):
        reduce_validation([{"x": 1.0}], [1], how, no_slot)


# Reducers of the user's own


class Mean(MetricReducer):
    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.total, self.count = 0.0, 0

    def update(self, value: float) -> None:
        self.total, self.count = self.total + value, self.count + 1

    def per_slot_reduce(self) -> Any:
        return self.total, self.count

    def cross_slot_reduce(self, per_slot_metrics: list[Any]) -> Any:
        totals, counts = zip(*per_slot_metrics, strict=True)
        return sum(totals) / sum(counts)


class Extremes(Mean):
    def cross_slot_reduce(self, per_slot_metrics: list[Any]) -> Any:
        totals = [total for total, _ in per_slot_metrics]
        return {"lowest": min(totals), "highest": max(totals)}


def test_a_reducer_is_returned_unchanged_and_sees_every_slot() -> None:
    reducers, mean = Reducers(), Mean()
    assert reducers.wrap(mean, name="mean") is mean
    mean.update(3.0)
    assert reducers.reduce("train", lambda own: [own, [(9.0, 2)]]) == {"mean": 4.0}


def test_a_reducer_function_gets_the_values_of_all_slots_in_batch_order() -> None:
    reducers = Reducers()
    collected = reducers.wrap(list, name="values")
    assert isinstance(collected, FunctionReducer)
    for batch in (0, 3, 6):
        collected.update(batch)
    assert reducers.reduce("valid", lambda own: [own, [[1, 4]], [[2, 5]]]) == {"values": [0, 1, 2, 3, 4, 5, 6]}


def test_a_reducer_function_gets_detached_tensors() -> None:
    collected = FunctionReducer(list)
    collected.update({"loss": torch.ones(1, requires_grad=True) * 2})
    ((value,),) = [collected.per_slot_reduce()]
    assert value["loss"].grad_fn is None
    assert value["loss"].tolist() == [2.0]


def test_reset_clears_a_reducer() -> None:
    reducers = Reducers()
    collected, mean = reducers.wrap(len, name="number"), reducers.wrap(Mean(), name="mean", for_validation=False)
    assert isinstance(collected, FunctionReducer)
    assert isinstance(mean, Mean)
    collected.update(1)
    mean.update(5.0)
    reducers.reset("valid")
    assert reducers.reduce("valid", alone) == {"number": 0}
    assert reducers.reduce("train", alone) == {"number": 0, "mean": 5.0}


def test_a_reducer_without_a_name_gives_several_metrics() -> None:
    reducers = Reducers()
    reducers.wrap(Extremes())
    assert reducers.reduce("valid", lambda own: [own, [(7.0, 1)]]) == {"lowest": 0.0, "highest": 7.0}


def test_all_reducers_share_one_exchange_and_none_needs_none() -> None:
    reducers = Reducers()
    assert reducers.reduce("train", no_slot) == {}
    reducers.wrap(sum, name="sum")
    reducers.wrap(len, name="len")
    messages: list[Any] = []

    def exchange(own: Any) -> list[Any]:
        messages.append(own)
        return [own]

    assert reducers.reduce("train", exchange) == {"sum": 0, "len": 0}
    assert messages == [[[], []]]


@pytest.mark.parametrize(("for_training", "for_validation"), [(True, False), (False, True)])
def test_a_reducer_is_used_only_in_its_stages(for_training: bool, for_validation: bool) -> None:
    reducers = Reducers()
    reducers.wrap(len, name="len", for_training=for_training, for_validation=for_validation)
    assert bool(reducers.reduce("train", alone)) is for_training
    assert bool(reducers.reduce("valid", alone)) is bool(reducers.reduce("test", alone)) is for_validation


def test_a_reducer_name_may_be_reused_in_the_other_stage() -> None:
    reducers = Reducers()
    reducers.wrap(len, name="x", for_validation=False)
    reducers.wrap(sum, name="x", for_training=False)
    with pytest.raises(ConfigError, match="expected a different name for each reducer, got 'x' twice"):
        reducers.wrap(max, name="x")


def test_two_reducers_with_the_same_metric_are_rejected() -> None:
    reducers = Reducers()
    reducers.wrap(len, name="lowest")
    reducers.wrap(Extremes())
    with pytest.raises(ConfigError, match="expected a different name for each metric, got 'lowest' from two reducers"):
        reducers.reduce("valid", alone)


def test_a_reducer_without_a_name_must_return_a_dict() -> None:
    reducers = Reducers()
    reducers.wrap(len)
    with pytest.raises(ConfigError, match=r"the reducer FunctionReducer has no name: expected a dict .*, got 0$"):
        reducers.reduce("valid", alone)


@pytest.mark.parametrize("reducer", [Mean, 3, "mean"])
def test_only_a_reducer_or_a_function_can_be_wrapped(reducer: Any) -> None:
    with pytest.raises(ConfigError, match="wrap_reducer: expected a MetricReducer or a function of a list, got "):
        Reducers().wrap(reducer)


def test_an_error_of_a_reducer_keeps_its_type_and_names_the_reducer() -> None:
    reducers = Reducers()
    reducers.wrap(Mean(), name="mean")
    with pytest.raises(ZeroDivisionError) as caught:
        reducers.reduce("valid", alone)
    assert caught.value.__notes__ == ["in cross_slot_reduce of the reducer Mean of 'mean'"]
