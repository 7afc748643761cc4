"""LoRA in two processes that shard the model, against one: weights, small checkpoints, export."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("peft")
pytestmark = [pytest.mark.slow]

SCRIPT = Path(__file__).with_name("adapter_ranks.py")


def test_sharded_adapters_train_save_and_resume_as_in_one_process(run_group: Any, tmp_path: Path) -> None:
    """Two processes resume a run of one from its small checkpoint, and reject it for another base."""
    one, two = tmp_path / "1", tmp_path / "2"
    (alone,) = run_group(SCRIPT, 1, one)
    half = [path for path in (one / "resumed").iterdir() if path.name.startswith("ck_epoch_2")]
    assert len(half) == 1
    shutil.copytree(half[0], two / "other" / half[0].name)
    group = run_group(SCRIPT, 2, two)
    for each in group:
        for kind in ("weights", "resumed", "crossed"):
            assert each[kind] == pytest.approx(alone["weights"], rel=0, abs=1e-9), kind
        assert each["resumed"] == each["weights"]
        assert each["stored"] == alone["stored"]
        assert all("lora_" in name for name in each["stored"])
        # The same base, though each process hashes gathered parts.
        assert each["base"] == alone["base"]
        assert "on a frozen base of" in each["rejected"]
        assert each["merging"].startswith("merge_adapters: the model is sharded; write the adapters alone")
    assert alone["resumed"] == alone["weights"]

    from safetensors.torch import load_file

    ours, theirs = (load_file(folder / "adapters" / "adapter_model.safetensors") for folder in (two, one))
    assert ours.keys() == theirs.keys()
    assert max(float((ours[name] - theirs[name]).abs().max()) for name in ours) < 1e-9
