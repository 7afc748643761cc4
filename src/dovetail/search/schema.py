"""Configuration of an experiment or a job: its keys, checked as a whole."""

from __future__ import annotations

import copy
import os
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from dovetail.checks import (
    Key,
    Problem,
    Problems,
    Refused,
    flag,
    list_of,
    mapping,
    one_of,
    override,
    read_section,
    text,
    unit,
    whole,
)
from dovetail.config import Config, load_config, trial_length
from dovetail.errors import ConfigError
from dovetail.runtime.cores import NO_CARDS
from dovetail.search.entrypoints import is_trial_class, parse_entrypoint, trial_class_problem
from dovetail.search.searchers.base import SearcherConfig
from dovetail.search.searchers.registry import IGNORED as _IGNORED_BY_SEARCHERS
from dovetail.search.searchers.registry import read_searcher, searchers
from dovetail.search.space import Space
from dovetail.units import Batches, TrainUnit, unit_name

Policy = Literal["best", "all", "none"]

_NEVER = Batches(0)


@dataclass(frozen=True)
class StorageConfig:
    """Where checkpoints are stored, and which are kept.

    Attributes:
        folder: A folder, or None.
        url: A URL for fsspec, such as `s3://bucket/prefix`, or None. If both are None, the store's own folder is used.
        save_experiment_best: How many of the best checkpoints of all trials are kept.
        save_trial_best: How many of the best checkpoints of every trial are kept.
        save_trial_latest: How many of the newest checkpoints of every trial are kept.
    """

    folder: Path | None = None
    url: str | None = None
    save_experiment_best: int = 0
    save_trial_best: int = 1
    save_trial_latest: int = 1


@dataclass(frozen=True)
class ExperimentConfig:
    """The configuration of an experiment or a job.

    Attributes:
        name: The name for display; the name of the file if it has none.
        entrypoint: The command of a trial, in words, or its class as one word such as `model_def:MyTrial`.
        searcher: The configuration of the searcher; for a job, `single` without a metric.
        hyperparameters: The section of the file, for `Space(config.hyperparameters)`.
        description: A description for display.
        labels: Labels for display.
        project: A project for display.
        workspace: A workspace for display.
        slots: Processes per trial. `slots_per_trial: 0` means one process without graphics cards.
        cluster: `ray`, `local` or an address such as `ray://host:10001`; None means this machine, without a cluster.
        max_restarts: How often a failed trial is restarted.
        min_validation_period: How often trials validate; 0 means that the script decides.
        min_checkpoint_period: How often they save; 0 means that the script decides.
        checkpoint_policy: After which validations they save, too.
        perform_initial_validation: Whether they validate before the first batch.
        checkpoint_storage: Where their checkpoints are stored, and which are kept.
        data: The value of `context.config_data` in the script.
        seed: The seed of the searcher and of all trials; 0 by default, so that every experiment can be repeated.
        environment: Environment variables of the trials' processes.
        profiling: Whether trials are profiled.
        raw: The configuration that trials read: as given, with the changes of the command line.

    Example:
        >>> searcher = {"name": "single", "metric": "loss"}
        >>> config = read_experiment({"entrypoint": "python3 train.py", "searcher": searcher})
        >>> config.entrypoint, config.slots, config.max_restarts
        (['python3', 'train.py'], 1, 5)
    """

    name: str
    entrypoint: list[str]
    searcher: SearcherConfig
    hyperparameters: dict[str, Any] = field(default_factory=dict)
    description: str = ""
    labels: list[str] = field(default_factory=list)
    project: str = ""
    workspace: str = ""
    slots: int = 1
    cluster: str | None = None
    max_restarts: int = 5
    min_validation_period: TrainUnit = _NEVER
    min_checkpoint_period: TrainUnit = _NEVER
    checkpoint_policy: Policy = "best"
    perform_initial_validation: bool = False
    checkpoint_storage: StorageConfig = StorageConfig()
    data: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    environment: dict[str, str] = field(default_factory=dict)
    profiling: bool = False
    raw: dict[str, Any] = field(default_factory=dict)


