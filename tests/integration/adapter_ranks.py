"""What one process does in `test_adapter_ranks.py`: `python adapter_ranks.py FOLDER`, as torchrun starts it.

The results of each rank are written to `FOLDER/<rank>.json`. One process without a group computes the batches of two
processes in one accumulation window.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import GPT2Config, GPT2LMHeadModel

from dovetail import Epochs, checkpoint
from dovetail.distributed import whole
from dovetail.errors import CheckpointError, ConfigError
from dovetail.huggingface import save_pretrained
from dovetail.trainers import FSDPTrainer, Trainer

WORLD, RANK = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
LENGTHS = [[8, 3], [2, 2, 5], [10, 1], [4], [6, 6], [1, 7]]


def tokens(lengths: list[int]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(sum(lengths))
    mask = torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]
    ids = torch.randint(3, 30, mask.shape, generator=generator).where(mask, 0)
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": ids.where(mask, -100)}


def exact_loss(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
    """The causal loss of transformers, which is in float32, in the precision of the model."""
    return cross_entropy(logits[:, :-1].reshape(-1, vocab_size), labels[:, 1:].reshape(-1))


def model(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    kind: Any = GPT2LMHeadModel
    ends: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2}
    rates: dict[str, Any] = {"resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0}
    base = kind(GPT2Config(vocab_size=30, n_embd=16, n_layer=2, n_head=2, n_positions=16, **rates, **ends)).double()
    base.loss_function = exact_loss
    torch.manual_seed(1)
    adapters = LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM")
    return get_peft_model(base, adapters).double()


def make(module: Any, folder: Path) -> Any:
    trainer = Trainer(
        module,
        "cpu",
        optim_function="AdamW",
        learning_rate=0.03,
        accumulation_steps=2 // WORLD,
        checkpoint_dir=folder,
        save_only_trainable=True,
        save_hist=False,
        verbose=False,
    )
    return FSDPTrainer(trainer) if WORLD > 1 else trainer


def fitted(module: Any, folder: Path, epochs: int, **how: Any) -> Any:
    trainer, batches = make(module, folder), [tokens(lengths) for lengths in LENGTHS]
    trainer.fit(batches, batches[:3], max_length=Epochs(epochs), **how)
    return trainer


def weights(module: Any) -> list[float]:
    return torch.cat([whole(it).detach().double().flatten() for it in module.parameters()]).tolist()


def results(folder: Path) -> dict[str, Any]:
    module = model()
    trainer = fitted(module, folder / "straight", 4)
    found: dict[str, Any] = {"weights": weights(module)}
    save_pretrained(trainer, folder / "adapters")
    (path,) = (folder / "straight").glob("ck_epoch_4_*")
    stored = checkpoint.load(path)
    found["stored"], found["base"] = sorted(stored["model"]), stored["frozen_base"]
    if WORLD > 1:
        try:
            save_pretrained(trainer, folder / "merged", merge_adapters=True)
        except ConfigError as error:
            found["merging"] = str(error)
    fitted(model(), folder / "resumed", 2)
    module = model()
    fitted(module, folder / "resumed", 4, resume="auto")
    found["resumed"] = weights(module)
    # Checkpoints of the other number of processes, which the test has put there.
    other = folder / "other"
    if other.is_dir():
        module = model()
        fitted(module, other, 4, resume="auto")
        found["crossed"] = weights(module)
    try:
        fitted(model(seed=9), folder / "resumed", 5, resume="auto")
    except CheckpointError as error:
        found["rejected"] = str(error)
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    # A group that waits for itself reports its place.
    faulthandler.dump_traceback_later(180, exit=True)
    warnings.simplefilter("error")
    target = Path(sys.argv[1])
    (target / f"{RANK}.json").write_text(json.dumps(results(target)), encoding="utf-8")
    # Torch's threads sometimes abort a process of a group at its very end, when all is done.
    os._exit(0)
