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
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassConfusionMatrix, MulticlassF1Score

from dovetail import Batches, Epochs
from dovetail.callbacks import EMA, Callback, Timer
from dovetail.distributed import own_part, whole
from dovetail.errors import ConfigError
from dovetail.trainers import ActivationCheckpointTrainer, AMPTrainer, FSDPTrainer, Trainer, TrainingContext
from dovetail.trainers.metrics import accuracy

WORLD = int(os.environ.get("WORLD_SIZE", "1"))
RANK = int(os.environ.get("RANK", "0"))
TORTURE = os.environ.get("DOVETAIL_TORTURE") == "1"
GLOBAL_BATCH = 12
Mesh = tuple[int, int, int]
MESHES: list[Mesh] = [
    (copies, parts, WORLD // copies // parts)
    for copies in range(1, WORLD + 1)
    for parts in range(1, WORLD + 1)
    if WORLD % (copies * parts) == 0
]
PLAN = {"up": "colwise", "down": "rowwise"}
SETTINGS: dict[str, Any] = {
    # For each operation of an optimizer on each mesh, torch plans for tens of milliseconds; AdamW has many.
    "optim_function": "AdamW" if TORTURE else "SGD",
    "momentum": 0.9,
    "learning_rate": 0.05,
    "seed": 3,
    "drop_last": False,
    "verbose": False,
    "accumulation_steps": 2,
    "gradient_clip": 0.5,
}


class Net(nn.Module):
    """Blocks of several sizes, a pair that a plan divides, a parameter of the model itself, and a single number."""

    def __init__(self, dropout: float = 0.0, norm: bool = False) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.body = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7) if norm else nn.Tanh(), nn.Dropout(dropout))
        self.up = nn.Linear(7, 12)
        self.down = nn.Linear(12, 7)
        self.head = nn.Linear(7, 2)
        self.shift = nn.Parameter(torch.zeros(2))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.double()

    def forward(self, inputs: Tensor) -> Tensor:
        hidden: Tensor = self.down(torch.tanh(self.up(self.body(inputs))))
        outputs: Tensor = self.head(torch.tanh(hidden)) * self.scale + self.shift
        return outputs


class StopInLastProcess(Callback):
    """Requests a stop in one process only."""

    def on_update(self, context: TrainingContext) -> None:
        if context.progress.updates == 2 and RANK == WORLD - 1:
            context.stop("enough")


