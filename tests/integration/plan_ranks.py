"""What a process does in `test_memory_plan_ranks.py`: `python plan_ranks.py FOLDER`, with torchrun's variables set."""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
# Several buckets of gradients; accumulation and clipping; a model of another library; recomputed activations.
CASES = {
    "DDP, 2 processes": ["wide MLP", "MLP, accumulation"],
    "FSDP, 2 processes": ["MLP", "MLP, accumulation", "CNN", "transformer", "GPT-2", "activation checkpointing"],
}
# Also in `make torture`.
LONG = {"DDP, 2 processes": ["MLP", "CNN", "transformer", "GPT-2", "bfloat16"], "FSDP, 2 processes": ["bfloat16"]}


def cases() -> dict[str, list[str]]:
    is_long = bool(os.environ.get("DOVETAIL_TORTURE"))
    return {setting: [*names, *(LONG[setting] if is_long else ())] for setting, names in CASES.items()}


def benchmark() -> Any:
    """The benchmark that measures; it imports its own neighbours by name."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        return import_module("memory_plan")
    finally:
        sys.path.remove(str(BENCHMARKS))


def main(folder: Path) -> None:
    bench = benchmark()
    found = {setting: {name: bench.measure(name, setting) for name in names} for setting, names in cases().items()}
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
