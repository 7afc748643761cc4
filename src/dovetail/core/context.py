"""Core context: the object with which a script that has its own training loop uses this library."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dovetail.core.checkpoint import CheckpointContext, storage_directory
from dovetail.core.distributed import DistributedContext
from dovetail.core.preempt import PreemptContext, PreemptMode
from dovetail.core.train import AlertLevel, EarlyExitReason, TensorboardMode, TrainContext
from dovetail.errors import InvalidHP
from dovetail.info import TrialInfo, get_cluster_info

_MISSING = {
    "experimental": "there is no master that links a trial to a model of its registry",
    "searcher": "a script decides how long it trains, and reports its metrics with train.report_validation_metrics",
    "profiler": "use torch.profiler and write to train.get_tensorboard_path()",
}


@dataclass(eq=False, repr=False)
class Context:
    """Checkpoints, processes, preemption and reports of a script with its own training loop.

    In a `with` block it receives signals. At the end of the block it restores the signal handlers and leaves the group
    of processes. If the block ends with `InvalidHP`, this is reported as the reason of the exit.

    Attributes:
        checkpoint: Stores the files of the script.
        distributed: The processes of the run.
        preempt: Reports whether the script was requested to exit.
        train: Reports metrics, progress, status and alerts.
        info: The trial that this process was launched for, or None.

    Example:
        >>> import tempfile
        >>> with init(checkpoint_storage=tempfile.mkdtemp()) as context:
        ...     context.train.report_training_metrics(1, {"loss": 0.5})
        ...     context.preempt.should_preempt()
        False
    """

    checkpoint: CheckpointContext
    distributed: DistributedContext
    preempt: PreemptContext
    train: TrainContext
    info: TrialInfo | None

    def __getattr__(self, name: str) -> Any:
        instead = f": {_MISSING[name]}" if name in _MISSING else ""
        raise AttributeError(f"the core context has no {name!r}{instead}")

    def __enter__(self) -> Context:
        self.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, InvalidHP):
            self.train.report_early_exit(EarlyExitReason.INVALID_HP)
        self.close(error)

    def start(self) -> None:
        """Install the signal handlers, as the start of a `with` block does."""
        self.preempt.start()

    def alert(
        self, title: str | None = None, description: str | None = None, level: AlertLevel | None = "info"
    ) -> None:
        """Log an alert and record it, like `train.alert`."""
        self.train.alert(title, description, level)

    def close(self, error: BaseException | None = None) -> None:
        """Restore the signal handlers and leave the group; the other processes receive the error, if any."""
        self.preempt.close()
        self.distributed.close(error)


def init(
    *,
    distributed: DistributedContext | None = None,
    checkpoint_storage: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    preempt_mode: PreemptMode = PreemptMode.WorkersAskChief,
    tensorboard_mode: TensorboardMode = TensorboardMode.AUTO,
) -> Context:
    """Return the context of a script with its own training loop.

    Args:
        distributed: The processes of the run; None means the processes of `torchrun`, or only this one.
        checkpoint_storage: The folder of the checkpoints: a path, or a mapping such as `checkpoint_storage` of
            Determined's configuration. None means the folder of the trial if the launcher has set one, else the
            `checkpoint_storage` of the configuration, else `checkpoints`. Metrics are written to the trial's folder, or
            else to the folder of the checkpoints.
        preempt_mode: Which processes are notified when the script should exit.
        tensorboard_mode: Accepted for Determined's scripts, without effect: files are never uploaded.

    Example:
        >>> import tempfile
        >>> context = init(checkpoint_storage=tempfile.mkdtemp())
        >>> context.info is None, context.distributed.size
        (True, 1)
    """
    # Raises for an unknown value.
    TensorboardMode(tensorboard_mode)
    info = get_cluster_info()
    given = info.directory if info is not None else None
    # The folder of the launcher is more specific than the configuration, which is shared by all trials.
    storage = checkpoint_storage or given or (info.config.get("checkpoint_storage") if info is not None else None)
    folder = storage_directory(storage or "checkpoints")
    peers = DistributedContext.from_environment() if distributed is None else distributed
    return Context(
        CheckpointContext(folder, peers),
        peers,
        PreemptContext(peers, preempt_mode),
        TrainContext(given or folder, is_chief=peers.is_chief, info=info),
        info,
    )