def data(size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(size)
    inputs = torch.randn(size, 5, generator=generator, dtype=torch.float64)
    return inputs, (inputs.sum(dim=1) > 0).long()


def weights(module: nn.Module) -> list[float]:
    values = (*module.parameters(), *(it.double() for it in module.buffers()))
    return torch.cat([whole(value.detach()).flatten() for value in values]).tolist()


def make(mesh: Mesh | None, model: nn.Module | None = None, **settings: Any) -> Any:
    layer = {"sync_batchnorm": settings.pop("sync_batchnorm", False)}
    num_shares = 1 if mesh is None else mesh[0] * mesh[1]
    settings = {**SETTINGS, "batch_size": GLOBAL_BATCH // num_shares, **settings}
    trainer = Trainer(model or Net(), "cpu", **settings)
    if mesh is None:
        return trainer
    sizes = dict(zip(("replicate", "shard", "tensor"), mesh, strict=True))
    return FSDPTrainer(trainer, mesh=sizes, parallelize=PLAN, **layer)


def result(trainer: Any) -> Any:
    names = ("train_loss", "valid_loss", "valid_accuracy")
    return {
        "weights": weights(trainer.model),
        "metrics": [trainer.history.get_latest_metric(name) for name in names],
        "progress": trainer.context.progress.state_dict(),
    }


def trained(mesh: Mesh | None) -> Any:
    confusion = MulticlassConfusionMatrix(2)
    metrics = {"accuracy": accuracy, "several": MetricCollection({"confusion": confusion, "f1": MulticlassF1Score(2)})}
    trainer = make(mesh, callbacks=[EMA(decay=0.9)], metrics=metrics)
    trainer.fit(data(53), data(17), max_length=Epochs(1))
    predicted = trainer.predict(data(17)[0]).flatten().tolist()
    # Which parts of two matrices the processes hold.
    shapes = [
        tuple(getattr(it, "_local_tensor", it).shape) for it in (trainer.model.body[0].weight, trainer.model.up.weight)
    ]
    names = ("f1", *(f"confusion_{number}" for number in range(4)))
    synced = [trainer.history.get_latest_metric(f"valid_several_{name}") for name in names]
    assert confusion.process_group is None
    return {**result(trainer), "predicted": predicted, "shapes": shapes, "synced": synced}


def noisy(mesh: Mesh | None) -> Any:
    trainer = make(mesh, Net(dropout=0.3))
    if mesh is not None:
        trainer = ActivationCheckpointTrainer(trainer, blocks=["body", "up", "head"])
    trainer.fit(data(53), data(17), max_length=Epochs(1))
    return result(trainer)


def normed(mesh: Mesh | None) -> Any:
    trainer = make(mesh, Net(norm=True), **({} if mesh is None else {"sync_batchnorm": True}))
    trainer.fit(data(53), data(17), max_length=Epochs(1))
    return result(trainer)


def counted(mesh: Mesh | None) -> Any:
    """Two groups of processes, of which the second has no items in the first window."""

    def train_step(trainer: Any, batch: Any) -> dict[str, Any]:
        inputs, targets, counts = batch
        losses = nn.functional.cross_entropy(trainer.model(inputs), targets, reduction="none")
        return {"loss": (losses * counts).sum() / counts.sum().clamp(min=1), "num_items": counts.sum()}

    counts = torch.ones(24)
    counts[6:12] = counts[18:24] = 0
    trainer = make(mesh, train_step=train_step, shuffle=False)
    trainer.fit((*data(24), counts), max_length=Epochs(1))
    return weights(trainer.model)


class Overflow(Callback):
    """Records for every update whether the gradients that this process holds have an infinite number."""

    def __init__(self) -> None:
        self.found: list[bool] = []

    def on_gradients(self, context: TrainingContext, optimizer: torch.optim.Optimizer) -> None:
        assert context.model is not None
        gradients = [own_part(it.grad) for it in context.model.parameters() if it.grad is not None]
        self.found.append(not all(bool(it.isfinite().all()) for it in gradients))


def overflowed(mesh: Mesh) -> Any:
    """Train in float16 with a weight that lets the gradients of the last unit overflow, and of no other one."""
    model, overflow = Net().float(), Overflow()
    # Otherwise the processes of a tensor-parallel group would add up the overflow in the gradients of the inputs.
    model.body.requires_grad_(False)
    with torch.no_grad():
        model.down.weight[0, -1] = 60.0
    # AdamW would change the weights by so much that nothing overflows.
    trainer = AMPTrainer(make(mesh, model, callbacks=[overflow], optim_function="SGD"), precision="fp16")
    inputs, targets = data(96)
    trainer.fit((inputs.float(), targets), max_length=Epochs(2))
    return {"weights": weights(model), "found": overflow.found, "updates": trainer.context.progress.updates}


def stopped(mesh: Mesh) -> Any:
    timer = Timer(flops=True, peak_flops=1e9)
    trainer = make(mesh, callbacks=[StopInLastProcess(), timer])
    trainer.fit(data(53), max_length=Epochs(2))
    # The FLOPs of a sample are divided among the processes of a tensor-parallel group.
    num_devices = timer.flops_per_second / (timer.peak_flops * timer.mfu)
    return {**trainer.context.progress.state_dict(), "num_devices": round(num_devices)}


def named(mesh: Mesh) -> str:
    return "x".join(map(str, mesh))


def saved(mesh: Mesh, folder: Path) -> None:
    """Write checkpoints in the middle of an epoch and at its end."""
    place = folder / f"{mesh[0] * mesh[1]}-{named(mesh)}"
    trainer = make(mesh, checkpoint_dir=place)
    trainer.fit(data(53), data(17), max_length=Epochs(1), checkpoint_period=Batches(2))


def resumed(mesh: Mesh | None, checkpoint: Path) -> Any:
    trainer = make(mesh)
    trainer.fit(data(53), data(17), max_length=Epochs(2), resume=checkpoint)
    return result(trainer)


def all_resumed(folder: Path) -> dict[str, Any]:
    """Continue the checkpoints of four processes: each on one other mesh, or in torture all on all.

    In the middle of an epoch, only processes with batches of the same size make the same updates.
    """
    found: dict[str, Any] = {}
    meshes: list[Mesh | None] = [*MESHES] if WORLD > 1 else [None]
    for number, place in enumerate(sorted(folder.iterdir())):
        num_shares = int(place.name.split("-")[0])
        fitting = [it for it in meshes if (1 if it is None else it[0] * it[1]) == num_shares]
        checkpoints = sorted(place.glob("ck_epoch_*"), key=lambda path: path.stat().st_mtime)
        for kind, checkpoint, able in (("middle", checkpoints[0], fitting), ("end", checkpoints[-1], meshes)):
            # Outside of torture only some of them: each takes half a second in every process.
            if not TORTURE and ((kind == "end" and WORLD in (2, 3)) or (kind == "middle" and number > 3)):
                continue
            for mesh in able if TORTURE else [able[(number + 2) % len(able)]] if able else []:
                found[f"{kind} of {place.name} on {mesh}"] = resumed(mesh, checkpoint)
    return found


def uninterrupted() -> Any:
    trainer = make(None)
    trainer.fit(data(53), data(17), max_length=Epochs(2))
    return result(trainer)


def rejected() -> list[str]:
    """The errors of a mesh that does not fit the number of processes, and of one that does not fit the model."""
    model, errors = Net(), []
    make((1, 2, 2), model).evaluate(data(12))
    for trainer in (make((2, 2, 1), model), make((3, 2, 1))):
        try:
            trainer.evaluate(data(12))
        except ConfigError as error:
            errors.append(str(error))
    return errors


def run(folder: Path) -> dict[str, Any]:
    saved_by_four = folder.parent / "saved"
    if WORLD == 1:
        return {
            "trained": trained(None),
            "noisy": noisy(None),
            "normed": normed(None),
            "counted": counted(None),
            "uninterrupted": uninterrupted(),
            "resumed": all_resumed(saved_by_four),
        }
    found: dict[str, Any] = {"trained": {named(mesh): trained(mesh) for mesh in MESHES}}
    found["noisy"] = noisy((1, 1, WORLD))
    if WORLD == 4:
        found["normed"] = normed((1, 2, 2))
        found["counted"] = counted((2, 1, 2))
        found["overflowed"] = overflowed((1, 2, 2))
        found["stopped"] = stopped((1, 2, 2))
        found["rejected"] = rejected()
        for mesh in MESHES:
            saved(mesh, saved_by_four)
    found["resumed"] = all_resumed(saved_by_four)
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    target = Path(sys.argv[1])
    results = run(target)
    Path(target, f"{os.environ.get('RANK', '0')}.json").write_text(json.dumps(results), encoding="utf-8")
    # Torch's threads sometimes abort a process of a group at its very end, when all is done.
    os._exit(0)
