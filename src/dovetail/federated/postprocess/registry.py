"""Registry of postprocessors by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dovetail.federated.postprocess.base import Postprocessor
from dovetail.federated.postprocess.clipping import NormClip
from dovetail.federated.postprocess.compression import Zstd
from dovetail.federated.postprocess.masking import PairwiseMasks
from dovetail.federated.postprocess.noise import GaussianNoise
from dovetail.federated.postprocess.quantization import QSGD, Bfloat16, Quantization
from dovetail.federated.postprocess.sparsification import TopK
from dovetail.federated.postprocess.weighting import Weighting
from dovetail.federated.specs import build
from dovetail.registry import Registry

postprocessors: Registry[Callable[..., Postprocessor]] = Registry(
    "postprocessor",
    lambda: {
        "weighting": Weighting,
        "norm_clip": NormClip,
        "quantization": Quantization,
        "qsgd": QSGD,
        "bfloat16": Bfloat16,
        "top_k": TopK,
        "zstd": Zstd,
        "gaussian_noise": GaussianNoise,
        "pairwise_masks": PairwiseMasks,
        # Plato's names.
        "model_quantize": Bfloat16,
        "model_quantize_qsgd": QSGD,
        "model_compress": Zstd,
        "compress": Zstd,
    },
)


def make(spec: Any) -> Postprocessor:
    """Return a postprocessor from itself, a name, or a mapping of one name to its arguments.

    Example:
        >>> make({"top_k": {"ratio": 0.1}})
        TopK(ratio=0.1, error_feedback=False)
    """
    return spec if isinstance(spec, Postprocessor) else build(postprocessors, spec)
