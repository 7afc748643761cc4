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


# With weights of classes, and with tokens, the number of items is a tensor of the device.
FEATURES = (
    *("plain", "bf16", "fp16", "accumulation", "clipping", "ema", "early_stopping", "class_weight", "tokens"),
    *("class_weight, accumulation", "tokens, accumulation", "sync_batchnorm"),
)


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("layer", ["data parallel", "sharded"])
def test_steps_of_two_ranks_wait_for_no_device(results: list[dict[str, Any]], layer: str, feature: str) -> None:
    num_parts = (
        {"tokens": 3, "tokens, accumulation": 3, "sync_batchnorm": 6}.get(feature, 4) if layer == "sharded" else 0
    )
    # Torch's scaler reads one flag per update. Four of the six steps are between two complete ones.
    waits = ["aten._local_scalar_dense.default"] * 4 if feature == "fp16" else []
    expected = {"difference": 0.0, "waits": waits, "num_parts": num_parts}
    assert [found[f"{layer} {feature}"] for found in results] == [{**expected, "number": rank} for rank in (0, 1)]


def test_compressed_gradients_of_two_ranks_wait_for_no_device(results: list[dict[str, Any]]) -> None:
    assert [found["data parallel powersgd"]["waits"] for found in results] == [[], []]


@pytest.mark.parametrize("layer", ["data parallel", "sharded"])
def test_two_ranks_train_weighted_losses_on_devices_without_float64(results: list[dict[str, Any]], layer: str) -> None:
    for found in results:
        case = found[f"{layer} weighted without float64"]
        assert case.get("difference", 1.0) < 1e-6, case


def test_offloading_on_the_cpu_needs_no_pinned_memory_of_an_accelerator(results: list[dict[str, Any]]) -> None:
    assert [found["offload on the CPU"] for found in results] == [{"difference": 0.0}] * 2
