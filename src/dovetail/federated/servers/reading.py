"""Reader of a federation's configuration file: reports all mistakes at once, each with its key."""

from __future__ import annotations

import copy
import inspect
import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from dovetail.checks import (
    Key,
    Problem,
    Problems,
    Refused,
    mapping,
    number,
    override,
    read_section,
    text,
    unknown_key,
    whole,
)
from dovetail.config import Config, load_config
from dovetail.data.models import models
from dovetail.errors import ConfigError, UnknownNameError
from dovetail.federated.algorithms.registry import algorithm_of, algorithms
from dovetail.federated.clock import Speeds
from dovetail.federated.config import (
    AlgorithmConfig,
    ClientsConfig,
    FederatedConfig,
    ServerConfig,
)
from dovetail.federated.data.partition import Partition, option_names, option_of, partitions
from dovetail.federated.data.shrinking import shrunk
from dovetail.federated.servers.plato_files import NOT_SUPPORTED, translate
from dovetail.federated.servers.schema import (
    ALGORITHM_KEYS_OF_SERVER,
    DATA_OPTIONS,
    IGNORED_KEYS,
    KEYS_WITH_ARGUMENTS,
    KINDS,
    REGISTRIES,
    SECTIONS,
)
from dovetail.federated.specs import build_problems, checks_of, spec_problems

__all__ = ["read_federated"]


def read_federated(
    source: str | os.PathLike[str] | Mapping[str, Any], overrides: Sequence[str] = ()
) -> FederatedConfig:
    """Return the configuration that a file or a mapping describes.

    Keys of plato that are spelled otherwise here are read, and those that have no effect here are listed in one
    warning. A value of a file may be `!include other.yml`, with a file in the same folder or below it.

    Args:
        source: A YAML file, or its values; values from `load_config` include line numbers for messages.
        overrides: Settings such as `trainer.rounds=4`, with the value written as in a file.

    Raises:
        ConfigErrors: All mistakes, each with its key, and its line if the file has lines.
        ConfigError: The file cannot be read, or is no YAML.

    Example:
        >>> config = read_federated({"clients": {"total_clients": 20}, "trainer": {"rounds": 3, "epochs": 2}})
        >>> config.clients.total_clients, config.trainer.epochs
        (20, 2)
    """
    path = None if isinstance(source, Mapping) else os.fspath(source)
    config: Any
    if isinstance(source, Mapping):
        config = copy.deepcopy(source if isinstance(source, Config) else dict(source))
    else:
        config = _load(os.fspath(source))
    # Phase 1: the file, with the overrides of the command line on top of it.
    given: dict[tuple[str | int, ...], str] = {}
    misset = [problem for setting in overrides for problem in override(config, setting, given)]
    problems = Problems(config, given)
    problems.extend(misset)
    # Phase 2: each section, its keys and its values. Every mistake is collected.
    ignored: list[str] = []
    lost, chosen = translate(config)
    sections = {name: _section(config, name, keys, problems, ignored, lost) for name, keys in SECTIONS.items()}
    for name in config:
        if name == "general":
            ignored.append(name)
        elif name not in SECTIONS:
            problems.extend([unknown_key(name, [*SECTIONS, "general"])])
    _check_names(sections, problems, lost)
    # Phase 3: objects are built only from valid values, otherwise one mistake would be reported twice.
    if not len(problems):
        _check_pieces(config, sections, problems)
    problems.raise_any()
    # Phase 4: one warning per kind of key that has no effect, or has another effect than its name suggests.
    where = f"{path}: " if path is not None else ""
    for message, names in (
        ("keys without an effect here are ignored: ", ignored),
        ("keys of plato that are not supported have no effect: ", lost),
        ("as in plato's program for this file: ", chosen),
    ):
        if names:
            warnings.warn(f"{where}{message}{', '.join(names)}", UserWarning, stacklevel=2)
    trainer = sections["trainer"]
    if trainer["model_name"] is not None and trainer["model_type"] is None:
        unknown = UnknownNameError("model", trainer["model_name"], models.names())
        warnings.warn(
            f"{where}trainer.model_name: it is only a label, and the default model is trained: {unknown}; give "
            "model_type for another model",
            UserWarning,
            stacklevel=2,
        )
    return FederatedConfig(**{name: KINDS[name](**values) for name, values in sections.items()})


