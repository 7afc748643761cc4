"""Information about the trial of this process, which the launcher writes to a file.

The environment variable `DOVETAIL_TRIAL` is the path of a JSON file with the fields of `TrialInfo`. If it is not set,
the process is not a trial, and `get_cluster_info` returns None. This module does not import torch.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dovetail.errors import ConfigError, UnknownNameError

__all__ = [
    "ATTEMPT",
    "HPARAMS_READ",
    "PREEMPTED",
    "TEST_MODE",
    "VARIABLE",
    "ClusterInfo",
    "TrialInfo",
    "get_cluster_info",
    "note_hparams_read",
    "unnoticed_hparams",
    "write_info",
]

VARIABLE = "DOVETAIL_TRIAL"
"""The environment variable with the path of the file."""

ATTEMPT = "DOVETAIL_ATTEMPT"
"""The environment variable with the folder of this attempt of a trial, for all of its processes."""

PREEMPTED = "preempted"
"""A file in that folder. A script creates it if it exits because of an exit request and not because it is done."""

HPARAMS_READ = "hparams_read"
"""A file in that folder. It exists once the script has read its hyperparameters with this library."""

TEST_MODE = "DOVETAIL_TEST_MODE"
"""The environment variable that, if set, makes a trial run one batch only."""


@dataclass(frozen=True)
class TrialInfo:
    """Information about the trial of this process.

    Attributes:
        trial_id: The number of the trial.
        experiment_id: The number of the experiment that it belongs to, or None.
        hparams: Its hyperparameters.
        config: The whole configuration of its experiment.
        user_data: The section `data` of that configuration.
        latest_checkpoint: The checkpoint to resume from, or None.
        trial_seed: The seed of the trial, or None.
        kind: `"trial"`, or `"job"` for a program that does not train.
        slots: The number of processes.
        directory: The folder for checkpoints and metrics; None means that the program chooses it.

    Example:
        >>> info = TrialInfo(trial_id=7, hparams={"learning_rate": 0.1})
        >>> info.trial.hparams["learning_rate"], info.latest_checkpoint
        (0.1, None)
    """

    trial_id: int
    experiment_id: int | None = None
    hparams: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    user_data: dict[str, Any] = field(default_factory=dict)
    latest_checkpoint: str | None = None
    trial_seed: int | None = None
    kind: Literal["trial", "job"] = "trial"
    slots: int = 1
    directory: str | None = None

    def __getattribute__(self, name: str) -> Any:
        # A trial that never reads the hyperparameters of the searcher is an error, which the runner reports.
        if name == "hparams":
            note_hparams_read()
        return super().__getattribute__(name)

    if not TYPE_CHECKING:
        # Otherwise type checkers would accept any name.
        def __getattr__(self, name: str) -> Any:
            instead = ": there is no master and no agent" if name in _OF_A_MASTER else ""
            raise AttributeError(f"the info of a trial has no {name!r}{instead}")

    @property
    def trial(self) -> TrialInfo:
        """This object: scripts for Determined use `info.trial.hparams`."""
        return self

    @property
    def slot_ids(self) -> list[int]:
        """The numbers of the slots: one for each process."""
        return list(range(self.slots))

    @property
    def container_addrs(self) -> list[str]:
        """The addresses of the machines: one, because a trial runs on one machine."""
        return ["127.0.0.1"]

    @property
    def container_rank(self) -> int:
        """The number of this machine, from 0."""
        return 0

    @property
    def container_slot_counts(self) -> list[int]:
        """The number of slots of each machine."""
        return [self.slots]

    @property
    def task_type(self) -> str:
        """`"TRIAL"`, or `"COMMAND"` for a job."""
        return "TRIAL" if self.kind == "trial" else "COMMAND"

    @property
    def _config(self) -> dict[str, Any]:
        """The whole configuration: many scripts for Determined use this name."""
        return self.config


# Names in Determined's class that describe its servers.
_OF_A_MASTER = {
    *("agent_id", "allocation_id", "cluster_id", "gpu_uuids", "master_cert_file", "master_cert_name", "master_url"),
    *("session_token", "task_id"),
}

ClusterInfo = TrialInfo
"""Determined has two classes: this one, and the class of `info.trial`."""


def get_cluster_info() -> TrialInfo | None:
    """Return information about the trial of this process, or None if it was not launched as a trial.

    Raises:
        ConfigError: The file does not exist, is damaged, or was not written by `write_info`.
    """
    path = os.environ.get(VARIABLE)
    if path is None:
        return None
    where = f"{path} (named by {VARIABLE})"
    try:
        content = json.loads(_read_unnoticed(path).decode("utf-8"))
    except OSError as error:
        raise ConfigError(f"{where}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not valid JSON: {error}") from error
    return _checked(content, where)


def note_hparams_read() -> None:
    """Record, for the runner of the experiment, that this trial has read its hyperparameters."""
    folder = os.environ.get(ATTEMPT)
    if folder is not None and folder not in _noted:
        _noted.add(folder)
        with suppress(OSError):
            Path(folder, HPARAMS_READ).touch()


# Folders of attempts that have the file, so that it is written once and not at every read.
_noted: set[str] = set()


def unnoticed_hparams(info: TrialInfo) -> dict[str, Any]:
    """Return the hyperparameters for internal use; this does not count as a read by the script."""
    found: dict[str, Any] = vars(info)["hparams"]
    return found


def _read_unnoticed(path: str) -> bytes:
    """Return the content of a file and leave its access time unchanged, if the system supports this.

    A changed access time shows the runner that a script has read the file without this library.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOATIME", 0))
    except PermissionError:
        # Only the owner of a file may read it without changing its access time.
        descriptor = os.open(path, os.O_RDONLY)
    with open(descriptor, "rb") as file:
        return file.read()


