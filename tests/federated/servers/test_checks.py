"""Settings that do not go together, or have no effect beside the others."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from dovetail.federated.backends import Process
from dovetail.federated.config import FederatedConfig, ParametersConfig, TrainerConfig
from dovetail.servers.fedavg import Server
from dovetail.trainers.basic import Trainer
from dovetail.trainers.composable import ComposableTrainer
from dovetail.trainers.strategies import (
    AdamOptimizerStrategy,
    DefaultLRSchedulerStrategy,
    DefaultOptimizerStrategy,
    GradientClippingOptimizerStrategy,
    OptimizerStrategy,
)


@pytest.mark.parametrize(
    ("settings", "name", "reason"),
    [
        ({"minimum_clients_aggregated": 2}, "server.minimum_clients_aggregated", "needs synchronous: false"),
        ({"staleness_bound": 2}, "server.staleness_bound", "needs synchronous: false"),
        ({"periodic_interval": 2.0}, "server.periodic_interval", "needs synchronous: false"),
        ({"avg_training_time": 3.0}, "clients.avg_training_time", "needs simulate_wall_time: true"),
        ({"uplink_bandwidth": 3.0}, "server.uplink_bandwidth", "needs simulate_wall_time: true"),
        ({"simulation_distribution": {"alpha": 1}}, "clients.simulation_distribution", "needs speed_simulation: true"),
        ({"test_interval": 2}, "clients.test_interval", "needs do_test: true"),
        ({"total_silos": 3}, "algorithm.total_silos", "needs cross_silo: true"),
        ({"local_rounds": 3}, "algorithm.local_rounds", "needs cross_silo: true"),
        ({"timeout": 3.0}, "server.timeout", "the backend cannot stop a client; process can"),
        (
            {"timeout": 3.0, "backend": Process(num_workers=1)},
            "server.timeout",
            "give it to the backend, which is an object",
        ),
    ],
)
def test_a_setting_without_effect_is_reported(settings: dict[str, Any], name: str, reason: str) -> None:
    with pytest.warns(UserWarning, match=f"^settings without effect: {name}: {reason}$"):
        Server(**{"rounds": 0, **settings}).run()


@pytest.mark.parametrize(
    "trainer",
    [ComposableTrainer(optimizer_strategy=AdamOptimizerStrategy(lr=0.1), verbose=False), Trainer(verbose=False)],
)
def test_an_optimizer_setting_that_the_trainer_ignores_is_reported(trainer: Any) -> None:
    server = Server(trainer=trainer, config=FederatedConfig(trainer=TrainerConfig(rounds=0, optimizer="SGD")))
    with pytest.warns(UserWarning, match="settings without effect: trainer.optimizer: the client's trainer does not"):
        server.run()


class Reading(OptimizerStrategy):
    """A strategy that may read the settings."""

    def create_optimizer(self, model: Any, context: Any) -> Any:
        raise NotImplementedError


@pytest.mark.parametrize("strategy", [None, Reading(), GradientClippingOptimizerStrategy(DefaultOptimizerStrategy())])
def test_an_optimizer_setting_that_the_trainer_reads_is_not_reported(strategy: Any) -> None:
    schedule = DefaultLRSchedulerStrategy()
    trainer = ComposableTrainer(optimizer_strategy=strategy, lr_scheduler_strategy=schedule, verbose=False)
    settings = TrainerConfig(rounds=0, optimizer="SGD", lr_scheduler="StepLR", loss_criterion="CrossEntropyLoss")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Server(trainer=trainer, config=FederatedConfig(trainer=settings)).run()
        Server(config=FederatedConfig(trainer=settings)).run()


def test_a_schedule_in_the_settings_has_an_effect_without_a_trainer() -> None:
    def trained(**settings: Any) -> Any:
        parameters = ParametersConfig(learning_rate={"step_size": 1, "gamma": 0.0})
        config = FederatedConfig(trainer=TrainerConfig(rounds=1, epochs=3, **settings), parameters=parameters)
        server = Server(config=config.with_settings(total_clients=2, per_round=2))
        server.run()
        return server.weights

    plain, stopped = trained(), trained(lr_scheduler="StepLR")
    assert any(not plain[name].equal(stopped[name]) for name in plain)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"staleness_bound": 2, "synchronous": False},
        {"avg_training_time": 3.0, "simulate_wall_time": True},
        {"local_rounds": 3, "cross_silo": True},
        {"timeout": 3.0, "backend": "process", "num_workers": 1},
        {"backend": Process(num_workers=1, timeout=3.0)},
        {"timeout": 3.0, "simulate_wall_time": True},
    ],
)
def test_a_setting_with_an_effect_is_not_reported(settings: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Server(**{"rounds": 0, **settings}).run()
