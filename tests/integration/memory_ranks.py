"""What one process does in `test_fsdp_memory.py`: `python memory_ranks.py FOLDER`, with torchrun's variables set."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from dovetail import Batches
from dovetail.trainers import FSDPTrainer, Trainer


class Net(nn.Module):
    """Blocks, attention, batch norm with buffers, tied weights, and blocks in a list."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, 0.1, batch_first=True) for _ in range(2))
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 20, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        outputs: torch.Tensor = self.head(self.norm(x.mean(1)))
        return outputs


def whole(model: nn.Module) -> list[float]:
    tensors = [*model.parameters(), *model.buffers()]
    values = [it.full_tensor() if isinstance(it, DTensor) else it for it in tensors]
    return torch.cat([it.detach().double().flatten() for it in values]).tolist()


def build(place: str, tied: bool = True) -> nn.Module:
    torch.manual_seed(5)
    with torch.device(place):
        return Net(tied)


def train(model: nn.Module, steps: int, **settings: Any) -> list[float]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 20, (48, 6), generator=generator)
    optimizer = lambda parameters: torch.optim.AdamW(parameters, lr=0.01)  # noqa: E731
    trainer = Trainer(model, "cpu", optimizer=optimizer, batch_size=4, seed=5, gradient_clip=1.0, verbose=False)
    FSDPTrainer(trainer, **settings).fit((ids, ids[:, 0]), max_length=Batches(steps))
    return whole(model)


def main(folder: Path) -> None:
    found: dict[str, Any] = {}
    found["usual"] = train(build("cpu"), 4)
    found["offloaded"] = train(build("cpu"), 4, cpu_offload=True)
    model = build("meta")
    found["deferred"] = train(model, 4)
    found["is tied"] = model.head.weight is model.embedding.weight  # type: ignore[union-attr]
    found["deferred and offloaded"] = train(build("meta"), 4, cpu_offload=True)
    found["usual, not tied"] = train(build("cpu", tied=False), 4)
    found["deferred, not tied"] = train(build("meta", tied=False), 4)
    found["held"] = sum(it.to_local().numel() for it in model.parameters() if isinstance(it, DTensor))
    found["all"] = sum(it.numel() for it in model.parameters())
    (folder / f"{os.environ.get('RANK', '0')}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
