"""Masks that cancel bit for bit when any clients are missing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.errors import ConfigError, DataError
from dovetail.federated.messages import Task, Update, WeightedSum
from dovetail.federated.postprocess import Chain, Gathering, GaussianNoise, PairwiseMasks, Upload, Weighting

WEIGHTS = {"w": torch.zeros(4, 3), "b": torch.zeros((), dtype=torch.float64), "steps": torch.tensor(0)}


def update(client_id: int, num_samples: int = 1) -> Update:
    generator = torch.Generator().manual_seed(client_id)
    delta = {
        "b": torch.randn((), generator=generator, dtype=torch.float64),
        "w": torch.randn(4, 3, generator=generator),
        "steps": torch.tensor(client_id),
    }
    return Update(client_id, 1, num_samples, num_updates=3, delta=delta, metrics={"loss": float(client_id)})


def masked(masks: PairwiseMasks, cohort: list[int], each: Update, current_round: int = 1) -> Update:
    task = Task(current_round, each.client_id, WEIGHTS, config={"cohort": cohort})
    return masks.encode(each, Upload(task, seed=each.client_id, state={}))


def fixed_point(updates: list[Update], bits: int) -> torch.Tensor:
    """The sum without masks, in whole numbers."""
    flat = [torch.cat([u.delta[name].flatten().double() for name in sorted(WEIGHTS)]) * u.num_samples for u in updates]
    return torch.stack([torch.round(each * 2.0 ** (bits // 2)).long() for each in flat]).sum(dim=0)


COHORTS = st.lists(st.integers(1, 10**6), min_size=1, max_size=6, unique=True)


@given(cohort=COHORTS, data=st.data(), bits=st.sampled_from([32, 64]))
@settings(deadline=None, max_examples=40)
def test_the_sum_of_surviving_clients_is_exact(cohort: list[int], data: st.DataObject, bits: Any) -> None:
    there = data.draw(st.lists(st.sampled_from(cohort), min_size=1, unique=True))
    masks = PairwiseMasks(seed=3, bits=bits, fraction_bits=bits // 2)
    weights = {name: value.double() for name, value in WEIGHTS.items()}
    plain = [Update(k, 1, 1 + k % 9, delta={n: v.double() for n, v in update(k % 100).delta.items()}) for k in there]
    sent = [masked(masks, cohort, each) for each in plain]
    (mean,) = masks.combine(sent, Gathering(1, cohort, weights))
    total = sum(each.num_samples for each in plain)
    flat = torch.cat([mean.delta[name].flatten() for name in sorted(WEIGHTS)])
    assert mean.num_samples == total
    # The division is the only rounding.
    assert torch.equal(flat, fixed_point(plain, bits).double() / (2.0 ** (bits // 2) * total))


def test_the_masked_mean_equals_the_plain_mean() -> None:
    chain, cohort = Chain([PairwiseMasks()]), [4, 2, 9]
    plain = [update(k, num_samples=10 * k) for k in cohort]
    sent = [chain.encode(each, Task(1, each.client_id, WEIGHTS, config={"cohort": cohort}), {}) for each in plain]
    (mean,), faults = chain.decode(sent, Gathering(1, cohort, WEIGHTS))
    expected = WeightedSum.of(plain).mean()
    assert not faults
    assert (mean.client_id, mean.round, mean.num_samples) == (0, 1, 150)
    assert mean.metrics["loss"] == pytest.approx((4 * 40 + 2 * 20 + 9 * 90) / 150)
    result = WeightedSum.of([mean]).mean()
    for name, value in expected.items():
        torch.testing.assert_close(result[name], value, rtol=0, atol=1e-6)
        assert result[name].dtype == value.dtype


def test_one_masked_update_looks_random() -> None:
    sent = masked(PairwiseMasks(), [1, 2], update(1)).delta["masked"]
    assert list(sent.shape) == [14]
    # Sixty-four random bits; a number of the update would be below 2**40.
    assert (sent.abs().double() > 2.0**40).all()


def test_masks_differ_between_rounds() -> None:
    first, second = (
        masked(PairwiseMasks(), [1, 2], Update(1, n, 1, delta=update(1).delta), n).delta["masked"] for n in (1, 2)
    )
    assert not (first == second).any()


def test_a_single_client_needs_no_mask() -> None:
    sent = masked(PairwiseMasks(), [7], update(7))
    assert torch.equal(sent.delta["masked"], fixed_point([update(7)], 64))


def test_thirty_two_bits_take_half_the_bytes() -> None:
    sent = [masked(PairwiseMasks(bits=bits), [1, 2], update(1)).num_bytes for bits in (32, 64)]
    assert sent == [14 * 4, 14 * 8]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 1e9])
def test_numbers_out_of_range_are_rejected_before_they_wrap_around(bad: float) -> None:
    delta = {**update(1).delta, "b": torch.tensor(bad, dtype=torch.float64)}
    with pytest.raises(DataError, match=r"client 1: its update times 2 samples is not finite or beyond the ±1\.07374e"):
        masked(PairwiseMasks(), [1, 2], Update(1, 1, 2, delta=delta))


def test_a_client_with_an_invalid_masked_update_counts_as_dropped() -> None:
    chain, cohort = Chain([PairwiseMasks(), "zstd"]), [1, 2, 3]
    sent = [chain.encode(update(k), Task(1, k, WEIGHTS, config={"cohort": cohort}), {}) for k in cohort]
    sent[1] = sent[1].with_delta({"zstd": torch.zeros(3, dtype=torch.uint8)})
    (mean,), (fault,) = chain.decode(sent, Gathering(1, cohort, WEIGHTS))
    assert (fault.client_id, fault.kind) == (2, "wrong shape")
    expected = WeightedSum.of([update(1), update(3)]).mean()
    torch.testing.assert_close(mean.delta["w"], expected["w"], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "bad",
    [
        Update(2, 1, 1, delta={"masked": torch.zeros(13, dtype=torch.int64)}),
        Update(2, 1, 1, delta={"masked": torch.zeros(14, dtype=torch.int32)}),
        Update(2, 1, 1, delta={"masked": torch.zeros(14, dtype=torch.int64), "more": torch.zeros(1)}),
        Update(2, 2, 1, delta={"masked": torch.zeros(14, dtype=torch.int64)}),
        Update(9, 1, 1, delta={"masked": torch.zeros(14, dtype=torch.int64)}),
        update(2),
    ],
)
def test_updates_that_cannot_be_summed_are_a_fault(bad: Update) -> None:
    updates, faults = Chain([PairwiseMasks()]).decode([bad], Gathering(1, [1, 2], WEIGHTS))
    assert updates == []
    assert [fault.client_id for fault in faults] == [bad.client_id]


def test_no_updates_give_no_sum() -> None:
    assert Chain([PairwiseMasks()]).decode([], Gathering(1, [1, 2], WEIGHTS)) == ([], [])


def test_weights_and_central_noise_work_with_masks() -> None:
    chain, cohort = Chain([Weighting("uniform"), GaussianNoise(0.0, max_norm=1e6), PairwiseMasks()]), [1, 2]
    sent = [
        chain.encode(update(k, num_samples=100 * k), Task(1, k, WEIGHTS, config={"cohort": cohort}), {}) for k in cohort
    ]
    (mean,), _ = chain.decode(sent, Gathering(1, cohort, WEIGHTS))
    assert mean.num_samples == 2
    plain = (update(1).delta["w"] + update(2).delta["w"]) / 2
    torch.testing.assert_close(mean.delta["w"], plain, rtol=0, atol=1e-6)


def test_masking_declares_that_it_needs_the_cohort() -> None:
    assert Chain([PairwiseMasks()]).needs_cohort
    assert not Chain(["qsgd"]).needs_cohort
    with pytest.raises(ConfigError, match=r"client 1 is not among the round's clients \(\)"):
        Chain([PairwiseMasks()]).encode(update(1), Task(1, 1, WEIGHTS), {})


def test_payloads_that_masks_do_not_hide_are_rejected() -> None:
    sent = Update(1, 1, 1, delta=update(1).delta, payload={"control": torch.zeros(1)})
    with pytest.raises(ConfigError, match="masks hide weights only, but the algorithm sends control too"):
        masked(PairwiseMasks(), [1, 2], sent)


def test_tensors_missing_from_the_message_are_rejected() -> None:
    with pytest.raises(DataError, match="need an update with the tensors that were sent"):
        masked(PairwiseMasks(), [1, 2], Update(1, 1, 1, delta={"w": torch.zeros(4, 3)}))


@pytest.mark.parametrize("arguments", [{"bits": 16}, {"fraction_bits": 64}, {"fraction_bits": -1}])
def test_an_invalid_number_of_bits_is_rejected(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="bits: expected"):
        PairwiseMasks(**arguments)