def read_experiment(
    source: str | os.PathLike[str] | Mapping[str, Any],
    overrides: Sequence[str] = (),
    kind: Literal["trial", "job"] = "trial",
    context_dir: str | os.PathLike[str] | None = None,
) -> ExperimentConfig:
    """Read and check a configuration, and return it.

    Keys of Determined that have no effect here are listed in one warning.

    Args:
        source: A YAML file, or its values; values from `load_config` contain their positions.
        overrides: Settings such as `searcher.max_trials=4`, the value written as in a file.
        kind: Whether it is an experiment or a job, which has no hyperparameters and no searcher.
        context_dir: The folder with the code, in which a trial class is searched; None means no search.

    Raises:
        ConfigErrors: The configuration has mistakes; each is listed with its position.
        ConfigError: The file cannot be read, or is not YAML.
    """
    path = None if isinstance(source, Mapping) else source
    if isinstance(source, Mapping):
        config = copy.deepcopy(source if isinstance(source, Config) else dict(source))
    else:
        config = _load(source)
    given: dict[tuple[str | int, ...], str] = {}
    misset = [problem for setting in overrides for problem in override(config, setting, given)]
    problems = Problems(config, given)
    problems.extend(misset)
    reader = _Reader(config, problems, kind, None if context_dir is None else Path(context_dir))
    found = reader.read(Path(path).stem if path is not None else "experiment")
    problems.raise_any()
    where = f"{os.fspath(path)}: " if path is not None else ""
    if reader.ignored:
        warnings.warn(
            f"{where}keys without an effect here are ignored: {', '.join(reader.ignored)}", UserWarning, stacklevel=2
        )
    if kind == "trial" and _ends_none_early(found):
        warnings.warn(
            f"{where}min_validation_period: missing, so trials of {found.entrypoint[0]} validate only at their end, "
            f"and the searcher {found.searcher.name} stops none of them early",
            UserWarning,
            stacklevel=2,
        )
    return found


def _ends_none_early(config: ExperimentConfig) -> bool:
    """Return whether a searcher that stops trials early gets no validation before their end."""
    compares_at_times = "max_time" in config.searcher.options
    return is_trial_class(config.entrypoint) and compares_at_times and not config.min_validation_period.value


def _load(source: str | os.PathLike[str]) -> Config:
    try:
        return load_config(source)
    except OSError as error:
        raise ConfigError(f"{os.fspath(source)}: cannot be read: {error.strerror}") from error


# Accepted keys and values


def _variables(value: Any) -> dict[str, str]:
    """Accept variables as `NAME=value` items, or as a mapping."""
    if isinstance(value, list):
        items = [tuple(text(item).partition("=")) for item in value]
        if not all(equals for _, equals, _ in items):
            raise Refused("expected items such as NAME=value")
        pairs: dict[str, Any] = {name: content for name, _, content in items}
    else:
        pairs = mapping(value)
    for name, content in pairs.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise Refused(f"expected names of letters, digits and _, not {name!r},")
        if isinstance(content, (list, dict)) or content is None or "\0" in str(content):
            raise Refused(f"expected text or a number as the value of {name}")
    return {
        name: str(content).lower() if isinstance(content, bool) else str(content) for name, content in pairs.items()
    }


def _text_or_mapping(value: Any) -> Any:
    return text(value) if isinstance(value, str) else mapping(value)


def _below(value: Any) -> str:
    """Accept a relative folder inside of another folder."""
    if Path(text(value)).is_absolute() or ".." in Path(value).parts:
        raise Refused("expected a folder inside of host_path")
    return str(value)


_SECTION = Key(mapping, {})

_JOB_KEYS: dict[str, Key] = {
    "name": Key(text, None),
    "description": Key(text, ""),
    "labels": Key(list_of(text), []),
    "project": Key(text, ""),
    "workspace": Key(text, ""),
    "entrypoint": Key(parse_entrypoint, None),
    "entrypoint_script": Key(parse_entrypoint, None),
    "resources": _SECTION,
    "data": _SECTION,
    "reproducibility": _SECTION,
    "environment": _SECTION,
}

_TRIAL_KEYS: dict[str, Key] = {
    **_JOB_KEYS,
    "hyperparameters": _SECTION,
    "searcher": Key(mapping, hint="which trials to run, such as {name: single, metric: validation_loss}"),
    "max_restarts": Key(whole(0), 5),
    "min_validation_period": Key(unit(0), _NEVER),
    "min_checkpoint_period": Key(unit(0), _NEVER),
    "checkpoint_policy": Key(one_of("best", "all", "none"), "best"),
    "perform_initial_validation": Key(flag, False),
    "scheduling_unit": Key(whole(1), None),
    "checkpoint_storage": Key(_text_or_mapping, {}),
    "optimizations": _SECTION,
    "profiling": _SECTION,
}

_SECTIONS: dict[str, dict[str, Key]] = {
    "resources": {
        "slots_per_trial": Key(whole(0, 4096), None),
        "slots": Key(whole(0, 4096), None),
        "cluster": Key(text, None),
    },
    "reproducibility": {"experiment_seed": Key(whole(0, 2**32 - 1), 0)},
    "environment": {"environment_variables": Key(_variables, {})},
    "optimizations": {"aggregation_frequency": Key(whole(1), 1), "average_aggregated_gradients": Key(flag, True)},
    "profiling": {"enabled": Key(flag, False)},
}

