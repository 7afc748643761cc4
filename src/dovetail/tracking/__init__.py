"""Experiment tracking with TensorBoard, Weights & Biases, Trackio, Comet, Neptune, MLflow and plain files."""

from __future__ import annotations

from dovetail.tracking.base import Histogram, Logger, Run, Status, Value
from dovetail.tracking.comet import CometLogger
from dovetail.tracking.files import FolderLogger
from dovetail.tracking.mlflow import MLflowLogger
from dovetail.tracking.neptune import NeptuneLogger
from dovetail.tracking.tensorboard import TensorBoardLogger
from dovetail.tracking.tracker import Tracker
from dovetail.tracking.trackio import TrackioLogger
from dovetail.tracking.wandb import WandBLogger

__all__ = [
    "CometLogger",
    "FolderLogger",
    "Histogram",
    "Logger",
    "MLflowLogger",
    "NeptuneLogger",
    "Run",
    "Status",
    "TensorBoardLogger",
    "Tracker",
    "TrackioLogger",
    "Value",
    "WandBLogger",
]
