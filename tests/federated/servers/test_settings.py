"""Settings of a server: arguments and configuration as one value."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest

from dovetail.algorithms import FedAvg, FedProx
from dovetail.errors import ConfigError
from dovetail.federated.backends import Sequential
from dovetail.federated.config import FederatedConfig
from dovetail.federated.robust import CoordinateMedian
from dovetail.federated.servers.settings import read_settings


def test_a_component_name_given_as_an_argument_is_written_to_the_configuration() -> None:
    settings = read_settings(
        FederatedConfig().with_settings(rounds=3),
        {"per_round": 2},
        algorithm="fedprox",
        backend="process",
        aggregator="median",
        postprocessors=["quantization"],
    )
    config = settings.config
    assert (config.trainer.rounds, config.clients.per_round) == (3, 2)
    assert (config.algorithm.type, config.server.backend, config.server.aggregator) == ("fedprox", "process", "median")
    assert config.clients.outbound_processors == ("quantization",)
    assert isinstance(settings.algorithm, FedProx)
    assert isinstance(settings.aggregator, CoordinateMedian)
    assert settings.backend.name == "process"
    assert len(settings.outbound) == 1


def test_a_given_object_is_used_and_an_algorithm_is_copied() -> None:
    backend, algorithm = Sequential(), FedProx(mu=0.5)
    settings = read_settings(None, {}, backend=backend, algorithm=algorithm)
    assert settings.backend is backend
    assert isinstance(settings.algorithm, FedProx)
    assert settings.algorithm is not algorithm


def test_edge_servers_run_the_algorithm_and_the_top_server_averages() -> None:
    settings = read_settings(
        None, {"cross_silo": True, "total_silos": 2}, algorithm="fedprox", postprocessors=["quantization"]
    )
    assert type(settings.algorithm) is FedAvg
    assert len(settings.outbound) == 0
    assert settings.silos is not None
    assert isinstance(settings.silos.algorithm, FedProx)
    assert list(settings.silos.ids) == [1, 2]


def test_settings_are_immutable() -> None:
    settings = read_settings(None, {})
    with pytest.raises(FrozenInstanceError):
        settings.algorithm = FedAvg()  # type: ignore[misc]


def test_a_backend_does_not_wait_for_simulated_time() -> None:
    assert read_settings(None, {"timeout": 5.0}, backend="process").backend.timeout == 5.0
    assert read_settings(None, {"timeout": 5.0, "synchronous": False}, backend="process").backend.timeout is None


def test_contradicting_settings_are_rejected() -> None:
    with pytest.raises(ConfigError, match="min_clients: expected at most per_round, 2, got 3"):
        read_settings(None, {"per_round": 2, "min_clients": 3})
