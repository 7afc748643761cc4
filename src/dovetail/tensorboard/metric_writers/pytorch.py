"""TensorBoard writer of PyTorch scripts, at the path that it has in Determined."""

from __future__ import annotations

from dovetail.pytorch.tensorboard import TorchWriter

__all__ = ["TorchWriter"]
