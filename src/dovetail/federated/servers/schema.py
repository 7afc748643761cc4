"""Keys of a federation's configuration file: each section, its keys, and the check of each value."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from dovetail.checks import Check, Key, Refused, flag, mapping, number, text, whole
from dovetail.data.models import models
from dovetail.federated.algorithms.registry import algorithms
from dovetail.federated.backends.registry import backends
from dovetail.federated.config import (
    AlgorithmConfig,
    ClientsConfig,
    DataConfig,
    ParametersConfig,
    ResultsConfig,
    ServerConfig,
    TrainerConfig,
)
from dovetail.federated.data.partition import partitions
from dovetail.federated.data.sources import datasources
from dovetail.federated.postprocess.registry import postprocessors
from dovetail.federated.robust import aggregators
from dovetail.federated.selection import selections
from dovetail.registry import Registry
from dovetail.trainers.catalog import losses, optimizers, schedulers
from dovetail.trainers.registry import trainers

__all__ = [
    "ALGORITHM_KEYS_OF_SERVER",
    "DATA_OPTIONS",
    "IGNORED_KEYS",
    "KEYS_WITH_ARGUMENTS",
    "KINDS",
    "REGISTRIES",
    "SECTIONS",
]


def _names(value: Any) -> tuple[str, ...]:
    """Accept a list of names, or names with commas between them."""
    words: Iterable[Any] = value.split(",") if isinstance(value, str) else value
    if not isinstance(words, list) or not all(isinstance(word, str) and word.strip() for word in words):
        raise Refused("expected names such as round, accuracy")
    return tuple(word.strip() for word in words)


def _spec(value: Any) -> Any:
    """Accept a name, or a mapping of one name to its arguments."""
    if isinstance(value, Mapping) and len(value) == 1 and isinstance(next(iter(value.values())), Mapping):
        return dict(value)
    if not isinstance(value, str):
        raise Refused("expected a name, or one with what it takes, such as {trimmed_mean: {share: 0.1}}")
    return value


def _processors(value: Any) -> tuple[Any, ...]:
    """Accept names, and mappings of one name to its arguments."""
    items = value if isinstance(value, list) else [value]
    for item in items:
        one_name = isinstance(item, Mapping) and len(item) == 1 and isinstance(next(iter(item.values())), Mapping)
        if not (isinstance(item, str) or one_name):
            raise Refused("expected a list of names, such as [quantize, {clip: {max_norm: 1.0}}]")
    return tuple(items)


def _personalization(value: Any) -> dict[str, Any]:
    """Accept the number of epochs of personalization; nothing means no personalization."""
    if value is None or value == {}:
        return {}
    if not isinstance(value, Mapping) or list(value) != ["epochs"]:
        raise Refused("expected epochs, such as {epochs: 5}")
    return {"epochs": _COUNT(value["epochs"])}


def _algorithms(value: Any) -> str | tuple[Any, ...]:
    """Accept a name, or a list of names and of mappings of one name to its arguments."""
    return value if isinstance(value, str) else _processors(value)


def _keys(kind: type[Any], **checks: Check) -> dict[str, Key]:
    """Return the keys of a section with their checks, and the defaults of its dataclass."""
    default = kind()
    assert checks.keys() == kind.__dataclass_fields__.keys(), checks.keys() ^ kind.__dataclass_fields__.keys()
    return {name: Key(check, default=getattr(default, name)) for name, check in checks.items()}


_COUNT, _SHARE, _SEED = whole(1), number(0, 1), whole(0)

# The keys of each section.
SECTIONS: dict[str, dict[str, Key]] = {
    "clients": _keys(
        ClientsConfig,
        type=text,
        total_clients=_COUNT,
        per_round=_COUNT,
        do_test=flag,
        test_interval=_COUNT,
        random_seed=_SEED,
        speed_simulation=flag,
        simulation_distribution=mapping,
        avg_training_time=number(0),
        comm_simulation=flag,
        inbound_processors=_processors,
        outbound_processors=_processors,
    ),
    "server": _keys(
        ServerConfig,
        type=text,
        synchronous=flag,
        minimum_clients_aggregated=_COUNT,
        staleness_bound=whole(0),
        simulate_wall_time=flag,
        periodic_interval=number(0),
        request_update=flag,
        do_test=flag,
        random_seed=_SEED,
        checkpoint_path=text,
        states_path=text,
        downlink_bandwidth=number(0),
        uplink_bandwidth=number(0),
        backend=text,
        num_workers=_COUNT,
        min_clients=_COUNT,
        timeout=number(0),
        selection=text,
        aggregator=_spec,
    ),
    "data": _keys(
        DataConfig,
        datasource=text,
        sampler=text,
        testset_sampler=text,
        testset_size=_COUNT,
        random_seed=_SEED,
        options=mapping,
    ),
    "trainer": _keys(
        TrainerConfig,
        type=text,
        rounds=_COUNT,
        epochs=_COUNT,
        batch_size=_COUNT,
        optimizer=text,
        lr_scheduler=text,
        loss_criterion=text,
        global_lr_scheduler=flag,
        model_type=text,
        model_name=text,
        max_concurrency=_COUNT,
        target_accuracy=_SHARE,
        target_perplexity=number(0),
    ),
    "algorithm": _keys(
        AlgorithmConfig,
        type=_algorithms,
        personalization=_personalization,
        cross_silo=flag,
        total_silos=_COUNT,
        local_rounds=_COUNT,
        options=mapping,
    ),
    "parameters": _keys(
        ParametersConfig, model=mapping, optimizer=mapping, learning_rate=mapping, loss_criterion=mapping
    ),
    "results": _keys(ResultsConfig, types=_names, result_path=text, record_clients_accuracy=flag),
}

# The dataclass of each section.
KINDS: dict[str, type[Any]] = {
    "clients": ClientsConfig,
    "server": ServerConfig,
    "data": DataConfig,
    "trainer": TrainerConfig,
    "algorithm": AlgorithmConfig,
    "parameters": ParametersConfig,
    "results": ResultsConfig,
}

# Keys of the algorithm that plato has in the section `server`.
ALGORITHM_KEYS_OF_SERVER = ("mixing_hyperparameter", "adaptive_mixing", "staleness_weighting_function")

# Keys of plato about sockets, sleeping processes and downloads, which have no effect here.
IGNORED_KEYS: dict[str, frozenset[str]] = {
    "clients": frozenset({"sleep_simulation", "max_sleep_time", "compute_comm_time"}),
    "server": frozenset(
        {"address", "port", "disable_clients", "model_path", "ping_interval", "ping_timeout", "s3_endpoint_url"}
    ),
    "data": frozenset({"data_path", "download_url"}),
    "trainer": frozenset({"parallelized"}),
}

# Keys whose values are names with arguments, besides the algorithm.
KEYS_WITH_ARGUMENTS = (("clients", "inbound_processors"), ("clients", "outbound_processors"), ("server", "aggregator"))

# The registry of the names that a key accepts.
REGISTRIES: dict[tuple[str, str], Registry[Any]] = {
    ("algorithm", "type"): algorithms,
    ("clients", "inbound_processors"): postprocessors,
    ("clients", "outbound_processors"): postprocessors,
    ("data", "datasource"): datasources,
    ("data", "sampler"): partitions,
    ("data", "testset_sampler"): partitions,
    ("server", "backend"): backends,
    ("server", "selection"): selections,
    ("server", "aggregator"): aggregators,
    ("trainer", "type"): trainers,
    ("trainer", "optimizer"): optimizers,
    ("trainer", "lr_scheduler"): schedulers,
    ("trainer", "loss_criterion"): losses,
    ("trainer", "model_type"): models,
}

# The data that a partition divides among clients, and their options besides the options of the partition.
DATA_OPTIONS = {
    "digits": ("held_out",),
    "fashion_mnist": ("held_out", "folder"),
    "FashionMNIST": ("held_out", "folder"),
}
