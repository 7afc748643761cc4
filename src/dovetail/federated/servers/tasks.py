"""Tasks of a server: the weights, settings and seed that it sends to a client."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from dovetail.federated.config import FederatedConfig
from dovetail.federated.messages import SERVER_RESPONSE, Task, Weights
from dovetail.overrides import defines
from dovetail.runtime.seeds import derive_seed

if TYPE_CHECKING:
    from dovetail.federated.servers.fedavg import Server


TaskKind = Literal["train", "evaluate", "personalize"]


def make_task(
    server: Server, client_id: int, weights: Weights, config: Mapping[str, Any], kind: TaskKind = "train"
) -> Task:
    """Return the task of one client.

    All tasks of a round share the result of `packed_weights` and of `training_config`, so that a backend transfers
    them once.
    """
    payload: dict[str, Any] = {}
    # A client reads the response only before it trains.
    if kind != "evaluate" and defines(server, "customize_server_response"):
        response = {"id": client_id, "current_round": server.current_round}
        payload[SERVER_RESPONSE] = server.customize_server_response(response, client_id)
    payload |= server._payload_for(client_id, kind)
    return Task(
        server.current_round,
        client_id,
        weights,
        seed=derive_seed(server.config.server.random_seed, server.current_round, client_id),
        kind=kind,
        payload=payload,
        config=config,
    )


def shared_weights(server: Server) -> Weights:
    """Return the global weights without those that stay with clients."""
    return {name: value for name, value in server.weights.items() if not server.algorithm.is_local(name)}


def packed_weights(server: Server) -> Weights:
    """Return the weights that are sent to clients, encoded by the inbound postprocessors."""
    weights = shared_weights(server)
    if not len(server.inbound):
        return weights
    return server.inbound.pack(weights, derive_seed(server.config.server.random_seed, "inbound", server.current_round))


def training_config(config: FederatedConfig) -> dict[str, Any]:
    """Return the settings of local training, by the names that the strategies of a client read.

    Example:
        >>> training_config(FederatedConfig().with_settings(epochs=2, batch_size=8))
        {'epochs': 2, 'batch_size': 8}
    """
    trainer = config.trainer
    names = ("epochs", "batch_size", "optimizer", "lr_scheduler", "loss_criterion")
    settings = {name: value for name in names if (value := getattr(trainer, name)) is not None}
    parameters = {name: dict(value) for name, value in vars(config.parameters).items() if value}
    if parameters:
        settings["parameters"] = parameters
    if config.algorithm.options:
        settings["algorithm"] = dict(config.algorithm.options)
    if trainer.global_lr_scheduler:
        # The schedule of a client covers all rounds, so its length is needed in each of them.
        settings |= {"global_lr_scheduler": True, "rounds": trainer.rounds}
    return settings
