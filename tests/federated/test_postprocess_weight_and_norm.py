"""How much updates count, and how long they are."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.errors import ConfigError, UnknownNameError
from dovetail.federated.messages import Task, Update, WeightedSum
from dovetail.federated.postprocess import Chain, Gathering, NormClip, Postprocessor, Upload, Weighting

UPLOAD = Upload(Task(1, 1, {}), seed=0, state={})
GATHERING = Gathering(1, [1], {})


def weight(rule: Weighting, **fields: int) -> int:
    return rule.encode(Update(1, 1, **{"num_samples": 600, **fields}), UPLOAD).num_samples


def test_updates_are_weighted_by_samples_uniformly_or_by_a_function() -> None:
    assert weight(Weighting()) == 600
    assert weight(Weighting("uniform")) == 1
    assert weight(Weighting(lambda update: update.num_updates * 2), num_updates=21) == 42


def test_a_client_without_samples_has_weight_zero() -> None:
    assert weight(Weighting("uniform"), num_samples=0) == 0
    assert weight(Weighting(cap=5), num_samples=0) == 0


def test_a_weight_cap_limits_larger_weights() -> None:
    assert weight(Weighting(cap=100)) == 100
    assert weight(Weighting(cap=1000)) == 600
    assert weight(Weighting(lambda update: 7, cap=5)) == 5


def test_uniform_weights_give_the_plain_mean() -> None:
    chain = Chain([Weighting("uniform")])
    updates = [Update(k, 1, 10**k, delta={"w": torch.tensor([float(k)])}) for k in (1, 2, 3)]
    sent = [chain.encode(update, Task(1, update.client_id, {}), {}) for update in updates]
    assert WeightedSum.of(sent).mean()["w"].tolist() == [2.0]


def test_a_client_that_claims_too_large_a_weight_is_capped() -> None:
    claimed = Update(1, 1, num_samples=10**9)
    assert Weighting("uniform").decode(claimed, GATHERING).num_samples == 1
    assert Weighting(cap=50).decode(claimed, GATHERING).num_samples == 50


def test_the_summed_weight_of_many_clients_is_not_capped() -> None:
    together = Update(0, 1, num_samples=500)
    assert Weighting("uniform").decode(together, GATHERING) is together


def test_unknown_rules_and_caps_are_rejected() -> None:
    with pytest.raises(UnknownNameError, match="unknown weighting 'unifrom': did you mean 'uniform'"):
        Weighting("unifrom")  # type: ignore[arg-type] # the mistake that is meant
    with pytest.raises(ConfigError, match="cap: expected a whole number of at least 1, got 0"):
        Weighting(cap=0)


def clipped(step: Postprocessor, **delta: torch.Tensor) -> Update:
    return step.encode(Update(1, 1, 1, delta=delta, metrics={"loss": 0.5}), UPLOAD)


@given(seed=st.integers(0, 2**31), max_norm=st.floats(1e-3, 1e3))
@settings(deadline=None)
def test_a_clipped_update_has_the_maximum_norm_and_the_same_direction(seed: int, max_norm: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    w, b = torch.randn(20, generator=generator).double(), torch.randn(3, generator=generator).double()
    before, after = torch.cat([w, b]), torch.cat(list(clipped(NormClip(max_norm), w=w, b=b).delta.values()))
    assert float(after.norm()) == pytest.approx(min(max_norm, float(before.norm())))
    assert float(torch.cosine_similarity(before, after, dim=0)) == pytest.approx(1.0)


def test_updates_below_the_norm_are_unchanged() -> None:
    w = torch.randn(10)
    assert torch.equal(clipped(NormClip(100.0), w=w).delta["w"], w)


def test_the_norm_before_clipping_is_recorded() -> None:
    metrics = clipped(NormClip(1.0), w=torch.tensor([3.0]), b=torch.tensor([4.0])).metrics
    assert metrics == {"loss": 0.5, "update_norm": 5.0}


def test_tensors_can_be_clipped_separately() -> None:
    update = clipped(NormClip(5.0, per="tensor"), w=torch.tensor([30.0, 40.0]), b=torch.tensor([1.0]))
    assert update.delta["w"].tolist() == [3.0, 4.0]
    assert update.delta["b"].tolist() == [1.0]
    assert update.metrics["update_norm"] == pytest.approx(2501**0.5)


def test_integers_neither_count_for_the_norm_nor_change() -> None:
    update = clipped(NormClip(1.0), w=torch.tensor([0.5]), steps=torch.tensor(1000))
    assert update.delta["w"].item() == 0.5
    assert update.delta["steps"].item() == 1000
    assert update.delta["steps"].dtype == torch.int64


def test_clipping_keeps_the_dtype() -> None:
    assert clipped(NormClip(1.0), w=torch.full((4,), 9.0, dtype=torch.bfloat16)).delta["w"].dtype == torch.bfloat16


@pytest.mark.parametrize("max_norm", [0.0, -1.0, float("nan")])
def test_invalid_norms_are_rejected(max_norm: float) -> None:
    with pytest.raises(ConfigError, match="max_norm: expected a number above 0, got"):
        NormClip(max_norm)
