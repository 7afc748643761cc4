"""The writer for TensorBoard by the name that it has in Determined."""

from __future__ import annotations

from dovetail.pytorch.tensorboard import TorchWriter

__all__ = ["TorchWriter"]
