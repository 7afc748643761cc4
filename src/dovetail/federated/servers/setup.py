"""Data, model and worker of a federation: what a server needs before its first round."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

from dovetail.errors import ConfigError
from dovetail.federated.backends import Worker
from dovetail.federated.clients.simple import Client, as_trainer
from dovetail.federated.config import FederatedConfig
from dovetail.federated.data.sources import Datasource, datasource
from dovetail.overrides import defines
from dovetail.trainers.base import Trainer
from dovetail.trainers.modules import as_module

if TYPE_CHECKING:
    from dovetail.federated.servers.fedavg import Server


_Model = nn.Module | Callable[[], nn.Module] | None
_Trainer = Trainer | Callable[..., Trainer] | None


def build_datasource(config: FederatedConfig) -> Datasource:
    """Return the data that a configuration names."""
    data = config.data
    named = {"sampler": data.sampler, "testset_sampler": data.testset_sampler, "testset_size": data.testset_size}
    given = {name: value for name, value in named.items() if value is not None}
    return datasource(
        data.datasource, config.clients.total_clients, seed=data.random_seed, **given, **dict(data.options)
    )


def build_trainer(model: _Model, trainer: _Trainer, client: Client, data: Any) -> tuple[Trainer, nn.Module]:
    """Return the trainer that tests the global model, and the initial model, which is not the trainer's.

    Without a model, it is the model of the client, else of a trainer, else the default model of the data. Without a
    trainer, it is the client's.
    """
    own: Any = as_trainer(trainer or client._given_trainer)
    trainers = [it for it in (trainer, client._given_trainer, own) if isinstance(it, Trainer)]
    given = _first_module(model, client.model, *(it.context.model for it in trainers))
    initial = copy.deepcopy(data.default_model() if given is None else given)
    # Two copies: the trainer's model gets new weights in every evaluation, while clients need the initial one.
    own.model = copy.deepcopy(initial)
    return own, initial


def start_worker(server: Server, client: Client, model: nn.Module) -> Worker:
    """Return the object that does the work of the clients of a server: the client, which is changed, or an `Edge`.

    Raises:
        ConfigError: The client overrides a method that edge servers do not call.
    """
    if server.silos is not None:
        if defines(client, "customize_report"):
            raise ConfigError(
                f"{type(client).__name__}.customize_report: an edge server does not pass reports of its clients "
                "on: leave cross_silo out"
            )
        return server.silos.edge(client, model, server.datasource)
    clients = server.config.clients
    client.prepare(
        model,
        server.datasource,
        server.algorithm,
        clients.test_interval if clients.do_test else 0,
        inbound=server.inbound,
        outbound=server.outbound,
    )
    unread = [name for name in client.unread_settings if getattr(server.config.trainer, name) is not None]
    if unread:
        warnings.warn(
            f"settings without effect: trainer.{', trainer.'.join(unread)}: the client's trainer does not read it",
            UserWarning,
            stacklevel=2,
        )
    # After `client.prepare`, which counts all clients of the data; an edge server has only some of them.
    server.algorithm.prepare(model, len(server.client_ids))
    return client


def _first_module(*candidates: Any) -> nn.Module | None:
    """Return the first candidate that is a module or builds one; None means that there is none."""
    for candidate in candidates:
        if (module := as_module(candidate)) is not None:
            return module
    return None
