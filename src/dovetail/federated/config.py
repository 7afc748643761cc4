"""Settings of a federation: one frozen value with plato's sections."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from dovetail.errors import ConfigError, UnknownNameError

__all__ = [
    "AlgorithmConfig",
    "ClientsConfig",
    "DataConfig",
    "FederatedConfig",
    "ParametersConfig",
    "ResultsConfig",
    "ServerConfig",
    "TrainerConfig",
]


@dataclass(frozen=True)
class ClientsConfig:
    """Settings of clients.

    Attributes:
        type: The kind of client.
        total_clients: The number of clients.
        per_round: The number of clients that are selected in a round.
        do_test: Test the trained model of a client on its own test data.
        test_interval: The number of rounds from one such test to the next.
        random_seed: The seed of the speeds of clients.
        speed_simulation: Simulate clients of different speed, by `simulation_distribution`.
        simulation_distribution: `distribution` (normal, pareto, zipf, uniform) and its parameters; a sample is the
            number of additional seconds of a client for an epoch.
        avg_training_time: Simulated seconds of an epoch, for a client with an average number of samples.
        comm_simulation: Include the duration of transfers in simulated time.
        inbound_processors: The postprocessors of the weights that are sent to clients, by name, in order.
        outbound_processors: The postprocessors of the updates that clients send, by name, in order.
    """

    type: str = "simple"
    total_clients: int = 10
    per_round: int = 5
    do_test: bool = False
    test_interval: int = 1
    random_seed: int = 1
    speed_simulation: bool = False
    simulation_distribution: Mapping[str, Any] = field(default_factory=dict)
    avg_training_time: float = 1.0
    comm_simulation: bool = True
    inbound_processors: tuple[Any, ...] = ()
    outbound_processors: tuple[Any, ...] = ()


@dataclass(frozen=True)
class ServerConfig:
    """Settings of the server and of rounds.

    Attributes:
        type: The kind of server.
        synchronous: Wait in every round for all its clients. The next two settings and `periodic_interval` apply to
            asynchronous rounds only.
        minimum_clients_aggregated: The number of reports that a round waits for.
        staleness_bound: A round also waits for clients that were selected more than this number of rounds ago.
        simulate_wall_time: Simulate time; asynchronous rounds always do.
        periodic_interval: Simulated seconds between two checks for reports. 0 means no period.
        request_update: Request the unfinished update of a client whose report is too old.
        do_test: Test the global model at the server.
        random_seed: The seed of all random numbers of a federation.
        checkpoint_path: The folder of checkpoints, one after every round. None means no checkpoints.
        states_path: The folder of the states of clients. None means the folder of checkpoints, or memory without one.
        downlink_bandwidth: Megabits per second, of a simulated network.
        uplink_bandwidth: Megabits per second, of a simulated network.
        backend: The backend that runs clients, by name.
        num_workers: The number of workers of the backend. None means one per core.
        min_clients: A round with fewer usable updates does not change the weights.
        timeout: Seconds, or simulated seconds, after which a client is left out. None means no limit.
        selection: The selection of clients: a name, or one name with its arguments.
        aggregator: The aggregation of updates: a name, or one name with its arguments.
    """

    type: str = "fedavg"
    synchronous: bool = True
    minimum_clients_aggregated: int = 1
    staleness_bound: int = 0
    simulate_wall_time: bool = False
    periodic_interval: float = 0.0
    request_update: bool = False
    do_test: bool = True
    random_seed: int = 1
    checkpoint_path: str | None = None
    states_path: str | None = None
    downlink_bandwidth: float = 100.0
    uplink_bandwidth: float = 100.0
    backend: str = "sequential"
    num_workers: int | None = None
    min_clients: int = 1
    timeout: float | None = None
    selection: str | Mapping[str, Any] = "random"
    aggregator: str | Mapping[str, Any] = "mean"

    @property
    def simulates_time(self) -> bool:
        """Whether time is simulated: on request, and always if rounds do not wait for all clients."""
        return self.simulate_wall_time or not self.synchronous


@dataclass(frozen=True)
class DataConfig:
    """Settings of the data.

    Attributes:
        datasource: The data, by name.
        sampler: The partition of the data, by name. None is for data that are generated per client.
        testset_sampler: The partition of the test data. None means that only the server has test data.
        testset_size: The number of test samples. None means all.
        random_seed: The seed of the partition.
        options: Other arguments of the sampler or the data source, such as `concentration` or `partition_size`.
    """

    datasource: str = "digits"
    sampler: str | None = None
    testset_sampler: str | None = None
    testset_size: int | None = None
    random_seed: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TrainerConfig:
    """Settings of local training. None means the setting of the trainer.

    Attributes:
        type: The kind of trainer.
        rounds: The number of rounds.
        epochs: Local epochs.
        batch_size: Local samples per batch.
        optimizer: By name.
        lr_scheduler: By name.
        loss_criterion: By name.
        global_lr_scheduler: Continue the learning rate schedule from round to round.
        model_type: The model, by name. None means a model that fits the data.
        model_name: A label, which chooses the model if no `model_type` is given and a model has this name.
        dp_epsilon: Train every client with differential privacy, so that each of its rounds spends this epsilon. None
            means without.
        dp_delta: The probability that this epsilon does not hold. None means one over the client's samples.
        dp_max_grad_norm: The largest norm of the gradient of one sample. None means 1.
        max_concurrency: Plato's name for `num_workers` of the backend `process`.
        target_accuracy: The accuracy at which the run ends early.
        target_perplexity: The perplexity at which the run ends early.
    """

    type: str = "composable"
    rounds: int = 10
    epochs: int | None = None
    batch_size: int | None = None
    optimizer: str | None = None
    lr_scheduler: str | None = None
    loss_criterion: str | None = None
    global_lr_scheduler: bool = False
    model_type: str | None = None
    model_name: str | None = None
    max_concurrency: int | None = None
    target_accuracy: float | None = None
    target_perplexity: float | None = None
    dp_epsilon: float | None = None
    dp_delta: float | None = None
    dp_max_grad_norm: float | None = None


@dataclass(frozen=True)
class AlgorithmConfig:
    """The federated algorithm.

    Attributes:
        type: The name; or several names, some with arguments, of algorithms that are combined.
        personalization: The `epochs` of the personalization round after the last round, and the
            `participating_client_ratio`, the share of clients, the first ones, that can be selected in the rounds
            before. Empty means no such round.
        cross_silo: Use edge servers between clients and server.
        total_silos: The number of edge servers.
        local_rounds: The number of rounds of an edge server before it reports.
        options: The arguments of the algorithm.
    """

    type: str | tuple[Any, ...] = "fedavg"
    personalization: Mapping[str, Any] = field(default_factory=dict)
    cross_silo: bool = False
    total_silos: int = 2
    local_rounds: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ParametersConfig:
    """Arguments of the model, optimizer, schedule (`learning_rate`) and loss that `TrainerConfig` names."""

    model: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    learning_rate: Mapping[str, Any] = field(default_factory=dict)
    loss_criterion: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ResultsConfig:
    """Settings of results.

    Attributes:
        types: The columns of the table, in order.
        result_path: The folder of the table and the figure. None means that neither is written.
        record_clients_accuracy: Add columns for the accuracy of clients.
    """

    types: tuple[str, ...] = ("round", "accuracy", "elapsed_time")
    result_path: str | None = None
    record_clients_accuracy: bool = False


@dataclass(frozen=True)
class FederatedConfig:
    """All settings. Every setting has a default, so that a federation runs without a file.

    Example:
        >>> config = FederatedConfig().with_settings(rounds=3, total_clients=20)
        >>> config.trainer.rounds, config.clients.total_clients, config.clients.per_round
        (3, 20, 5)
    """

    clients: ClientsConfig = field(default_factory=ClientsConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    data: DataConfig = field(default_factory=DataConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    parameters: ParametersConfig = field(default_factory=ParametersConfig)
    results: ResultsConfig = field(default_factory=ResultsConfig)

    def with_settings(self, **settings: Any) -> FederatedConfig:
        """Return a copy with some settings changed.

        Args:
            settings: Values by the names of settings that only one section has; `seed` is the server's `random_seed`.
                A whole section can be given, too.

        Raises:
            ConfigError: No section, or more than one, has a setting of that name.
        """
        changed: dict[str, Any] = {}
        for name, value in settings.items():
            if name in _SECTIONS:
                changed[name] = value
                continue
            # A second setting of the same section must be added to the first, which is in `changed` already.
            section, setting = _place_of(name)
            changed[section] = replace(changed.get(section, getattr(self, section)), **{setting: value})
        return replace(self, **changed)


_SECTIONS = tuple(each.name for each in fields(FederatedConfig))


def _place_of(name: str) -> tuple[str, str]:
    if name == "seed":
        return "server", "random_seed"
    settings = [
        (section, each.name) for section, default in vars(FederatedConfig()).items() for each in fields(default)
    ]
    # For example, `type` is a key of four sections, and `random_seed` of three.
    found = [it for it in settings if it[1] == name]
    if len(found) > 1:
        raise ConfigError(f"{name}: {' and '.join(section for section, _ in found)} both have it; give the section")
    if not found:
        counts = Counter(setting for _, setting in settings)
        raise UnknownNameError(
            "setting", name, ["seed", *_SECTIONS, *(it for it, count in counts.items() if count == 1)]
        )
    return found[0]
