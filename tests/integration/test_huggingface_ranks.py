"""A causal model of transformers in two processes against one: padded batches, uneven data, sharded weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytestmark = [pytest.mark.slow]

SCRIPT = Path(__file__).with_name("huggingface_ranks.py")


@pytest.fixture(scope="module")
def runs(run_group: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[int, Any], Path]:
    folder = tmp_path_factory.mktemp("huggingface")
    return {size: run_group(SCRIPT, size, folder / str(size)) for size in (1, 2)}, folder


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("layer", ["DDPTrainer", "FSDPTrainer"])
def test_two_processes_train_on_tokens_as_one_does(runs: tuple[dict[int, Any], Path], layer: str, steps: int) -> None:
    from transformers import GPT2LMHeadModel

    results, folder = runs
    name = f"{layer} {steps}"
    alone = results[1][0][name]
    for each in (each[name] for each in results[2]):
        assert each["metrics"] == pytest.approx(alone["metrics"], rel=0, abs=1e-12)
        for ours, theirs in zip(each["predictions"], alone["predictions"], strict=True):
            assert ours == [pytest.approx(row, rel=0, abs=1e-12) for row in theirs]
        assert each["samples"] == alone["samples"]
    one, two = (GPT2LMHeadModel.from_pretrained(folder / str(size) / name).state_dict() for size in (1, 2))
    assert one.keys() == two.keys()
    assert max(float((one[key] - two[key]).abs().max()) for key in one) < 1e-12


def test_a_model_is_divided_by_its_own_plan(runs: tuple[dict[int, Any], Path]) -> None:
    from transformers import Qwen3ForCausalLM

    results, folder = runs
    alone = results[1][0]["tensor parallel"]
    # All weights learn, also the norms of heads, whose gradients are sums over the processes.
    assert alone["change"] > 1e-6
    # The norms of this model compute in float32.
    for each in (each["tensor parallel"] for each in results[2]):
        assert each["metrics"] == pytest.approx(alone["metrics"], rel=0, abs=1e-7)
        assert each["weights"] == pytest.approx(alone["weights"], rel=0, abs=1e-7)
        # Embeddings, and seven matrices in each of two layers; the four norms of a layer and the last norm are not.
        assert (sum(each["is_divided"]), len(each["is_divided"])) == (15, 24)
    one, two = (
        Qwen3ForCausalLM.from_pretrained(folder / str(size) / "tensor parallel").state_dict() for size in (1, 2)
    )
    assert one.keys() == two.keys()
    assert max(float((one[key] - two[key]).abs().max()) for key in one) < 1e-7