_RETENTION = {
    "save_experiment_best": Key(whole(0), 0),
    "save_trial_best": Key(whole(0), 1),
    "save_trial_latest": Key(whole(0), 1),
}

_STORAGES: dict[str, dict[str, Key]] = {
    "shared_fs": {"host_path": Key(text), "storage_path": Key(_below, "")},
    "directory": {"container_path": Key(text)},
    "s3": {"bucket": Key(text), "prefix": Key(text, "")},
    "gcs": {"bucket": Key(text), "prefix": Key(text, "")},
    "azure": {"container": Key(text)},
    "url": {"url": Key(text)},
}

_SCHEMES = {"s3": "s3", "gcs": "gs", "azure": "az"}

_IGNORED: dict[str, tuple[str, ...]] = {
    "": (
        *(
            "bind_mounts",
            "data_layer",
            "debug",
            "integrations",
            "internal",
            "log_policies",
            "pbs",
            "preemption_timeout",
        ),
        *("records_per_epoch", "retention_policy", "security", "slurm", "tensorboard_storage"),
    ),
    "resources": (
        *("agent_label", "devices", "is_single_node", "max_slots", "native_parallel", "priority", "resource_manager"),
        *("resource_pool", "shm_size", "weight"),
    ),
    "environment": (
        *("add_capabilities", "drop_capabilities", "force_pull_image", "image", "pod_spec", "ports", "proxy_ports"),
        "registry_auth",
    ),
    "optimizations": (
        *("auto_tune_tensor_fusion", "average_training_metrics", "gradient_compression", "gradient_updates_size_file"),
        *("grad_updates_size_file", "mixed_precision", "tensor_fusion_cycle_time", "tensor_fusion_threshold"),
    ),
    "profiling": ("begin_on_batch", "end_after_batch", "sync_timings"),
    "searcher": _IGNORED_BY_SEARCHERS,
    "checkpoint_storage": (
        *("access_key", "account_url", "checkpoint_path", "connection_string", "credential", "endpoint_url"),
        *("propagation", "secret_key", "tensorboard_path"),
    ),
}
"""Keys of Determined that have no effect here, by section."""


