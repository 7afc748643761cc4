"""Checks of a federation before its first round: settings, algorithm and model that cannot be combined."""

from __future__ import annotations

import copy
from operator import attrgetter

import torch
from torch import Tensor, nn

from dovetail.data import as_loader, split_batch
from dovetail.errors import ConfigError, UnknownNameError, expect
from dovetail.federated.algorithms import Algorithm
from dovetail.federated.backends import Backend
from dovetail.federated.config import FederatedConfig
from dovetail.federated.data.sources import Datasource
from dovetail.federated.postprocess import Chain


def check_settings(config: FederatedConfig, outbound: Chain) -> None:
    """Raise if settings contradict each other.

    Raises:
        ConfigError: The message has the setting and the reason.
    """
    server = config.server
    if server.request_update:
        raise ConfigError(
            "request_update: a simulated client has no half-trained model to send; staleness_bound alone waits for it"
        )
    if config.results.record_clients_accuracy and not config.clients.do_test:
        raise ConfigError("record_clients_accuracy: clients measure no accuracy unless do_test of clients is true")
    if not server.synchronous and outbound.needs_cohort:
        raise ConfigError("synchronous: masks cancel among the clients of one round, so every round must wait for all")
    is_divided = config.algorithm.cross_silo
    most = config.algorithm.total_silos if is_divided else config.clients.per_round
    if server.min_clients > most:
        raise ConfigError(
            f"min_clients: expected at most {'total_silos' if is_divided else 'per_round'}, {most}, got "
            f"{server.min_clients}: no round would ever count"
        )
    known = ["epochs", "participating_client_ratio"]
    unknown = sorted(set(config.algorithm.personalization) - set(known))
    if unknown:
        raise UnknownNameError("setting of personalization", unknown[0], known)
    check_epochs(config.algorithm.personalization.get("epochs"))
    ratio = config.algorithm.personalization.get("participating_client_ratio", 1.0)
    expect(0 < ratio <= 1, "participating_client_ratio", "a share above 0 and at most 1", ratio)
    if is_divided and ratio < 1:
        raise ConfigError("participating_client_ratio: edge servers select their clients: leave cross_silo out")


def idle_settings(config: FederatedConfig, backend: Backend) -> dict[str, str]:
    """Return the settings that differ from their defaults but have no effect, each with the reason.

    Example:
        >>> from dovetail.federated.backends import Sequential
        >>> idle_settings(FederatedConfig().with_settings(staleness_bound=3), Sequential())
        {'server.staleness_bound': 'needs synchronous: false'}
    """
    server, clients = config.server, config.clients
    # Each entry: the reason for the user, whether it applies now, and the settings that it makes idle.
    groups = {
        "needs synchronous: false": (
            server.synchronous,
            ("server.minimum_clients_aggregated", "server.staleness_bound", "server.periodic_interval"),
        ),
        "needs simulate_wall_time: true": (
            not server.simulates_time,
            (
                *("clients.speed_simulation", "clients.avg_training_time"),
                *("server.downlink_bandwidth", "server.uplink_bandwidth"),
            ),
        ),
        "needs speed_simulation: true": (not clients.speed_simulation, ("clients.simulation_distribution",)),
        "needs do_test: true": (not clients.do_test, ("clients.test_interval",)),
        "needs dp_epsilon": (
            config.trainer.dp_epsilon is None,
            ("trainer.dp_delta", "trainer.dp_max_grad_norm"),
        ),
        "needs cross_silo: true": (
            not config.algorithm.cross_silo,
            ("algorithm.total_silos", "algorithm.local_rounds"),
        ),
        "the backend cannot stop a client; process can": (
            not server.simulates_time and backend.name in ("sequential", "vectorized"),
            ("server.timeout",),
        ),
        "give it to the backend, which is an object": (
            not server.simulates_time and backend.timeout != server.timeout,
            ("server.timeout",),
        ),
    }
    default = FederatedConfig()
    return {
        name: reason
        for reason, (is_idle, names) in groups.items()
        for name in names
        # A default value is not a choice of the user, so it is not reported.
        if is_idle and attrgetter(name)(config) != attrgetter(name)(default)
    }


def check_algorithm(algorithm: Algorithm, outbound: Chain) -> None:
    """Raise if an algorithm cannot work with the postprocessors.

    Raises:
        ConfigError: The message has the algorithm and the reason.
    """
    name = algorithm.title
    if algorithm.needs_each_update and outbound.needs_cohort:
        raise ConfigError(f"algorithm: {name} needs every update, but masks show the server only their sum")
    # The noise is scaled to the sensitivity of a mean. Any other function of single updates would not have that
    # guarantee.
    if algorithm.needs_each_update and outbound.needs_plain_mean:
        raise ConfigError(f"algorithm: {name} uses updates for more than their mean, but noise protects only the mean")


def check_epochs(epochs: int | None) -> None:
    """Raise if the number of epochs of personalization is not positive.

    Raises:
        ConfigError: There is less than one epoch.
    """
    expect(epochs is None or epochs >= 1, "personalization", "at least 1 epoch, or None for those of a round", epochs)


def check_model(name: str, model: nn.Module, datasource: Datasource) -> None:
    """Raise if the model that a configuration names does not accept a batch of its data; the model is not changed.

    Raises:
        ConfigError: The message has the shape of the data and the error of the model.
    """
    # A loader without a seed would draw from the global random number generators.
    batch = next(iter(as_loader(datasource.train_data(1), batch_size=2, seed=0)), None)
    # Two samples are enough to compare shapes. A copy is called in `eval` mode, so that batch norm counts nothing.
    inputs = split_batch(batch)[0]
    if not isinstance(inputs, Tensor):
        return
    try:
        with torch.inference_mode():
            copy.deepcopy(model).eval()(inputs)
    except (RuntimeError, TypeError, IndexError) as error:
        # Torch may append a stack of C++ calls.
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"trainer.model_type: {name} does not take samples of shape {tuple(inputs.shape[1:])}, the shape of "
            f"the data; give another one, or its parameters.model ({reason})"
        ) from error
