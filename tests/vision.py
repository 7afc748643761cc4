"""Import path of timm and MosaicML streaming, which need torchvision.

The wheel of torchvision is built for torch's CUDA build. Beside the CPU build its compiled part cannot be loaded, and
`import torchvision` fails because two operators are missing. `enable` defines them without an implementation: models
and transforms work, only non-maximum suppression does not. Call it in a separate process, because transformers and
torchmetrics import torchvision as soon as they find it.
"""

import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(sys.prefix) / "vision"
_definitions: list[torch.library.Library] = []


def enable() -> None:
    """Make timm, torchvision and streaming importable in this process."""
    if str(FOLDER) in sys.path:
        return
    sys.path.append(str(FOLDER))
    library = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]  # torch has no types here
    for name in ("nms", "qnms"):
        schema = f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        library.define(schema)  # type: ignore[no-untyped-call]
    _definitions.append(library)  # the operators disappear with the object


def skip_unless_installed() -> None:
    """Skip the test if `make install` has not created the folder (Python 3.10)."""
    if not (FOLDER / "timm").is_dir():
        pytest.skip("timm, torchvision and streaming are not installed: run make install with Python 3.11")
