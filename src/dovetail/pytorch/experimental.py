"""Batch processing, at the path that it has in Determined."""

from __future__ import annotations

from dovetail.pytorch.batch_process import TorchBatchProcessor, TorchBatchProcessorContext, torch_batch_process

__all__ = ["TorchBatchProcessor", "TorchBatchProcessorContext", "torch_batch_process"]
