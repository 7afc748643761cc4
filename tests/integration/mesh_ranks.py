"""What one process does in `test_mesh.py`: `python mesh_ranks.py FOLDER`, with torchrun's variables set.

Every mesh of the processes trains the same model on the same data. Without a group the plain trainer does.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dovetail import Batches, Epochs
from dovetail.callbacks import EMA
from dovetail.errors import ConfigError
from dovetail.trainers import FSDPTrainer, Trainer

WORLD = int(os.environ.get("WORLD_SIZE", "1"))
GLOBAL_BATCH = 12
MESHES = [{"replicate": copies, "shard": WORLD // copies} for copies in range(1, WORLD + 1) if WORLD % copies == 0]
SETTINGS: dict[str, Any] = {
    "optim_function": "AdamW",
    "learning_rate": 0.05,
    "seed": 3,
    "drop_last": False,
    "verbose": False,
    "batch_size": GLOBAL_BATCH // WORLD,
    "accumulation_steps": 2,
    "gradient_clip": 0.5,
}


class Net(nn.Module):
    """Blocks of several sizes, a parameter of the model itself, and one that is a single number."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.body = nn.Sequential(nn.Linear(5, 7), nn.Tanh())
        self.head = nn.Linear(7, 2)
        self.shift = nn.Parameter(torch.zeros(2))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.double()

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.body(inputs)) * self.scale + self.shift
        return outputs


def data(size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(size)
    inputs = torch.randn(size, 5, generator=generator, dtype=torch.float64)
    return inputs, (inputs.sum(dim=1) > 0).long()


def whole(tensor: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor

    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def weights(module: nn.Module) -> list[float]:
    return torch.cat([whole(parameter).flatten() for parameter in module.parameters()]).tolist()


def make(mesh: dict[str, int] | None, **settings: Any) -> Any:
    trainer = Trainer(Net(), "cpu", **{**SETTINGS, **settings})
    return trainer if mesh is None else FSDPTrainer(trainer, mesh=mesh)


def result(trainer: Any) -> Any:
    names = ("train_loss", "valid_loss", "valid_accuracy")
    return {
        "weights": weights(trainer.model),
        "metrics": [trainer.history.get_latest_metric(name) for name in names],
        "progress": trainer.context.progress.state_dict(),
    }


def trained(mesh: dict[str, int] | None) -> Any:
    average = EMA(decay=0.9)
    trainer = make(mesh, callbacks=[average])
    trainer.fit(data(53), data(17), max_length=Epochs(2))
    # Which parts of the first matrix the processes hold.
    matrix = trainer.model.body[0].weight
    return {**result(trainer), "rows": len(getattr(matrix, "_local_tensor", matrix))}


def saved(mesh: dict[str, int], folder: Path) -> None:
    """Write a checkpoint in the middle of an epoch, and one at its end for another number of processes."""
    name = f"{mesh['replicate']}x{mesh['shard']}"
    make(mesh, checkpoint_dir=folder / f"saved-{name}").fit(data(53), data(17), max_length=Batches(2))
    make(mesh, checkpoint_dir=folder / f"epoch-{name}").fit(data(53), data(17), max_length=Epochs(1))


def resumed(mesh: dict[str, int] | None, folder: Path) -> Any:
    trainer = make(mesh)
    trainer.fit(data(53), data(17), max_length=Epochs(2), resume=folder)
    return result(trainer)


def uninterrupted() -> Any:
    trainer = make(None)
    trainer.fit(data(53), data(17), max_length=Epochs(2))
    return result(trainer)


def rejected() -> str:
    try:
        make({"replicate": 3, "shard": 5}).fit(data(53), max_length=Epochs(1))
    except ConfigError as error:
        return str(error)
    return "accepted"


def newest(folder: Path) -> Path:
    return max(folder.glob("ck_epoch_*"), key=lambda path: path.stat().st_mtime)


def run(folder: Path) -> dict[str, Any]:
    if WORLD == 1:
        places = sorted(folder.parent.glob("4/epoch-*"))
        return {
            "trained": trained(None),
            "uninterrupted": uninterrupted(),
            "resumed": {place.name: resumed(None, newest(place)) for place in places},
        }
    found: dict[str, Any] = {"trained": {str(list(mesh.values())): trained(mesh) for mesh in MESHES}}
    for mesh in MESHES:
        saved(mesh, folder)
    found["resumed"] = {
        f"{place.name} on {mesh['replicate']}x{mesh['shard']}": resumed(mesh, newest(place))
        for place in sorted(folder.glob("saved-*"))
        for mesh in MESHES
    }
    return {**found, "rejected": rejected()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    target = Path(sys.argv[1])
    results = run(target)
    Path(target, f"{os.environ.get('RANK', '0')}.json").write_text(json.dumps(results), encoding="utf-8")
    # Torch's threads sometimes abort a process of a group at its very end, when all is done.
    os._exit(0)
