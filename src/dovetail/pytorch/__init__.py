"""PyTorch trials: one class with a model, its optimizers and its data, trained by the common training loop."""

from __future__ import annotations

from dovetail.errors import InvalidHP
from dovetail.pytorch import samplers
from dovetail.pytorch.adapter import TrialTrainer
from dovetail.pytorch.batch_process import TorchBatchProcessor, TorchBatchProcessorContext, torch_batch_process
from dovetail.pytorch.callback import PyTorchCallback
from dovetail.pytorch.context import PyTorchTrialContext, init
from dovetail.pytorch.data import DataLoader, TorchData, data_length, to_device
from dovetail.pytorch.loading import load_trial_from_checkpoint_path
from dovetail.pytorch.lr_scheduler import LRScheduler
from dovetail.pytorch.reducer import MetricReducer, Reducer
from dovetail.pytorch.tensorboard import TorchWriter
from dovetail.pytorch.trainer import Trainer
from dovetail.pytorch.trial import PyTorchTrial
from dovetail.units import Batch, Batches, Epoch, Epochs, Record, Records, TrainUnit

__all__ = [
    "Batch",
    "Batches",
    "DataLoader",
    "Epoch",
    "Epochs",
    "InvalidHP",
    "LRScheduler",
    "MetricReducer",
    "PyTorchCallback",
    "PyTorchTrial",
    "PyTorchTrialContext",
    "Record",
    "Records",
    "Reducer",
    "TorchBatchProcessor",
    "TorchBatchProcessorContext",
    "TorchData",
    "TorchWriter",
    "TrainUnit",
    "Trainer",
    "TrialTrainer",
    "data_length",
    "init",
    "load_trial_from_checkpoint_path",
    "samplers",
    "to_device",
    "torch_batch_process",
]
