"""Training in a process group that the user's script has made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow]


def test_a_group_for_one_type_of_device_trains_as_a_group_for_all(run_group: Any, tmp_path: Path) -> None:
    # As `init_process_group("nccl")`, which has no connections for tensors of the CPU.
    found = run_group(Path(__file__).with_name("user_group_ranks.py"), 2, tmp_path)
    assert found[0]["cuda:gloo"] == found[0]["gloo"] == found[1]["gloo"] == found[1]["cuda:gloo"]