def _load(path: str) -> Config:
    try:
        return load_config(path, includes=True)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error


def _section(
    config: Mapping[str, Any],
    name: str,
    keys: Mapping[str, Key],
    problems: Problems,
    ignored: list[str],
    lost: list[str],
) -> dict[str, Any]:
    section = config.get(name)
    if section is None:
        section = {}
    if not isinstance(section, Mapping):
        problems.add((name,), f"expected 'key: value' lines, got {section!r}")
        section = {}
    found: list[Problem] = []
    skipped = [key for key in section if key in IGNORED_KEYS.get(name, ())]
    ignored += [f"{name}.{key}" for key in skipped]
    # In a section with free options, `_check_names` decides which of them are only plato's.
    if "options" not in keys:
        foreign = [key for key in section if key not in keys and key in NOT_SUPPORTED.get(name, ())]
        lost += [f"{name}.{key}" for key in foreign]
        skipped += foreign
    skipped += ALGORITHM_KEYS_OF_SERVER if name == "server" else ()
    free: dict[str, Any] = {}
    if "options" in keys:
        # Options of the algorithm and of the data are checked when those are built.
        free = {key: value for key, value in section.items() if key not in keys and key not in skipped}
        section = {key: value for key, value in section.items() if key not in free}
    values = read_section(section, keys, found, ignored=skipped)
    problems.extend(found, name)
    if "options" in keys:
        values["options"] = {**values.get("options", {}), **free}
    if name == "algorithm" and isinstance(server := config.get("server"), Mapping):
        values["options"] |= {key: server[key] for key in ALGORITHM_KEYS_OF_SERVER if key in server}
    return values


def _check_names(sections: Mapping[str, Mapping[str, Any]], problems: Problems, lost: list[str]) -> None:
    """Check that every name is registered."""
    clients = sections["clients"]
    if clients.get("per_round", 1) > clients.get("total_clients", 1):
        problems.add(
            ("clients", "per_round"),
            f"expected at most total_clients, which is {clients['total_clients']}, got {clients['per_round']}",
        )
    for (section, key), table in REGISTRIES.items():
        value = sections[section].get(key)
        for each in value if isinstance(value, tuple) else [value]:
            name = next(iter(each)) if isinstance(each, Mapping) else each
            if name is not None:
                try:
                    table.get(name)
                except UnknownNameError as error:
                    problems.add((section, key), str(error))
    for section, known in _known_options(sections).items():
        options = sections[section]["options"]
        foreign = {name for name in options if name not in known and name in NOT_SUPPORTED[section]}
        if section == "algorithm" and foreign <= _options_of_all():
            # These are not of a program that only plato has: the type of an algorithm of ours is missing.
            foreign = set()
        for name in list(options):
            if name in foreign:
                del options[name]
                lost.append(f"{section}.{name}")
            elif name not in known:
                # Options may be written directly in the section, so `options` is not proposed as a key.
                keys = [key for key in SECTIONS[section] if key != "options"]
                problems.extend([unknown_key(name, [*keys, *known])], section)


def _check_pieces(config: Mapping[str, Any], sections: Mapping[str, Mapping[str, Any]], problems: Problems) -> None:
    """Check the arguments of the named objects: build each once, and report its errors with their keys."""
    for section, key in KEYS_WITH_ARGUMENTS:
        pieces = sections[section][key]
        is_list = isinstance((config.get(section) or {}).get(key), list)
        for position, spec in enumerate(pieces if isinstance(pieces, tuple) else (pieces,)):
            above = (section, key, position) if is_list else (section, key)
            for problem in spec_problems(REGISTRIES[section, key], spec):
                problems.add((*above, *problem.keys), problem.sentence)
    _check_algorithm(config, sections["algorithm"], problems)
    _check_data(config, sections["data"], problems)
    clients, server = ClientsConfig(**sections["clients"]), ServerConfig(**sections["server"])
    for problem in build_problems(lambda: Speeds(clients, server), sections["server"]):
        if problem.keys:
            problems.add(("server", *problem.keys), problem.sentence)
            continue
        # The sentence starts with the key, or with the key and a parameter of the distribution.
        name, colon, rest = problem.sentence.partition(": ")
        is_named = bool(colon) and name.partition(".")[0] == "simulation_distribution"
        keys = name.split(".") if is_named else ["simulation_distribution"]
        problems.add(("clients", *keys), rest if is_named else problem.sentence)
    model = sections["trainer"]["model_type"]
    if model is not None:
        for problem in spec_problems(models, {model: sections["parameters"]["model"]}):
            problems.add(("parameters", "model", *problem.keys[1:]), problem.sentence)


