"""What a federation is told: one value with plato's sections, passed to whoever needs it and kept nowhere else."""

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
    """Who takes part.

    Attributes:
        type: The kind of client.
        total_clients: How many there are.
        per_round: How many are asked in a round.
        do_test: Whether a client tests its trained model on its own test data.
        test_interval: At every n-th round.
        random_seed: Decides which clients are fast.
        speed_simulation: Whether clients differ in speed, by `simulation_distribution`.
        simulation_distribution: How: `distribution` (normal, pareto, zipf, uniform) and its numbers: by how many
            seconds a client takes longer for an epoch.
        avg_training_time: Simulated seconds that a client with an average number of samples takes for an epoch.
        comm_simulation: Whether simulated time counts what sending takes, too.
        inbound_processors: What becomes of the weights on the way down, by name, in order.
        outbound_processors: What becomes of an update on the way up, by name, in order.
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
    """How rounds go.

    Attributes:
        type: The kind of server.
        synchronous: Whether a round waits for all its clients.
        minimum_clients_aggregated: How many reports a round waits for, where it is not synchronous.
        staleness_bound: A client that was asked more than so many rounds ago is waited for, where rounds are not
            synchronous.
        simulate_wall_time: Whether time is simulated; rounds that are not synchronous always are.
        periodic_interval: Simulated seconds between two looks at who has reported, where rounds are not synchronous; 0
            for no such rhythm.
        request_update: Whether a client whose report is too old is asked for what it has.
        do_test: Whether the server tests the global model.
        random_seed: All randomness of a federation comes from it.
        checkpoint_path: Where the server keeps a checkpoint of every round, or None.
        states_path: The folder in which the states of clients are kept; None for the one of checkpoints, or without
            such for memory.
        downlink_bandwidth: Megabits per second, of a simulated network.
        uplink_bandwidth: Megabits per second, of a simulated network.
        backend: Where clients run.
        num_workers: How many at once, where that is a choice; None for one per core.
        min_clients: A round with fewer usable updates changes nothing.
        timeout: Seconds, simulated ones where time is, after which a client is left out; None for no limit.
        selection: Who is asked: by name.
        aggregator: How updates become one: by name, or one name with what it takes.
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
    selection: str = "random"
    aggregator: str | Mapping[str, Any] = "mean"

    @property
    def simulates_time(self) -> bool:
        """Whether time is simulated: on request, and always if rounds do not wait for all clients."""
        return self.simulate_wall_time or not self.synchronous


@dataclass(frozen=True)
class DataConfig:
    """What clients learn from.

    Attributes:
        datasource: The data, by name.
        sampler: How they are dealt out, by name; None where the data come client by client.
        testset_sampler: How the test data are dealt out; None for the server alone.
        testset_size: How many test samples there are; None for all.
        random_seed: Decides who gets what.
        options: What else the sampler or the data source takes, such as `concentration` or `partition_size`.
    """

    datasource: str = "digits"
    sampler: str | None = None
    testset_sampler: str | None = None
    testset_size: int | None = None
    random_seed: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TrainerConfig:
    """How clients train; what is None is the trainer's own business.

    Attributes:
        type: The kind of trainer.
        rounds: How many rounds there are.
        epochs: Local epochs.
        batch_size: Local samples per batch.
        optimizer: By name.
        lr_scheduler: By name.
        loss_criterion: By name.
        global_lr_scheduler: Whether the rate goes on from round to round as if it were one training.
        model_type: The model, by name; None for the one that fits the data.
        model_name: A label, by which nothing is chosen.
        max_concurrency: Plato's name for `num_workers` of the backend `process`.
        target_accuracy: Where training ends early.
        target_perplexity: Where training ends early, for language.
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


@dataclass(frozen=True)
class AlgorithmConfig:
    """The federated algorithm.

    Attributes:
        type: By name; or several, each a name or one name with what it takes, which then work together.
        personalization: Whether clients train for themselves after the last round, and for how many `epochs`; empty for
            no.
        cross_silo: Whether edge servers stand between clients and server.
        total_silos: How many edge servers.
        local_rounds: Rounds that an edge server makes before it reports.
        options: What the algorithm takes.
    """

    type: str | tuple[Any, ...] = "fedavg"
    personalization: Mapping[str, Any] = field(default_factory=dict)
    cross_silo: bool = False
    total_silos: int = 2
    local_rounds: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ParametersConfig:
    """Arguments of what `TrainerConfig` names.

    Attributes:
        model: Of the model.
        optimizer: Of the optimizer.
        learning_rate: Of the schedule.
        loss_criterion: Of the loss.
    """

    model: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    learning_rate: Mapping[str, Any] = field(default_factory=dict)
    loss_criterion: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ResultsConfig:
    """What is written down.

    Attributes:
        types: The columns of the table, in order.
        result_path: The folder of table and picture, or None for neither.
        record_clients_accuracy: Whether the spread over clients has columns, too.
    """

    types: tuple[str, ...] = ("round", "accuracy", "elapsed_time")
    result_path: str | None = None
    record_clients_accuracy: bool = False


@dataclass(frozen=True)
class FederatedConfig:
    """All of it. Every setting has a default, so a federation runs without a file.

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
            settings: By their names where only one section has it; `seed` is the server's `random_seed`, and a section
                may be given as a whole.

        Raises:
            ConfigError: No section, or more than one, has a setting of that name.
        """
        changed: dict[str, Any] = {}
        for name, value in settings.items():
            if name in _SECTIONS:
                changed[name] = value
                continue
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
    found = [it for it in settings if it[1] == name]
    if len(found) > 1:
        raise ConfigError(f"{name}: {' and '.join(section for section, _ in found)} both have it; give the section")
    if not found:
        counts = Counter(setting for _, setting in settings)
        raise UnknownNameError(
            "setting", name, ["seed", *_SECTIONS, *(it for it, count in counts.items() if count == 1)]
        )
    return found[0]
