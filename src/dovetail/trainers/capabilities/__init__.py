"""Capabilities: trainer features such as mixed precision or data parallelism, usable as layers and as add-ons."""

from dovetail.trainers.capabilities.auto_batch import AutoBatch, find_batch_size
from dovetail.trainers.capabilities.compiled import Compiled
from dovetail.trainers.capabilities.compression import HalfPrecision, PowerSGD
from dovetail.trainers.capabilities.core import Capability, capabilities_of
from dovetail.trainers.capabilities.data_parallel import DataParallel
from dovetail.trainers.capabilities.mixed_precision import MixedPrecision
from dovetail.trainers.capabilities.privacy import DifferentialPrivacy
from dovetail.trainers.capabilities.recomputed import ActivationCheckpointing
from dovetail.trainers.capabilities.sharded import ShardedDataParallel
from dovetail.trainers.capabilities.timed import Timed

__all__ = [
    "ActivationCheckpointing",
    "AutoBatch",
    "Capability",
    "Compiled",
    "DataParallel",
    "DifferentialPrivacy",
    "HalfPrecision",
    "MixedPrecision",
    "PowerSGD",
    "ShardedDataParallel",
    "Timed",
    "capabilities_of",
    "find_batch_size",
]