class _Reader:
    """Reads one configuration, and collects its mistakes."""

    def __init__(self, config: Mapping[str, Any], problems: Problems, kind: str, folder: Path | None) -> None:
        self.ignored: list[str] = []
        self._config = config
        self._problems = problems
        self._is_job = kind == "job"
        self._folder = folder

    def read(self, default_name: str) -> ExperimentConfig:
        """Return the configuration; invalid values are replaced by defaults."""
        keys = _JOB_KEYS if self._is_job else _TRIAL_KEYS
        top = self._section((), self._config, keys, tuple(_TRIAL_KEYS) if self._is_job else ())
        # A missing section was reported; with an empty one, the other sections are still checked.
        if not self._is_job and "searcher" not in top:
            top["searcher"] = {}
        within = {
            name: self._section((name,), top.get(name, {}), keys) for name, keys in _SECTIONS.items() if name in top
        }
        name = top["name"] or default_name
        searcher = SearcherConfig("single", "") if self._is_job else self._searcher(top)
        slots = self._slots(within["resources"])
        units = {"max_length": searcher.max_length, **{key: top.get(key) for key in _PERIODS}}
        return ExperimentConfig(
            name=name,
            entrypoint=self._entrypoint(top),
            searcher=searcher,
            hyperparameters=top.get("hyperparameters", {}),
            slots=max(slots, 1),
            cluster=within["resources"]["cluster"],
            checkpoint_storage=self._storage(top.get("checkpoint_storage", {})),
            seed=within["reproducibility"]["experiment_seed"],
            environment=({} if slots else NO_CARDS) | within["environment"]["environment_variables"],
            profiling=within.get("profiling", {}).get("enabled", False),
            raw=self._raw(name, units, within),
            **{name: top[name] for name in _PLAIN if name in top},
        )

    def _section(
        self, above: tuple[str, ...], section: Mapping[str, Any], keys: Mapping[str, Key], also: tuple[str, ...] = ()
    ) -> dict[str, Any]:
        ignored = {*_IGNORED.get(".".join(above), ()), *also} - keys.keys()
        found: list[Problem] = []
        values = read_section(section, keys, found, ignored)
        self._problems.extend(found, *above)
        self.ignored += [".".join((*above, name)) for name in section if name in ignored]
        return values

    def _entrypoint(self, top: Mapping[str, Any]) -> list[str]:
        names = [name for name in ("entrypoint", "entrypoint_script") if self._config.get(name) is not None]
        if len(names) == 2:
            self._problems.add(("entrypoint_script",), "the same as entrypoint: expected one of them, got both")
        if not names:
            self._problems.add(("entrypoint",), "missing: the command of a trial, such as python3 train.py")
        words: list[str] = top["entrypoint"] or top["entrypoint_script"] or []
        if is_trial_class(words):
            self._check_trial_class((names[0],), words[0])
        elif top.get("scheduling_unit") is not None:
            # A script passes its reporting period to `fit` itself.
            self.ignored.insert(0, "scheduling_unit")
        return words

    def _check_trial_class(self, place: tuple[str], name: str) -> None:
        if self._is_job:
            self._problems.add(place, f"expected a command such as python3 predict.py: a job does not train {name}")
            return
        problem = None if self._folder is None else trial_class_problem(name, self._folder)
        if problem is not None:
            self._problems.add(place, problem)
        try:
            has_length = trial_length(self._config) is not None
        except ConfigError:
            # The reader of the searcher has reported the mistake.
            return
        if not has_length:
            self._problems.add(
                ("searcher", "max_length"),
                f"missing: how long a trial of {name} trains, such as {{epochs: 10}}, because no script gives it",
            )

    def _slots(self, resources: Mapping[str, Any]) -> int:
        per_trial, slots = resources["slots_per_trial"], resources["slots"]
        if per_trial is not None and slots is not None:
            self._problems.add(("resources", "slots"), "the same as slots_per_trial: expected one of them, got both")
        given = per_trial if per_trial is not None else slots
        return 1 if given is None else int(given)

    def _searcher(self, top: Mapping[str, Any]) -> SearcherConfig:
        found: list[Problem] = []
        space = Space(top["hyperparameters"], found)
        self._problems.extend(found, "hyperparameters")
        if self._config.get("searcher") is None or not isinstance(self._config["searcher"], Mapping):
            return SearcherConfig("single", "")
        self.ignored += [f"searcher.{name}" for name in top["searcher"] if name in _IGNORED["searcher"]]
        misread: list[Problem] = []
        searcher = read_searcher(top["searcher"], misread)
        self._problems.extend(misread, "searcher")
        # Combined checks need a valid space and valid options; otherwise they would report consequences of one
        # mistake.
        if not found and not misread:
            self._problems.extend(searchers.get(searcher.name).problems(searcher, space))
        return searcher

    def _storage(self, given: str | Mapping[str, Any]) -> StorageConfig:
        if isinstance(given, str):
            return StorageConfig(url=given) if "://" in given else StorageConfig(Path(given))
        if not given:
            return StorageConfig()
        kind = given.get("type", "shared_fs")
        places = _STORAGES.get(kind, {}) if isinstance(kind, str) else {}
        if "type" not in given and not given.keys() & places.keys():
            # The section only says which checkpoints are kept: the folder is the store's own.
            places = {name: Key(key.check, None) for name, key in places.items()}
        # With an unknown type, keys of any storage are accepted, so that only the type is reported.
        elsewhere = {name for keys in _STORAGES.values() for name in keys} if not places else {"container_path"}
        known = {"type": Key(one_of(*_STORAGES), "shared_fs"), **_RETENTION, **places}
        values = self._section(("checkpoint_storage",), given, known, tuple(elsewhere))
        kept = {name: values[name] for name in _RETENTION}
        if places.keys() - values.keys() or not any(values.get(name) for name in places):
            return StorageConfig(**kept)
        if kind == "shared_fs":
            return StorageConfig(Path(values["host_path"], values["storage_path"]), **kept)
        if kind == "directory":
            return StorageConfig(Path(values["container_path"]), **kept)
        if kind == "url":
            return StorageConfig(url=values["url"], **kept)
        parts = [values.get("bucket") or values["container"], values.get("prefix", "").strip("/")]
        return StorageConfig(url=f"{_SCHEMES[kind]}://{'/'.join(filter(None, parts))}", **kept)

    def _raw(self, name: str, units: Mapping[str, TrainUnit | None], within: Mapping[str, Any]) -> dict[str, Any]:
        """Return the configuration that trials read: with values in one form, and without null values."""
        # A null in a file means the default, as a missing key does.
        raw = {key: copy.deepcopy(value) for key, value in self._config.items() if value is not None}
        for section in raw.keys() & {*within, "searcher"}:
            if isinstance(raw[section], dict):
                checked = within.get(section, {})
                raw[section] = {
                    key: checked.get(key, value) for key, value in raw[section].items() if value is not None
                }
        for key, length in units.items():
            above = raw.get("searcher") if key == "max_length" else raw
            if length is not None and isinstance(above, dict) and key in above:
                above[key] = {unit_name(length): length.length}
        return {"name": name, **raw}


_PERIODS = ("min_validation_period", "min_checkpoint_period")
_PLAIN = (
    *("description", "labels", "project", "workspace", "max_restarts", *_PERIODS),
    *("checkpoint_policy", "perform_initial_validation", "data"),
)
"""The keys whose values are used unchanged as fields."""
