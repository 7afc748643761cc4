"""Core API for scripts with their own training loop: checkpoints, metrics, preemption, messages. Determined's names."""

from __future__ import annotations

from dovetail.core.checkpoint import CheckpointContext, DownloadMode, storage_directory
from dovetail.core.context import Context, init
from dovetail.core.distributed import DistributedContext
from dovetail.core.preempt import PreemptContext, PreemptMode
from dovetail.core.train import METRICS, EarlyExitReason, ExitedReason, TensorboardMode, TrainContext, read_metrics

__all__ = [
    "METRICS",
    "CheckpointContext",
    "Context",
    "DistributedContext",
    "DownloadMode",
    "EarlyExitReason",
    "ExitedReason",
    "PreemptContext",
    "PreemptMode",
    "TensorboardMode",
    "TrainContext",
    "init",
    "read_metrics",
    "storage_directory",
]
