"""Write `golden/v1`, a checkpoint in format version 1. Run once, by the release that introduced the format.

The files it made are in the repository and are never made again: every later release must load them as they are.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from dovetail.checkpoint import FORMAT_VERSION, save

if __name__ == "__main__":
    assert FORMAT_VERSION == 1
    tied = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    state = {
        "model": {"weight": tied, "tied": tied, "transposed": tied.T, "scalar": torch.tensor(-0.5)},
        "optimizer": {"state": {0: {"step": torch.tensor(7.0), "lr": 1e-3}}, "groups": [{"params": [0], "nan": None}]},
        "dtypes": {
            name: torch.tensor([0, 1, 2]).to(getattr(torch, name))
            for name in ("bool", "uint8", "int64", "float16", "bfloat16", "float64", "complex64", "complex128")
        },
        "rng": {"python": (3, (1, 2**32 - 1, 2**80), None), "bytes": b"\x00\xff"},
        "numpy": {"array": np.arange(4, dtype=np.int16), "scalar": np.float32(1.5)},
        "numbers": [float("inf"), float("nan"), -0.0, 0.1, True, "text ü"],
        "$odd": {"$key": (), 1.5: []},
    }
    summary = {"step": 7, "epoch": 1, "metrics": {"loss": 0.25}}
    save(Path(__file__).parent / "v1", state, summary=summary)