def _check_algorithm(config: Mapping[str, Any], section: Mapping[str, Any], problems: Problems) -> None:
    wanted, options = section["type"], section["options"]
    if isinstance(wanted, str):
        for problem in spec_problems(algorithms, {wanted: options}):
            problems.add(_place_of_option(config, *problem.keys[1:]), problem.sentence)
        return
    found = [
        Problem((position, *problem.keys), problem.sentence)
        for position, spec in enumerate(wanted)
        if isinstance(spec, Mapping)
        for problem in spec_problems(algorithms, spec)
    ]
    for problem in found:
        problems.add(("algorithm", "type", *problem.keys), problem.sentence)
    if not found:
        chosen = AlgorithmConfig(type=wanted, options=options)
        for problem in build_problems(lambda: algorithm_of(chosen), options):
            problems.add(_place_of_option(config, *problem.keys), problem.sentence)


def _place_of_option(config: Mapping[str, Any], *keys: str | int) -> tuple[str | int, ...]:
    """Return the keys from the top of the file to an option of the algorithm."""
    if not keys:
        return ("algorithm", "type")
    place = _below(config, "algorithm", *keys)
    return ("server", *keys) if place is None else place


def _below(config: Mapping[str, Any], name: str, *keys: str | int) -> tuple[str | int, ...] | None:
    """Return the keys to an option of a section, which may be below `options`; None if it is in another section."""
    section = config.get(name) or {}
    if keys[0] in section:
        return (name, *keys)
    return (name, "options", *keys) if keys[0] in (section.get("options") or {}) else None


def _check_data(config: Mapping[str, Any], section: Mapping[str, Any], problems: Problems) -> None:
    """Check the options of the data and of their partition, and convert each to its type."""
    sampler = section["sampler"] or "iid"
    if section["datasource"] not in DATA_OPTIONS or sampler not in partitions.names():
        return
    checks = {
        "held_out": number(0, 1),
        "folder": text,
        "test_partition_size": whole(1),
        "partition_distribution": _distribution,
        **checks_of(partitions.get(sampler)),
    }
    for name, value in section["options"].items():
        try:
            section["options"][name] = checks.get(option_of(name), lambda value: value)(value)
        except Refused as refusal:
            problems.add(_below(config, "data", name) or ("data", name), f"{refusal}, got {value!r}")


def _distribution(value: Any) -> dict[str, Any]:
    try:
        # A partition of one sample is enough to find mistakes, before any data are loaded.
        shrunk(Partition.from_lists([[0]]), found := mapping(value))
    except ConfigError as error:
        raise Refused(str(error)) from error
    return found


def _options_of_all() -> set[str]:
    """Return the options that any of our algorithms takes."""
    return {it for name in algorithms.names() for it in inspect.signature(algorithms.get(name)).parameters}


def _known_options(sections: Mapping[str, Mapping[str, Any]]) -> dict[str, list[str]]:
    """Return the options of the named algorithm and data; a section is missing if any option is accepted."""
    known: dict[str, list[str]] = {}
    wanted, data = sections["algorithm"]["type"], sections["data"]
    # An algorithm that is given with its arguments is checked when it is built.
    plain = [it for it in ([wanted] if isinstance(wanted, str) else wanted) if isinstance(it, str)]
    if all(name in algorithms.names() for name in plain):
        parameters = [it for name in plain for it in inspect.signature(algorithms.get(name)).parameters.values()]
        if not any(each.kind is each.VAR_KEYWORD for each in parameters):
            known["algorithm"] = [each.name for each in parameters]
    sampler = data["sampler"] or "iid"
    if data["datasource"] in DATA_OPTIONS and sampler in partitions.names():
        known["data"] = [*DATA_OPTIONS[data["datasource"]], *option_names(sampler)]
    return known
