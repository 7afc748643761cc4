"""Memory plans of several processes against the allocators and the messages of a real group."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import plan_ranks
import pytest

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("plan_ranks.py")


@pytest.fixture(scope="module")
def measured(run_group: Any, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    pytest.importorskip("transformers")
    with pytest.MonkeyPatch.context() as patch:
        # The first profiler of a process decides whether all of them print a line at their start.
        patch.setenv("KINETO_LOG_LEVEL", "6")
        found: list[dict[str, Any]] = run_group(SCRIPT, 2, tmp_path_factory.mktemp("plans"))
    return found


@pytest.mark.parametrize(
    ("setting", "name"), [(setting, name) for setting, names in plan_ranks.cases().items() for name in names]
)
@pytest.mark.filterwarnings("ignore:.*(loss_type|deprecated).*")
def test_the_plan_of_a_group_is_within_five_percent_and_has_its_messages(
    measured: list[dict[str, Any]], setting: str, name: str
) -> None:
    plan = plan_ranks.benchmark().plan(name, setting)
    # All processes need the same memory, and a measurement is never too small.
    peak = min(each[setting][name]["peak"] for each in measured)
    assert plan.peak == pytest.approx(peak, rel=0.05)
    for each in measured:
        assert each[setting][name]["messages"] == plan.collectives