def write_info(path: str | os.PathLike[str], info: TrialInfo) -> None:
    """Write the file that `get_cluster_info` reads in processes whose `DOVETAIL_TRIAL` is this path.

    Raises:
        ConfigError: Hyperparameters, configuration or data contain a value that JSON cannot represent.
    """
    try:
        text = json.dumps(dataclasses.asdict(info), indent=2)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the description of trial {info.trial_id} cannot be written as JSON: {error}") from error
    # Rename it into place: a process that reads it meanwhile gets all of it or nothing.
    unfinished = Path(f"{os.fspath(path)}.tmp")
    # Only the owner may read it: a configuration may contain secrets.
    unfinished.touch(mode=0o600)
    unfinished.write_text(text + "\n", encoding="utf-8")
    unfinished.replace(path)


_INTEGER, _TEXT, _MAPPING = "a whole number", "text", "a mapping"
_TYPES: Mapping[str, tuple[str, bool]] = {
    "trial_id": (_INTEGER, False),
    "experiment_id": (_INTEGER, True),
    "hparams": (_MAPPING, False),
    "config": (_MAPPING, False),
    "user_data": (_MAPPING, False),
    "latest_checkpoint": (_TEXT, True),
    "trial_seed": (_INTEGER, True),
    "kind": (_TEXT, False),
    "slots": (_INTEGER, False),
    "directory": (_TEXT, True),
}
"""The type of each field, and whether it may be None."""


def _checked(content: Any, where: str) -> TrialInfo:
    """Return the information of a parsed file; raise if a field is missing, unknown or of the wrong type."""
    if not isinstance(content, dict):
        raise ConfigError(f"{where}: expected the fields of a trial, got {type(content).__name__}")
    for name in content.keys() - _TYPES.keys():
        raise UnknownNameError(f"field of {where}", name, _TYPES)
    if missing := sorted(_TYPES.keys() - content.keys()):
        raise ConfigError(f"{where}: missing {', '.join(missing)}")
    for name, (kind, may_be_none) in _TYPES.items():
        value = content[name]
        if _kind(value) != kind and not (value is None and may_be_none):
            raise ConfigError(f"{where}: {name}: expected {kind}{' or null' if may_be_none else ''}, got {value!r}")
    if content["kind"] not in ("trial", "job"):
        raise UnknownNameError(f"kind in {where}", content["kind"], ("trial", "job"))
    if content["slots"] < 1:
        raise ConfigError(f"{where}: slots: expected at least 1, got {content['slots']}")
    return TrialInfo(**content)


def _kind(value: object) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return _INTEGER
    if isinstance(value, str):
        return _TEXT
    return _MAPPING if isinstance(value, dict) else "something else"
