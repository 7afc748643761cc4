"""A federation of a million clients takes the memory of one with a thousand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from forked import run

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "federated_memory.py"
# Megabytes. A million numbers in a list are forty, in a tensor eight.
TOLERANCE = 4.0


def grown(population: int, folder: Path) -> dict[str, float]:
    ended = run(BENCHMARK, "--population", str(population), "--rounds", "2", "--per-round", "50", folder=folder)
    assert ended.returncode == 0, ended.stderr
    found: dict[str, float] = json.loads(ended.stdout)
    return found


@pytest.mark.full_size
@pytest.mark.slow
def test_memory_does_not_grow_with_the_population(tmp_path: Path) -> None:
    few, many = grown(1_000, tmp_path), grown(1_000_000, tmp_path)
    assert many["grown"] < few["grown"] + TOLERANCE
    assert many["python"] < few["python"] + TOLERANCE / 10
