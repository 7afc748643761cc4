"""Training on an accelerator, by claims that a process with a pretend device checks."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import forked
import pytest

pytestmark = [pytest.mark.slow]

FOLDER = Path(__file__).parent
STYLES = ("keywords", "subclass", "strategies", "manual")
FEATURES = ("plain", "bf16", "fp16", "accumulation", "clipping", "ema", "early_stopping")
TRIAL_FEATURES = ("plain", "bf16", "fp16", "accumulation", "clipping")


def names_of_claims() -> list[str]:
    """The names without an import of the claims, which would register the device in this process."""
    names = []
    for name_of_table in ("RUN_CLAIMS", "COPY_CLAIMS", "PRECISION_CLAIMS", "MEMORY_CLAIMS"):
        tree = ast.parse((FOLDER / f"{name_of_table.lower()}.py").read_text())
        tables = (it for it in tree.body if isinstance(it, ast.Assign) and ast.unparse(it.targets[0]) == name_of_table)
        listed = [it.id for it in ast.walk(next(tables).value) if isinstance(it, ast.Name)]
        functions = {it.name for it in tree.body if isinstance(it, ast.FunctionDef)}
        names += [name.replace("_", " ") for name in listed if name in functions]
    return names


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str | None]:
    """The traceback of every claim, or None if it holds."""
    found = forked.run(FOLDER / "claims.py", folder=tmp_path_factory.mktemp("claims"), timeout=400)
    assert found.returncode == 0, found.stderr
    lines = [json.loads(line) for line in found.stdout.splitlines() if line.startswith("{")]
    return {line["name"]: line["error"] for line in lines}


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("style", STYLES)
def test_a_step_waits_for_nothing_and_computes_the_bits_of_the_cpu(
    results: dict[str, str | None], style: str, feature: str
) -> None:
    assert results[f"{style} {feature}"] is None, results[f"{style} {feature}"]


@pytest.mark.parametrize("feature", TRIAL_FEATURES)
def test_a_trial_waits_for_nothing_and_computes_the_bits_of_the_cpu(
    results: dict[str, str | None], feature: str
) -> None:
    assert results[f"trial {feature}"] is None, results[f"trial {feature}"]


@pytest.mark.parametrize("claim", names_of_claims())
def test_a_run_on_the_device_keeps_its_promise(results: dict[str, str | None], claim: str) -> None:
    assert results[claim] is None, results[claim]


def test_every_claim_has_a_test(results: dict[str, str | None]) -> None:
    cells = {f"{style} {feature}" for style in STYLES for feature in FEATURES}
    cells |= {f"trial {feature}" for feature in TRIAL_FEATURES}
    assert results.keys() == cells | set(names_of_claims())
