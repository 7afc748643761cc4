"""Settings of a server: its arguments, completed from the configuration and checked once."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from dovetail.errors import ConfigError
from dovetail.federated.algorithms import Algorithm, FedAvg
from dovetail.federated.algorithms.registry import algorithm_of
from dovetail.federated.averaging import Average
from dovetail.federated.backends import Backend, backends
from dovetail.federated.callbacks import ServerCallback, as_callback
from dovetail.federated.clock import Speeds
from dovetail.federated.config import FederatedConfig, ServerConfig
from dovetail.federated.postprocess import Chain
from dovetail.federated.robust import make_aggregator
from dovetail.federated.selection import ClientSelection, RandomSelection, selections
from dovetail.federated.servers.checks import check_algorithm, check_settings
from dovetail.federated.servers.edge import Silos
from dovetail.federated.servers.journal import with_journal
from dovetail.federated.servers.results import with_results
from dovetail.federated.specs import build


@dataclass(frozen=True)
class ServerSettings:
    """The configuration of a server, and the objects that it names; `Server` has them as attributes.

    Attributes:
        callbacks: The callbacks of the server, and those that write results and a journal if a folder is set.
        algorithm: The server's part of the algorithm. With edge servers it is FedAvg, because they run the algorithm.
        inbound: The postprocessors of the weights on the way to clients.
        outbound: The postprocessors of the updates on the way to the server.
        silos: The division of clients among edge servers. None means that there are no edge servers.
    """

    config: FederatedConfig
    callbacks: list[ServerCallback]
    algorithm: Algorithm
    selection: ClientSelection
    backend: Backend
    aggregator: Average
    inbound: Chain
    outbound: Chain
    speeds: Speeds
    silos: Silos | None = None


def read_settings(
    config: FederatedConfig | None,
    changes: dict[str, Any],
    *,
    algorithm: Algorithm | Callable[[], Algorithm] | str | None = None,
    callbacks: Iterable[Any] | None = None,
    selection: ClientSelection | None = None,
    backend: Backend | str | None = None,
    aggregator: Average | str | None = None,
    postprocessors: Iterable[Any] | None = None,
) -> ServerSettings:
    """Return the settings that the arguments of a `Server` describe.

    `changes` are settings by name that replace values of `config`. None for any other argument means the object that
    the configuration names.

    Raises:
        ConfigError: A setting is unknown, or contradicts another one.

    Example:
        >>> settings = read_settings(None, {"total_clients": 4, "per_round": 2}, backend="process")
        >>> settings.config.clients.per_round, settings.backend.name
        (2, 'process')
    """
    changes = dict(changes)
    if isinstance(backend, str):
        changes["backend"], backend = backend, None
    if isinstance(aggregator, str):
        changes["aggregator"], aggregator = aggregator, None
    if postprocessors is not None:
        changes["outbound_processors"] = tuple(postprocessors)
    config = (config or FederatedConfig()).with_settings(**changes)
    if isinstance(algorithm, str):
        config, algorithm = replace(config, algorithm=replace(config.algorithm, type=algorithm)), None
    server = config.server
    settings = ServerSettings(
        config,
        callbacks=with_journal(
            with_results([as_callback(it, ServerCallback) for it in callbacks or ()], config.results),
            server.checkpoint_path,
        ),
        algorithm=_copied(algorithm) or algorithm_of(config.algorithm),
        selection=selection or _build_selection(server),
        backend=backend or _build_backend(config),
        aggregator=aggregator or make_aggregator(server.aggregator),
        inbound=Chain(config.clients.inbound_processors),
        outbound=Chain(config.clients.outbound_processors),
        speeds=Speeds(config.clients, server),
    )
    # Before edge servers replace the chain and the algorithm: the contradictions would occur at the clients below.
    check_settings(config, settings.outbound)
    check_algorithm(settings.algorithm, settings.outbound)
    return _with_edge_servers(settings) if config.algorithm.cross_silo else settings


def _with_edge_servers(settings: ServerSettings) -> ServerSettings:
    """Return the settings of a server of edge servers; the settings of clients apply to the clients below them."""
    return replace(
        settings,
        silos=Silos(settings.config, settings.algorithm, settings.selection),
        algorithm=FedAvg(),
        selection=RandomSelection(settings.config.server.random_seed),
        inbound=Chain(),
        outbound=Chain(),
    )


def _build_selection(server: ServerConfig) -> ClientSelection:
    """Return the selection that a configuration names."""
    wanted = server.selection
    ((name, arguments),) = ({wanted: {}} if isinstance(wanted, str) else wanted).items()
    return build(selections, {name: {"seed": server.random_seed, **arguments}})


def _build_backend(config: FederatedConfig) -> Backend:
    """Return the backend that a configuration names."""
    server = config.server
    return backends.get(server.backend)(
        num_workers=server.num_workers or config.trainer.max_concurrency,
        # A process cannot wait for simulated seconds.
        timeout=None if server.simulates_time else server.timeout,
    )


def _copied(algorithm: Any) -> Algorithm | None:
    """Return a copy of the algorithm, because its state belongs to one federation."""
    # A class is called without arguments; a factory with arguments must be called by the user.
    given = algorithm() if isinstance(algorithm, type) else algorithm
    if given is not None and not isinstance(given, Algorithm):
        raise ConfigError(f"algorithm: expected a name or an Algorithm (class or instance), got {algorithm!r}")
    return copy.deepcopy(given)
