"""Simulated time."""

from __future__ import annotations

import pytest

from dovetail.errors import ConfigError, UnknownNameError
from dovetail.federated.backends.base import Done
from dovetail.federated.clock import Arrival, Clock, Speeds
from dovetail.federated.config import ClientsConfig, ServerConfig
from dovetail.federated.messages import Fault, Update

_WAITS_FOR_TWO = ServerConfig(synchronous=False, minimum_clients_aggregated=2, staleness_bound=9)


def _simulated(**distribution: object) -> Speeds:
    return Speeds(ClientsConfig(speed_simulation=True, simulation_distribution=distribution))


def _clock(*times: float, round: int = 1) -> Clock:
    clock = Clock()
    for client_id, at in enumerate(times, start=1):
        clock.expect(Arrival(at, client_id, at, Done(Update(client_id, round, 10), {})))
    return clock


def _ids(arrivals: list[Arrival]) -> list[int]:
    return [arrival.client_id for arrival in arrivals]


@pytest.mark.parametrize(
    ("distribution", "mean"),
    [
        ({"distribution": "normal", "mean": 20.0, "sd": 2.0}, 20.0),
        ({"distribution": "uniform", "low": 2.0, "high": 6.0}, 4.0),
        # A Pareto number less 1 has the mean 1 / (alpha - 1).
        ({"distribution": "pareto", "alpha": 5.0}, 0.25),
        # zeta(3) / zeta(4).
        ({"distribution": "zipf", "s": 4.0}, 1.1106),
    ],
)
def test_slowness_follows_its_distribution(distribution: dict[str, object], mean: float) -> None:
    speeds = _simulated(**distribution)
    drawn = [speeds.slowness(client_id) for client_id in range(1, 2001)]
    assert sum(drawn) / 2000 == pytest.approx(mean, rel=0.1)


def test_the_speed_of_a_client_depends_only_on_its_id_and_the_seed() -> None:
    normal = {"distribution": "normal", "mean": 5.0, "sd": 1.0}
    forwards, backwards = _simulated(**normal), _simulated(**normal)
    ids = range(999_990, 1_000_001)
    assert [forwards.slowness(it) for it in ids] == [backwards.slowness(it) for it in reversed(ids)][::-1]
    other = Speeds(ClientsConfig(speed_simulation=True, simulation_distribution=normal, random_seed=2))
    assert other.slowness(7) != forwards.slowness(7)


def test_the_delay_of_a_client_is_between_zero_and_a_minute() -> None:
    wild = _simulated(distribution="normal", mean=0.0, sd=1000.0)
    assert {0.0, 60.0} == {
        wild.slowness(client_id) for client_id in range(1, 200) if wild.slowness(client_id) in (0, 60)
    }
    assert all(0 <= wild.slowness(client_id) <= 60 for client_id in range(1, 200))


def test_work_takes_longer_with_epochs_and_samples() -> None:
    speeds = Speeds(ClientsConfig(avg_training_time=3.0))
    assert speeds.work(1, epochs=4, share=0.5) == 6.0


def test_sending_takes_bits_over_bandwidth() -> None:
    server = ServerConfig(downlink_bandwidth=8.0, uplink_bandwidth=2.0)
    # A megabyte is 8 megabits.
    assert Speeds(ClientsConfig(), server).transfer(10**6, 10**6) == pytest.approx(1.0 + 4.0)
    assert Speeds(ClientsConfig(comm_simulation=False), server).transfer(10**6, 10**6) == 0.0


@pytest.mark.parametrize(
    ("distribution", "words"),
    [
        ({"distribution": "parto", "alpha": 1}, "did you mean 'pareto'"),
        ({"distribution": "normal", "mean": 1}, "needs sd"),
        ({"distribution": "zipf", "s": 2, "alpha": 1}, "unknown number of the zipf distribution 'alpha'"),
        ({"distribution": "zipf", "s": "2"}, "expected a number, got '2'"),
    ],
)
def test_an_invalid_distribution_raises_a_one_sentence_error(distribution: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        _simulated(**distribution)
    assert issubclass(UnknownNameError, ConfigError)


def test_a_synchronous_round_waits_for_all_clients() -> None:
    clock = _clock(5.0, 3.0, 9.0)
    assert _ids(clock.gather(1, ServerConfig())) == [1, 2, 3]
    assert (clock.now, clock.busy()) == (9.0, set())


def test_an_asynchronous_round_waits_for_its_minimum_of_updates() -> None:
    clock = _clock(5.0, 3.0, 9.0)
    assert _ids(clock.gather(1, _WAITS_FOR_TWO)) == [1, 2]
    assert (clock.now, clock.busy()) == (5.0, {3})


def test_a_round_does_not_wait_for_more_clients_than_are_running() -> None:
    assert _ids(_clock(4.0).gather(1, _WAITS_FOR_TWO)) == [1]


def test_clients_that_finish_at_the_same_time_are_all_used() -> None:
    assert _ids(_clock(5.0, 3.0, 5.0).gather(1, _WAITS_FOR_TWO)) == [1, 2, 3]


def test_a_round_waits_for_clients_above_the_staleness_limit() -> None:
    config = ServerConfig(synchronous=False, minimum_clients_aggregated=1, staleness_bound=1)
    clock = _clock(5.0, 3.0, 9.0)
    assert _ids(clock.gather(1, config)) == [2]
    assert _ids(clock.gather(2, config)) == [1]
    assert clock.now == 5.0
    clock.expect(Arrival(7.0, 4, 2.0, Done(Update(4, 3, 10), {})))
    assert _ids(clock.gather(3, config)) == [3, 4]
    assert clock.now == 9.0


def test_a_periodic_server_collects_updates_only_at_its_period() -> None:
    config = ServerConfig(synchronous=False, minimum_clients_aggregated=2, staleness_bound=9, periodic_interval=4.0)
    clock = _clock(5.0, 3.0, 7.5, 8.5)
    assert _ids(clock.gather(1, config)) == [1, 2, 3]
    assert clock.now == 8.0


def test_a_fault_does_not_count_as_a_waited_update() -> None:
    clock = _clock(5.0, 3.0, 9.0)
    clock.expect(Arrival(1.0, 9, 1.0, Fault(9, 1, "timed out", "client 9 is slow")))
    assert _ids(clock.gather(1, _WAITS_FOR_TWO)) == [1, 2, 9]


def test_the_clock_continues_from_its_state() -> None:
    clock = _clock(5.0, 3.0, 9.0)
    clock.expect(Arrival(20.0, 9, 20.0, Fault(9, 1, "timed out", "client 9 is slow")))
    clock.gather(1, _WAITS_FOR_TWO)
    other = Clock()
    other.load_state_dict(clock.state_dict())
    assert (other.now, other.busy()) == (5.0, {3, 9})
    assert other.gather(2, ServerConfig()) == clock.gather(2, ServerConfig())
    assert other.now == 20.0
