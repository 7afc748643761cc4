"""LoRA with peft: a frozen base learns a new task, the checkpoint holds the adapters alone, the export merges them.

The base is a small Llama that has learned to count upwards in letters (`cdefg`). Its adapters learn to count downwards.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.optim import AdamW
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from dovetail import Epochs
from dovetail.huggingface import save_pretrained
from dovetail.trainers import Trainer

RUNS = Path("runs/lora")
LETTERS, LENGTH = 26, 12
SETTINGS: dict[str, Any] = {"metrics": ["perplexity"], "seed": 0, "save_hist": False}


def batches(step: int) -> list[dict[str, Tensor]]:
    """Return sequences from every letter: `bcd…` with step 1, `bazy…` with step -1."""
    starts = torch.arange(LETTERS).repeat(8)[torch.randperm(8 * LETTERS, generator=torch.Generator().manual_seed(0))]
    ids = (starts[:, None] + step * torch.arange(LENGTH)) % LETTERS
    return [{"input_ids": part, "labels": part} for part in ids.split(16)]


def base() -> LlamaForCausalLM:
    size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=LETTERS + 2, bos_token_id=26, eos_token_id=27, **size))


def share_correct(trainer: Trainer) -> float:
    """Return how many of the letters after the first one are predicted correctly, counting downwards."""
    parts = batches(-1)
    expected = torch.cat([part["input_ids"] for part in parts])
    predicted = trainer.predict(parts).logits.argmax(dim=-1)
    return (predicted[:, :-1] == expected[:, 1:]).double().mean().item()


def num_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def main() -> None:
    logging.disable_progress_bar()
    upwards = Trainer(base, "cpu", optimizer=partial(AdamW, lr=3e-3), **SETTINGS)
    upwards.fit(batches(1), batches(1), max_length=Epochs(6))
    large = upwards.save_checkpoint(RUNS / "base")
    before = share_correct(upwards)

    layers = ["q_proj", "v_proj", "up_proj", "down_proj"]
    adapters = LoraConfig(r=4, lora_alpha=16, target_modules=layers, task_type="CAUSAL_LM")
    model: Any = get_peft_model(upwards.model, adapters)
    trainer = Trainer(
        model,
        "cpu",
        optimizer=partial(AdamW, lr=1e-2, weight_decay=0.0),
        checkpoint_dir=RUNS / "adapters",
        save_only_trainable=True,
        keep_last=1,
        **SETTINGS,
    )
    trainer.fit(batches(-1), batches(-1), max_length=Epochs(6))
    small = trainer.save_checkpoint(RUNS / "small")
    after = share_correct(trainer)

    save_pretrained(trainer, RUNS / "adapter")
    merged = LlamaForCausalLM.from_pretrained(save_pretrained(trainer, RUNS / "merged", merge_adapters=True))
    difference = Trainer(merged, "cpu", **SETTINGS).predict(batches(-1)).logits - trainer.predict(batches(-1)).logits
    print(f"largest difference between the merged model and the adapted one: {difference.abs().max():.1e}")
    sizes = f"{num_bytes(small) / 1000:.0f} kB instead of {num_bytes(large) / 1000:.0f} kB"
    print(
        f"result: {before:.0%} of the letters are correct before LoRA, {after:.0%} after it; a checkpoint has {sizes}"
    )
    assert before < 0.1
    assert after > 0.9
    assert num_bytes(small) < num_bytes(large) / 4
    assert difference.abs().max() < 1e-4


if __name__ == "__main__":
    main()
