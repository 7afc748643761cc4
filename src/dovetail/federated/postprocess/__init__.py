"""Postprocessors of updates: clipping, noise, compression and masks between training and aggregation."""

from __future__ import annotations

from dovetail.federated.postprocess.base import Codec, Gathering, Postprocessor, TensorCodec, Upload
from dovetail.federated.postprocess.chain import Chain
from dovetail.federated.postprocess.clipping import NormClip
from dovetail.federated.postprocess.compression import Zstd
from dovetail.federated.postprocess.masking import PairwiseMasks
from dovetail.federated.postprocess.noise import GaussianNoise, PrivacyAccountant, find_noise_multiplier
from dovetail.federated.postprocess.quantization import QSGD, Bfloat16, Quantization
from dovetail.federated.postprocess.registry import postprocessors
from dovetail.federated.postprocess.sparsification import TopK
from dovetail.federated.postprocess.weighting import Weighting

__all__ = [
    "QSGD",
    "Bfloat16",
    "Chain",
    "Codec",
    "Gathering",
    "GaussianNoise",
    "NormClip",
    "PairwiseMasks",
    "Postprocessor",
    "PrivacyAccountant",
    "Quantization",
    "TensorCodec",
    "TopK",
    "Upload",
    "Weighting",
    "Zstd",
    "find_noise_multiplier",
    "postprocessors",
]
