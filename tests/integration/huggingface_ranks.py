"""What one process does in `test_huggingface_ranks.py`: `python huggingface_ranks.py FOLDER`, as torchrun starts it.

The results of each rank are written to `FOLDER/<rank>.json`. One process without a group computes the batches of two
processes in one accumulation window.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import GPT2Config, GPT2LMHeadModel, Qwen3Config, Qwen3ForCausalLM

from dovetail import Epochs
from dovetail.distributed import whole
from dovetail.huggingface import GenerateSamples, save_pretrained
from dovetail.trainers import DDPTrainer, FSDPTrainer, Trainer

WORLD, RANK = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
LENGTHS = [[8, 3], [2, 2, 5], [10, 1], [4], [6, 6], [1, 7], [9]]


def tokens(lengths: list[int]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(sum(lengths))
    mask = torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]
    ids = torch.randint(3, 30, mask.shape, generator=generator).where(mask, 0)
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": ids.where(mask, -100)}


def exact_loss(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
    """The causal loss of transformers, which is in float32, in the precision of the model."""
    return cross_entropy(logits[:, :-1].reshape(-1, vocab_size), labels[:, 1:].reshape(-1))


def model() -> Any:
    torch.manual_seed(0)
    rates: dict[str, Any] = {
        "resid_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    kind: Any = GPT2LMHeadModel
    made = kind(GPT2Config(vocab_size=30, n_embd=16, n_layer=2, n_head=2, n_positions=16, **rates)).double()
    made.loss_function = exact_loss
    return made


def trained(folder: Path, layer: Any, accumulation_steps: int) -> dict[str, Any]:
    generate = GenerateSamples([[3, 4], [5]], max_new_tokens=3, do_sample=True, pad_token_id=0)
    trainer = Trainer(
        model(),
        "cpu",
        optim_function="SGD",
        learning_rate=0.3,
        momentum=0.0,
        weight_decay=0.0,
        accumulation_steps=accumulation_steps * 2 // WORLD,
        metrics=["perplexity"],
        callbacks=[generate],
        verbose=False,
    )
    outer = layer(trainer) if WORLD > 1 else trainer
    batches = [tokens(lengths) for lengths in LENGTHS]
    history = outer.fit(batches, batches[:5], max_length=Epochs(2))
    names = ("train_loss", "valid_loss", "valid_perplexity", "train_tokens")
    save_pretrained(outer, folder)
    return {
        "metrics": [value for name in names for value in history.get_metric_values(name)],
        "predictions": [row.tolist() for row in outer.predict(batches[:3]).logits],
        "samples": [sample["ids"] for sample in generate.samples],
    }


def tensor_parallel(folder: Path) -> dict[str, Any]:
    """Train a model by its own plan: divided attention, norms of divided heads, and tied embeddings."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 4}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}
    ids: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    kind: Any = Qwen3ForCausalLM
    made = kind(Qwen3Config(vocab_size=30, tie_word_embeddings=True, **sizes, **heads, **ids)).double()
    made.loss_function = exact_loss
    before = [parameter.detach().clone() for parameter in made.parameters()]
    settings: dict[str, Any] = {"learning_rate": 0.3, "gradient_clip": 0.5, "accumulation_steps": 2}
    trainer = Trainer(made, "cpu", optim_function="SGD", verbose=False, **settings)
    outer: Any = FSDPTrainer(trainer, mesh={"tensor": 2}) if WORLD > 1 else trainer
    batches = [tokens(lengths) for lengths in LENGTHS]
    history = outer.fit(batches, batches[:5], max_length=Epochs(1))
    save_pretrained(outer, folder)
    after = [whole(parameter.detach()) for parameter in made.parameters()]
    return {
        "metrics": [history.get_latest_metric(name) for name in ("train_loss", "valid_loss", "train_tokens")],
        "weights": [value for parameter in after for value in parameter.flatten().tolist()],
        "change": min(float((new - old).abs().max()) for new, old in zip(after, before, strict=True)),
        "is_divided": [bool(it.to_local().shape != it.shape) for it in made.parameters()] if WORLD > 1 else [],
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    # A group that waits for itself reports its place.
    faulthandler.dump_traceback_later(180, exit=True)
    target = Path(sys.argv[1])
    results = {
        f"{layer.__name__} {steps}": trained(target / f"{layer.__name__} {steps}", layer, steps)
        for layer in (DDPTrainer, FSDPTrainer)
        for steps in (1, 2)
    }
    results["tensor parallel"] = tensor_parallel(target / "tensor parallel")
    (target / f"{RANK}.json").write_text(json.dumps(results), encoding="utf-8")
    # Torch's threads sometimes abort a process of a group at its very end, when all is done.
    os._exit(0)
