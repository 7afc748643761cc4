"""Command, environment, seed and backend of a trial or a job."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from dovetail.errors import ConfigError
from dovetail.info import VARIABLE
from dovetail.runtime.seeds import derive_seed
from dovetail.search.entrypoints import TORCH_LAUNCHER, is_trial_class, split_python
from dovetail.search.processes import Backend, LocalBackend
from dovetail.search.schema import ExperimentConfig
from dovetail.search.secrets import masked_url
from dovetail.search.store import HOME


def command_of(entrypoint: Sequence[str], slots: int) -> list[str]:
    """Return the command of a trial: `python` is replaced by this Python, and a launcher is added if it is needed.

    Example:
        >>> command_of(["python3", "-u", "train.py"], slots=2)[1:]
        ['-u', '-m', 'dovetail.launch', '--slots', '2', 'train.py']
        >>> command_of(["model_def:MyTrial"], slots=1)[1:]
        ['-m', 'dovetail.launch', '--slots', '1', 'model_def:MyTrial']
        >>> command_of(["./train.sh"], slots=2)
        ['./train.sh']
    """
    launcher = ["-m", "dovetail.launch", "--slots", str(slots)]
    if is_trial_class(entrypoint):
        return [sys.executable, *launcher, *entrypoint]
    python, rest = split_python(entrypoint)
    if not python:
        return rest
    options = python[1:]
    if rest[:2] == ["-m", TORCH_LAUNCHER]:
        # Set the variables of a group also for one process, because scripts for that launcher read them.
        return [sys.executable, *options, *launcher, *(["--group"] if slots == 1 else []), *rest[2:]]
    # Code on the command line cannot be passed to a launcher, and a launcher must not start another one.
    launches = rest[:1] in (["-c"], ["-"]) or rest[:2] in (["-m", "dovetail.launch"], ["-m", "torch.distributed.run"])
    return [sys.executable, *options, *(launcher if slots > 1 and rest and not launches else []), *rest]


def variables_of(config: ExperimentConfig, home: Path, info: Path) -> dict[str, str]:
    """Return the environment variables of a trial or a job, in addition to this process's own."""
    # Unbuffered, so that the log contains all lines of a killed process.
    return {"PYTHONUNBUFFERED": "1", **config.environment, VARIABLE: str(info), HOME: str(home)}


def trial_seed(seed: int, number: int) -> int:
    """Return the seed of a trial, which depends only on the experiment's seed and the trial's number."""
    return derive_seed(seed, number, rule="trial")


def backend_for(config: ExperimentConfig, concurrent: int) -> Backend:
    """Return the backend of a configuration, for at most `concurrent` trials at the same time.

    Raises:
        ConfigError: The configuration copies checkpoints to a URL without a cluster.
    """
    if config.cluster is None:
        if config.checkpoint_storage.url is not None:
            place = masked_url(config.checkpoint_storage.url)
            raise ConfigError(
                f"checkpoint_storage: {place!r} is a URL, to which only a cluster copies checkpoints: "
                "give a folder, or resources.cluster"
            )
        return LocalBackend(concurrent=concurrent)
    from dovetail.search.cluster import RayBackend

    return RayBackend(config.cluster, config.checkpoint_storage.url)
