"""Which trial this process is: what whoever launched it has written down for it.

The environment variable `DOVETAIL_TRIAL` names a JSON file with the fields of `TrialInfo`. Without it a process is
nobody's trial, and `get_cluster_info` returns None. This module starts without torch.
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
"""The environment variable that names the file."""

ATTEMPT = "DOVETAIL_ATTEMPT"
"""The environment variable that names the folder of this start of a trial, to all processes that belong to it."""

PREEMPTED = "preempted"
"""The file in that folder by which a script says that it leaves because it was asked to, and not because it is done."""

HPARAMS_READ = "hparams_read"
"""The file in that folder which exists once the script has read its hyperparameters by this library."""

TEST_MODE = "DOVETAIL_TEST_MODE"
"""The environment variable that makes a trial try one batch only, if it is set."""


@dataclass(frozen=True)
class TrialInfo:
    """What a process knows about its trial.

    Attributes:
        trial_id: The number of the trial.
        experiment_id: The number of the experiment that it belongs to, or None.
        hparams: Its hyperparameters.
        config: The whole configuration of its experiment.
        user_data: What that configuration has under `data`.
        latest_checkpoint: The checkpoint that it goes on from, or None.
        trial_seed: The seed of all its randomness, or None.
        kind: `"trial"`, or `"job"` for a program that does not train.
        slots: How many processes it has.
        directory: Where it keeps checkpoints and metrics; None leaves that to the program.

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
        # The runner of an experiment fails a trial that never reads what the searcher chose for it.
        if name == "hparams":
            note_hparams_read()
        return super().__getattribute__(name)

    if not TYPE_CHECKING:
        # Type checkers would accept any name.
        def __getattr__(self, name: str) -> Any:
            instead = ": there is no master and no agent" if name in _OF_A_MASTER else ""
            raise AttributeError(f"the info of a trial has no {name!r}{instead}")

    @property
    def trial(self) -> TrialInfo:
        """This object: Determined's scripts say `info.trial.hparams`."""
        return self

    @property
    def slot_ids(self) -> list[int]:
        """The numbers of the slots: one for each process."""
        return list(range(self.slots))

    @property
    def container_addrs(self) -> list[str]:
        """The addresses of the machines: the only one, because a trial has one."""
        return ["127.0.0.1"]

    @property
    def container_rank(self) -> int:
        """The number of this machine among them."""
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
        """The whole configuration: many of Determined's scripts read it by this name."""
        return self.config


_OF_A_MASTER = {
    *("agent_id", "allocation_id", "cluster_id", "gpu_uuids", "master_cert_file", "master_cert_name", "master_url"),
    *("session_token", "task_id"),
}

ClusterInfo = TrialInfo
"""Determined has two classes: this one, and the one of `info.trial`."""


def get_cluster_info() -> TrialInfo | None:
    """Return what this process was told about its trial, or None if nobody has launched it as one.

    Raises:
        ConfigError: The file is not there, damaged, or none that `write_info` writes.
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


_noted: set[str] = set()


def unnoticed_hparams(info: TrialInfo) -> dict[str, Any]:
    """Return the hyperparameters for the library's own use, which does not count as reading by the script."""
    found: dict[str, Any] = vars(info)["hparams"]
    return found


def _read_unnoticed(path: str) -> bytes:
    """Return the content of a file without a change of its access time, where the system can do so.

    From the access time the runner infers that a script has read the file without this library.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOATIME", 0))
    except PermissionError:
        # Only the owner of a file may leave its access time alone.
        descriptor = os.open(path, os.O_RDONLY)
    with open(descriptor, "rb") as file:
        return file.read()


def write_info(path: str | os.PathLike[str], info: TrialInfo) -> None:
    """Write what `get_cluster_info` reads in the processes whose `DOVETAIL_TRIAL` names this file.

    Raises:
        ConfigError: Hyperparameters, configuration or data hold something that is not JSON.
    """
    try:
        text = json.dumps(dataclasses.asdict(info), indent=2)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the description of trial {info.trial_id} cannot be written as JSON: {error}") from error
    # Renamed into place: a process that reads it meanwhile sees all or nothing.
    unfinished = Path(f"{os.fspath(path)}.tmp")
    # For its owner alone: a configuration may say what is nobody else's business.
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
"""What each field is, and whether it may be None."""


def _checked(content: Any, where: str) -> TrialInfo:
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
