"""Two processes of a group, each with its own pretend device: no step waits, and the bits are the CPU's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow]


@pytest.fixture(scope="module")
def results(run_group: Any, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    script = Path(__file__).with_name("accelerator_ranks.py")
    found: list[dict[str, Any]] = run_group(script, 2, tmp_path_factory.mktemp("ranks") / "2")
    return found


@pytest.mark.parametrize("case", ["plain", "bf16", "accumulation", "clipping"])
def test_data_parallel_steps_wait_for_no_device(results: list[dict[str, Any]], case: str) -> None:
    expected: list[dict[str, Any]] = [{"difference": 0.0, "waits": [], "number": rank} for rank in (0, 1)]
    assert [found[case] for found in results] == expected
