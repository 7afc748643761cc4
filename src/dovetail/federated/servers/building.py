"""Server and client of a federation, built from its configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import nn

from dovetail.data.models import models
from dovetail.errors import ConfigError
from dovetail.federated.clients.private_training import PrivateClientTrainer
from dovetail.federated.clients.simple import Client
from dovetail.federated.config import FederatedConfig, TrainerConfig
from dovetail.federated.servers.fedavg import Server
from dovetail.federated.specs import make_builder
from dovetail.registry import Registry
from dovetail.trainers.registry import trainers
from dovetail.trainers.strategies import (
    DefaultLossCriterionStrategy,
    DefaultLRSchedulerStrategy,
    DefaultOptimizerStrategy,
)

__all__ = ["clients", "federation", "servers"]

servers: Registry[type[Server]] = Registry("server", lambda: {"fedavg": Server})
clients: Registry[type[Client]] = Registry("client", lambda: {"simple": Client})


def federation(config: FederatedConfig, callbacks: Iterable[Any] = ()) -> tuple[Server, Client]:
    """Return the server and the client that a configuration describes; `server.run(client)` runs the federation.

    Args:
        config: The configuration, as `dovetail.federated.servers.reading.read_federated` returns it.
        callbacks: Callbacks of the server.

    Raises:
        ConfigError: The algorithm or the model does not accept its arguments.

    Example:
        >>> server, client = federation(FederatedConfig().with_settings(rounds=2, total_clients=4, per_round=2))
        >>> len(server.run(client))
        2
    """
    kind: Any = trainers.get(config.trainer.type)
    if config.trainer.dp_epsilon is not None:
        kind = _private(config.trainer, config.trainer.dp_epsilon)
    trainer = partial(
        kind,
        # These strategies read the names in the configuration, which come with every task.
        loss_strategy=DefaultLossCriterionStrategy(),
        optimizer_strategy=DefaultOptimizerStrategy(),
        lr_scheduler_strategy=DefaultLRSchedulerStrategy(),
        verbose=False,
    )
    server = servers.get(config.server.type)(model=_model(config), trainer=trainer, callbacks=callbacks, config=config)
    return server, clients.get(config.clients.type)(trainer=trainer)


def _private(config: TrainerConfig, epsilon: float) -> Callable[..., Any]:
    if config.type not in ("basic", "composable"):
        raise ConfigError(f"trainer.dp_epsilon: expected trainer.type basic or composable, got {config.type!r}")
    norm = 1.0 if config.dp_max_grad_norm is None else config.dp_max_grad_norm
    # This is always a `ComposableTrainer`: without the check above, a trainer of another type would be replaced.
    return partial(PrivateClientTrainer, epsilon, config.dp_delta, norm)


def _model(config: FederatedConfig) -> Callable[[], nn.Module] | None:
    kind, arguments = config.trainer.model_type, dict(config.parameters.model)
    if kind is None:
        if arguments:
            raise ConfigError("parameters.model: it has no effect without trainer.model_type: give both")
        return None
    return make_builder(models, {kind: arguments})
