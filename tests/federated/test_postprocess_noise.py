"""Noise of the promised size, and an accountant that says what opacus says."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from opacus.accountants import PRVAccountant, RDPAccountant  # type: ignore[import-untyped]

from dovetail.errors import ConfigError, UnknownNameError
from dovetail.federated.messages import Task, Update, WeightedSum
from dovetail.federated.postprocess import Chain, Gathering, GaussianNoise, PrivacyAccountant, find_noise_multiplier

SIZE = 20_000
WEIGHTS = {"w": torch.zeros(SIZE), "steps": torch.tensor(0)}


def task(client_id: int = 1, seed: int = 0) -> Task:
    return Task(1, client_id, WEIGHTS, seed=seed)


def gathering(cohort: list[int], num_clients: int = 0, seed: int = 0) -> Gathering:
    return Gathering(1, cohort, WEIGHTS, num_clients=num_clients, seed=seed)


def update(client_id: int = 1, value: float = 0.0, num_samples: int = 10) -> Update:
    return Update(client_id, 1, num_samples, delta={"w": torch.full((SIZE,), value), "steps": torch.tensor(9)})


def aggregated(noise: GaussianNoise, updates: list[Update], seed: int = 0) -> dict[str, torch.Tensor]:
    chain = Chain([noise])
    sent = [chain.encode(each, task(each.client_id), {}) for each in updates]
    where = gathering([each.client_id for each in updates], seed=seed)
    decoded, _ = chain.decode(sent, where)
    return dict(chain.aggregated(WeightedSum.of(decoded).mean(), decoded, where))


def deviation(value: torch.Tensor) -> Any:
    # 20,000 draws: the deviation's own is 0.5 %.
    return pytest.approx(float(value.std()), rel=0.03)


def test_central_noise_matches_the_sensitivity_of_the_mean() -> None:
    mean = aggregated(GaussianNoise(noise_multiplier=1.5, max_norm=2.0), [update(k) for k in (1, 2, 3, 4)])
    assert deviation(mean["w"]) == 1.5 * 2.0 / 4
    assert float(mean["w"].mean()) == pytest.approx(0.0, abs=0.02)


def test_heavier_clients_require_more_noise() -> None:
    mean = aggregated(GaussianNoise(1.0, 1.0, max_weight=5), [update(1, num_samples=20), update(2, num_samples=3)])
    assert deviation(mean["w"]) == 5 / (5 + 3)


def test_local_noise_is_added_by_every_client() -> None:
    chain = Chain([GaussianNoise(noise_multiplier=1.5, max_norm=2.0, where="local")])
    sent = chain.encode(update(), task(), {})
    assert deviation(sent.delta["w"]) == 3.0
    assert chain.aggregated(WEIGHTS, [sent], gathering([1])) is WEIGHTS


def test_with_zero_noise_only_clipping_remains() -> None:
    mean = aggregated(GaussianNoise(0.0, max_norm=1.0), [update(1, value=1.0), update(2, value=0.0)])
    assert float(mean["w"].double().norm()) == pytest.approx(0.5)


def test_the_server_clips_updates_that_a_client_did_not_clip() -> None:
    noise = GaussianNoise(0.0, max_norm=1.0)
    decoded = noise.decode(update(value=3.0, num_samples=10**6), gathering([1]))
    assert float(decoded.delta["w"].double().norm()) == pytest.approx(1.0)
    assert decoded.num_samples == 1


@pytest.mark.parametrize("where", ["central", "local"])
def test_neither_integers_nor_the_norm_are_sent_with_noise(where: Any) -> None:
    sent = Chain([GaussianNoise(where=where)]).encode(update(), task(), {})
    assert sent.delta["steps"].item() == 0
    assert "update_norm" not in sent.metrics


def test_noise_comes_from_the_seed() -> None:
    noise = GaussianNoise()
    first, again, other = (aggregated(noise, [update()], seed)["w"] for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_system_noise_differs_every_time() -> None:
    noise = GaussianNoise(repeatable=False)
    assert not torch.equal(aggregated(noise, [update()], 1)["w"], aggregated(noise, [update()], 1)["w"])


def test_values_that_noise_does_not_cover_are_rejected() -> None:
    sent = Update(1, 1, 10, delta={}, payload={"control": torch.zeros(1)})
    with pytest.raises(ConfigError, match="hides the model's weights only, but the algorithm sends control too"):
        Chain(["gaussian_noise"]).encode(sent, task(), {})


def test_an_update_without_samples_does_not_change_the_mean() -> None:
    mean = {"w": torch.zeros(3)}
    assert GaussianNoise().aggregated(mean, [Update(1, 1, 0)], gathering([1])) is mean


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"noise_multiplier": -1.0}, "noise_multiplier: expected a number that is not negative, got -1.0"),
        ({"max_norm": 0.0}, "max_norm: expected a number above 0, got 0.0"),
        ({"max_weight": 0}, "max_weight: expected a number above 0, got 0"),
        ({"where": "centre"}, "unknown place of the noise 'centre': did you mean 'central'?"),
        ({"accountant": "rpd"}, "unknown accountant 'rpd': did you mean 'rdp'?"),
    ],
)
def test_invalid_noise_arguments_are_rejected(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        GaussianNoise(**arguments)
    assert str(caught.value).startswith(message)


# ------------------------------------------------------------------ accounting


@pytest.mark.parametrize(("mechanism", "theirs"), [("rdp", RDPAccountant), ("prv", PRVAccountant)])
@pytest.mark.filterwarnings("ignore:Optimal order is the:UserWarning")
def test_epsilon_equals_the_value_of_opacus(mechanism: Any, theirs: Any) -> None:
    ours, accountant = PrivacyAccountant(mechanism), theirs()
    for _ in range(30):
        ours.step(noise_multiplier=1.1, sample_rate=0.05)
        accountant.step(noise_multiplier=1.1, sample_rate=0.05)
    assert ours.epsilon(1e-5) == accountant.get_epsilon(delta=1e-5)


def test_one_gaussian_mechanism_has_its_known_epsilon() -> None:
    # Rényi divergence α / (2 σ²) of one release, converted as in Canonne, Kamath and Steinke (2020).
    sigma, delta = 4.0, 1e-5
    orders = [1 + x / 10.0 for x in range(1, 100)] + list(range(12, 64))
    known = min(a / (2 * sigma**2) - (math.log(delta) + math.log(a)) / (a - 1) + math.log((a - 1) / a) for a in orders)
    accountant = PrivacyAccountant()
    accountant.step(sigma, sample_rate=1.0)
    assert accountant.epsilon(delta) == pytest.approx(known)


def test_rounds_are_accounted_with_the_share_of_selected_clients() -> None:
    noise, by_hand = GaussianNoise(noise_multiplier=1.2), PrivacyAccountant()
    for _ in range(5):
        noise.aggregated({}, [], gathering([3, 5], num_clients=100))
    by_hand.step(1.2, sample_rate=0.02, num_rounds=5)
    assert noise.epsilon(1e-5) == by_hand.epsilon(1e-5) > 0


def test_local_noise_is_accounted_for_the_most_selected_client() -> None:
    noise, by_hand = GaussianNoise(noise_multiplier=4.0, where="local"), PrivacyAccountant()
    for cohort in ([1, 2], [2, 3], [2, 4]):
        noise.aggregated({}, [], gathering(cohort, num_clients=100))
    # Three releases, none of them hidden among others, of updates that can differ by twice the norm.
    by_hand.step(2.0, sample_rate=1.0, num_rounds=3)
    assert noise.epsilon(1e-5) == by_hand.epsilon(1e-5)


@pytest.mark.parametrize("where", ["central", "local"])
def test_no_epsilon_is_spent_before_the_first_round(where: Any) -> None:
    assert GaussianNoise(where=where).epsilon(1e-5) == 0.0


@pytest.mark.parametrize("where", ["central", "local"])
def test_rounds_without_noise_spend_infinite_epsilon(where: Any) -> None:
    noise = GaussianNoise(0.0, where=where)
    noise.aggregated({}, [], gathering([1]))
    assert noise.epsilon(1e-5) == math.inf


@pytest.mark.parametrize("where", ["central", "local"])
def test_a_resumed_server_continues_its_accounting(where: Any) -> None:
    straight, first, second = (GaussianNoise(where=where) for _ in range(3))
    for _ in range(4):
        straight.aggregated({}, [], gathering([1], num_clients=10))
    for _ in range(2):
        first.aggregated({}, [], gathering([1], num_clients=10))
    second.load_state_dict(first.state_dict())
    for _ in range(2):
        second.aggregated({}, [], gathering([1], num_clients=10))
    assert second.state_dict() == straight.state_dict()
    assert second.epsilon(1e-5) == straight.epsilon(1e-5)


def test_the_noise_computed_for_an_epsilon_spends_it() -> None:
    accountant = PrivacyAccountant()
    accountant.step(find_noise_multiplier(3.0, 1e-5, sample_rate=0.1, num_rounds=50), 0.1, 50)
    assert 2.9 < accountant.epsilon(1e-5) <= 3.0


def test_unknown_accountants_are_rejected() -> None:
    with pytest.raises(UnknownNameError, match="unknown accountant 'rdb': did you mean 'rdp'"):
        find_noise_multiplier(3.0, 1e-5, 0.1, 50, mechanism="rdb")  # type: ignore[arg-type] # the mistake that is meant
