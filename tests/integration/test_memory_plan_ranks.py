"""Memory plans of several processes against the allocators and the messages of a real group."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.full_size, pytest.mark.slow]

SCRIPT = Path(__file__).with_name("plan_ranks.py")
DDP, FSDP, TENSOR = "DDP, 2 processes", "FSDP, 2 processes", "FSDP, 2 tensor-parallel processes"
# Several buckets of gradients; accumulation and clipping; batch norm; a transformer with recomputed activations.
CASES = {
    DDP: ["wide MLP"],
    FSDP: ["MLP", "MLP, accumulation", "CNN", "activation checkpointing"],
    TENSOR: ["MLP, accumulation"],
}
LONG = {
    DDP: [
        *("MLP", "MLP, accumulation", "CNN", "transformer", "GPT-2", "activation checkpointing", "bfloat16"),
        *("PowerSGD", "bfloat16 messages"),
    ],
    FSDP: ["transformer", "GPT-2", "bfloat16"],
    TENSOR: ["MLP", "wide MLP", "transformer", "activation checkpointing", "bfloat16"],
}
IS_LONG = os.environ.get("DOVETAIL_TORTURE") == "1"


@pytest.fixture(scope="module")
def measured(run_group: Any, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    if IS_LONG:
        pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("plans")
    cases = {setting: [*names, *(LONG[setting] if IS_LONG else [])] for setting, names in CASES.items()}
    (folder / "cases.json").write_text(json.dumps(cases))
    with pytest.MonkeyPatch.context() as patch:
        # The first profiler of a process decides whether all of them print a line at their start.
        patch.setenv("KINETO_LOG_LEVEL", "6")
        found: list[dict[str, Any]] = run_group(SCRIPT, 2, folder)
    return found


@pytest.mark.parametrize(
    ("setting", "name"),
    [
        *[(setting, name) for setting, names in CASES.items() for name in names],
        *[pytest.param(setting, name, marks=pytest.mark.torture) for setting, names in LONG.items() for name in names],
    ],
)
@pytest.mark.filterwarnings("ignore:.*(loss_type|deprecated).*")
def test_the_plan_of_a_group_is_within_five_percent_and_has_its_messages(
    memory_bench: Any, measured: list[dict[str, Any]], setting: str, name: str
) -> None:
    plan = memory_bench.plan(name, setting)
    # All processes need the same memory, and a measurement is never too small.
    peak = min(each[setting][name]["peak"] for each in measured)
    assert plan.peak == pytest.approx(peak, rel=0.05)
    for each in measured:
        assert each[setting][name]["messages"] == plan.collectives
