"""Selection of the clients of a round."""

from __future__ import annotations

from collections import Counter

import pytest

from dovetail.checkpoint.encoding import encode
from dovetail.errors import ConfigError, UnknownNameError
from dovetail.federated.messages import Update
from dovetail.federated.selection import AFLSelection, OortSelection, RandomSelection, RoundRobinSelection, selections

EVERYONE = range(1, 21)


def _reports(losses: dict[int, float], samples: int = 100) -> list[Update]:
    return [Update(client_id, 1, samples, metrics={"loss": loss}) for client_id, loss in losses.items()]


@pytest.mark.parametrize("name", selections.names())
def test_selected_clients_are_distinct_and_not_busy(name: str) -> None:
    selection = selections.get(name)(3)
    for round in range(1, 30):
        busy = {1 + round % 20, 1 + (round + 1) % 20}
        chosen = selection.select(round, EVERYONE, 5, busy)
        assert len(set(chosen)) == 5
        assert not busy & set(chosen)
        assert set(chosen) <= set(EVERYONE)
        selection.observe(round, _reports({client_id: client_id / 10 for client_id in chosen}), {})


@pytest.mark.parametrize("name", selections.names())
def test_no_more_clients_are_selected_than_exist(name: str) -> None:
    selection = selections.get(name)(3)
    assert sorted(selection.select(1, range(1, 4), 5, {2})) == [1, 3]


@pytest.mark.parametrize("name", selections.names())
def test_a_selection_continues_from_its_state(name: str) -> None:
    kind = selections.get(name)
    straight, first = kind(3), kind(3)
    for selection in (straight, first):
        for round in range(1, 6):
            chosen = selection.select(round, EVERYONE, 5)
            seconds = {client_id: float(client_id) for client_id in chosen}
            selection.observe(round, _reports({it: 1 / it for it in chosen}), seconds)
    second = kind(3)
    state = first.state_dict()
    encode(state)
    second.load_state_dict(state)
    assert [second.select(round, EVERYONE, 5) for round in (6, 7)] == [
        straight.select(round, EVERYONE, 5) for round in (6, 7)
    ]


@pytest.mark.parametrize("name", selections.names())
def test_selecting_from_a_million_clients_is_cheap(name: str) -> None:
    selection = selections.get(name)(3)
    for round in range(1, 50):
        chosen = selection.select(round, range(1, 1_000_001), 100)
        assert len(set(chosen)) == 100
        selection.observe(round, _reports(dict.fromkeys(chosen, 1.0)), {})


def test_every_client_has_the_same_probability_by_default() -> None:
    selection = RandomSelection(1)
    times = Counter(client_id for round in range(1, 2001) for client_id in selection.select(round, EVERYONE, 5))
    assert set(times) == set(EVERYONE)
    assert max(times.values()) < 1.2 * min(times.values())


def test_a_selection_does_not_depend_on_earlier_draws() -> None:
    once, again = RandomSelection(1), RandomSelection(1)
    once.select(1, EVERYONE, 5)
    assert once.select(2, EVERYONE, 5) == again.select(2, EVERYONE, 5)
    assert RandomSelection(2).select(2, EVERYONE, 5) != again.select(2, EVERYONE, 5)


def test_round_robin_selects_clients_in_order() -> None:
    selection = RoundRobinSelection()
    assert selection.select(1, EVERYONE, 3) == [1, 2, 3]
    assert selection.select(2, EVERYONE, 3, busy={5}) == [4, 6, 7]
    assert selection.select(3, range(1, 9), 3) == [8, 1, 2]


def test_afl_selects_the_clients_with_the_highest_value() -> None:
    selection = AFLSelection(1, alpha1=0.75, alpha2=1.0, alpha3=0.0)
    selection.observe(1, _reports({client_id: client_id / 10 for client_id in EVERYONE}), {})
    times = Counter(client_id for round in range(2, 402) for client_id in selection.select(round, EVERYONE, 1))
    # Three quarters have no chance beside 0.01 in e^(10 * 2).
    assert set(times) <= {16, 17, 18, 19, 20}
    assert times[20] > times[18] > times[16]


def test_afl_values_a_client_by_its_losses_over_the_root_of_its_samples() -> None:
    selection = AFLSelection()
    selection.observe(1, [Update(1, 1, 100, metrics={"loss": 2.0})], {})
    assert selection.state_dict()["worth"].tolist() == [2.0 * 100 / 10]


def test_afl_draws_a_share_uniformly() -> None:
    selection = AFLSelection(1, alpha1=0.0, alpha2=1.0, alpha3=0.5)
    selection.observe(1, _reports({1: 9.0, 2: 9.0, 3: 9.0, 4: 9.0}), {})
    chosen = selection.select(2, range(1, 100_001), 8)
    assert set(chosen[:4]) == {1, 2, 3, 4}
    assert all(client_id > 4 for client_id in chosen[4:])


def test_a_loss_of_nan_is_ignored() -> None:
    for selection in (AFLSelection(), OortSelection()):
        selection.observe(1, _reports({1: float("nan"), 2: 1.0}), {})
        assert selection.state_dict()["clients"].tolist() == [2]


def test_oort_starts_with_unexplored_clients() -> None:
    selection = OortSelection(1, exploration=1.0, exploration_decay=1.0)
    selection.observe(1, _reports(dict.fromkeys(range(1, 11), 5.0)), {})
    assert set(selection.select(2, EVERYONE, 10)) == set(range(11, 21))


def test_oort_selects_the_clients_with_the_highest_utility() -> None:
    selection = OortSelection(1, exploration=0.0, min_exploration=0.0)
    selection.observe(1, _reports({client_id: client_id**2 for client_id in EVERYONE}), {})
    assert set(selection.select(2, EVERYONE, 3)) == {18, 19, 20}


def test_oort_penalizes_slow_clients() -> None:
    selection = OortSelection(1, exploration=0.0, min_exploration=0.0, pacer_step=10.0)
    reports = _reports({client_id: client_id**2 for client_id in EVERYONE})
    selection.observe(1, reports, {20: 1000.0})
    assert set(selection.select(2, EVERYONE, 3)) == {17, 18, 19}


def test_oort_stops_selecting_a_client_after_its_maximum() -> None:
    selection = OortSelection(1, exploration=0.0, min_exploration=0.0, blacklist_rounds=2)
    for round in (1, 2):
        selection.observe(round, _reports({20: 100.0}), {})
    selection.observe(3, _reports(dict.fromkeys(range(1, 20), 1.0)), {})
    assert 20 not in selection.select(4, EVERYONE, 10)


def test_the_pacer_of_oort_allows_more_time_when_utility_falls() -> None:
    selection = OortSelection(1, step_window=2, pacer_step=10.0)
    for round, loss in enumerate([4.0, 4.0, 1.0, 1.0], start=1):
        selection.observe(round, _reports({1: loss}), {})
    assert selection.state_dict()["preferred"] == 20.0


def test_invalid_selection_arguments_raise_errors() -> None:
    with pytest.raises(ConfigError, match="alpha1: expected a share from 0 to 1, got 2"):
        AFLSelection(alpha1=2)
    with pytest.raises(UnknownNameError, match="did you mean 'oort'"):
        selections.get("ort")
