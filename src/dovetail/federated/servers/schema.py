"""Keys of a federation's configuration file: each section, its keys, and the check of each value."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from dovetail.checks import Check, Key, Refused, flag, mapping, number, text, whole
from dovetail.data.models import models
from dovetail.federated.algorithms.registry import algorithms
from dovetail.federated.backends.registry import backends
from dovetail.federated.config import FederatedConfig
from dovetail.federated.data.partition import partitions
from dovetail.federated.data.sources import datasources
from dovetail.federated.postprocess.registry import postprocessors
from dovetail.federated.robust import aggregators
from dovetail.federated.selection import selections
from dovetail.registry import Registry
from dovetail.trainers.catalog import losses, optimizers, schedulers
from dovetail.trainers.registry import trainers


def _names(value: Any) -> tuple[str, ...]:
    """Accept a list of names, or names with commas between them."""
    words: Iterable[Any] = value.split(",") if isinstance(value, str) else value
    if not isinstance(words, list) or not all(isinstance(word, str) and word.strip() for word in words):
        raise Refused("expected names such as round, accuracy")
    return tuple(word.strip() for word in words)


def _spec(value: Any) -> Any:
    """Accept a name, or a mapping of one name to its arguments."""
    if not _is_spec(value):
        raise Refused("expected a name, or one with what it takes, such as {trimmed_mean: {share: 0.1}}")
    return value if isinstance(value, str) else dict(value)


def _processors(value: Any) -> tuple[Any, ...]:
    """Accept names, and mappings of one name to its arguments."""
    items = value if isinstance(value, list) else [value]
    if not all(map(_is_spec, items)):
        raise Refused("expected a list of names, such as [quantize, {clip: {max_norm: 1.0}}]")
    return tuple(items)


def _is_spec(value: Any) -> bool:
    if isinstance(value, Mapping):
        return len(value) == 1 and isinstance(next(iter(value.values())), Mapping)
    return isinstance(value, str)


def _personalization(value: Any) -> dict[str, Any]:
    """Accept the epochs of personalization and the share of clients in rounds; nothing means no personalization."""
    checks = {"epochs": whole(1), "participating_client_ratio": number(0, 1)}
    if value is None or value == {}:
        return {}
    if not isinstance(value, Mapping) or not value.keys() <= checks.keys():
        raise Refused("expected epochs or participating_client_ratio, such as {epochs: 5}")
    return {name: checks[name](given) for name, given in value.items()}


def _algorithms(value: Any) -> str | tuple[Any, ...]:
    """Accept a name, or a list of names and of mappings of one name to its arguments."""
    return value if isinstance(value, str) else _processors(value)


_SEED = whole(0)
# The check of a key by the type of its field, and of the keys whose check is another one.
_BY_TYPE: dict[str, Check] = {
    "bool": flag,
    "int": whole(1),
    "float": number(0),
    "str": text,
    "Mapping[str, Any]": mapping,
}
_CHECKS: dict[str, dict[str, Check]] = {
    "clients": {"random_seed": _SEED, "inbound_processors": _processors, "outbound_processors": _processors},
    "server": {"random_seed": _SEED, "staleness_bound": _SEED, "aggregator": _spec, "selection": _spec},
    "data": {"random_seed": _SEED},
    "trainer": {"target_accuracy": number(0, 1)},
    "algorithm": {"type": _algorithms, "personalization": _personalization},
    "results": {"types": _names},
}

# The dataclass of each section.
KINDS: dict[str, type[Any]] = {name: type(default) for name, default in vars(FederatedConfig()).items()}


def _keys(section: str) -> dict[str, Key]:
    """Return the keys of a section with their checks, and the defaults of its dataclass."""
    default, checks = KINDS[section](), _CHECKS.get(section, {})
    return {
        each.name: Key(
            # A field of another type raises a KeyError here, at import: the author of the field must choose a check.
            checks.get(each.name) or _BY_TYPE[str(each.type).removesuffix(" | None")],
            default=getattr(default, each.name),
        )
        for each in fields(default)
    }


# The keys of each section.
SECTIONS: dict[str, dict[str, Key]] = {name: _keys(name) for name in KINDS}

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
KEYS_WITH_ARGUMENTS = (
    ("clients", "inbound_processors"),
    ("clients", "outbound_processors"),
    ("server", "aggregator"),
    ("server", "selection"),
)

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

_OF_ALL = ("held_out", "partition_distribution", "test_partition_size")
# The data that a partition divides among clients, and their options besides the options of the partition.
DATA_OPTIONS = {
    "digits": _OF_ALL,
    "fashion_mnist": (*_OF_ALL, "folder"),
    "FashionMNIST": (*_OF_ALL, "folder"),
}
