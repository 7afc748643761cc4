"""What one process of a group does in `test_private_group.py`: `python private_ranks.py FOLDER`, as torchrun starts it.

Every case trains in the group and, in each process on its own, on the same global batches; the results of each rank are
written to `FOLDER/<rank>.json`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from dovetail import Batches, Epochs
from dovetail.errors import ConfigError
from dovetail.trainers import DDPTrainer, PrivateTrainer, SingleProcess, Trainer, build_trainer

CASES: dict[str, Callable[[Path], Any]] = {}
GLOBAL_BATCH = 12
WORLD = int(os.environ["WORLD_SIZE"])
RANK = int(os.environ["RANK"])


def case(function: Callable[[Path], Any]) -> Callable[[Path], Any]:
    CASES[function.__name__] = function
    return function


def data(size: int) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(size, 5, generator=torch.Generator().manual_seed(size), dtype=torch.float64)
    return inputs, (inputs.sum(dim=1) > 0).long()


def plain(batch_size: int, **settings: Any) -> Trainer:
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    chosen = {"optim_function": "SGD", "learning_rate": 0.3, "momentum": 0.9, "weight_decay": 0.0, **settings}
    return SingleProcess(model, "cpu", batch_size=batch_size, seed=3, drop_last=False, verbose=False, **chosen)


def alone(privacy: dict[str, Any], **settings: Any) -> Any:
    return PrivateTrainer(plain(GLOBAL_BATCH, **settings), **{"noise_seed": 5, **privacy})


def privacy_outside(privacy: dict[str, Any], **settings: Any) -> Any:
    # The seeds differ; all processes use the seed of the first.
    return PrivateTrainer(DDPTrainer(plain(GLOBAL_BATCH // WORLD, **settings)), **{"noise_seed": 5 + RANK, **privacy})


def privacy_inside(privacy: dict[str, Any], **settings: Any) -> Any:
    return DDPTrainer(PrivateTrainer(plain(GLOBAL_BATCH // WORLD, **settings), **{"noise_seed": 5 + RANK, **privacy}))


def result(trainer: Any) -> dict[str, Any]:
    return {
        "weights": torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()]).tolist(),
        "epsilon": trainer.epsilon,
        "noise": trainer.noise_multiplier,
        "spent": trainer.state_dict()["differential_privacy"]["spent"],
        "progress": trainer.context.progress.state_dict(),
    }


def agreement(source: Any, privacy: dict[str, Any] | None = None, epochs: int = 1, **settings: Any) -> dict[str, Any]:
    found = {}
    for make in (alone, privacy_outside, privacy_inside):
        trainer = make(privacy or {}, **settings)
        trainer.fit(source, max_length=Epochs(epochs))
        found[make.__name__] = result(trainer)
    return found


# ------------------------------------------------------------------ equalities with one process


@case
def even_batches(folder: Path) -> Any:
    return agreement(data(48))


@case
def uneven_batches(folder: Path) -> Any:
    # In the last step one process has a batch of five samples, and the other none.
    return agreement(data(53), epochs=2)


@case
def less_data_than_processes(folder: Path) -> Any:
    return agreement(data(3))


@case
def without_noise(folder: Path) -> Any:
    return agreement(data(53), {"noise_multiplier": 0.0, "max_grad_norm": 0.3})


@case
def accumulated_batches(folder: Path) -> Any:
    return agreement(data(60), accumulation_steps=2)


@case
def poisson_sampling(folder: Path) -> Any:
    return agreement(data(53), {"poisson_sampling": True})


@case
def empty_draw(folder: Path) -> Any:
    # Less than one sample in an update: often one process has none, and sometimes neither has.
    return agreement(data(160), {"poisson_sampling": True, "sample_rate": 0.005})


@case
def target_epsilon(folder: Path) -> Any:
    return agreement(data(149), {"target_epsilon": 1.0})


# ------------------------------------------------------------------ randomness and checkpoints


@case
def seed_of_the_system(folder: Path) -> Any:
    found = []
    for _ in range(2):
        trainer = privacy_outside({"noise_seed": None})
        trainer.fit(data(24), max_length=Batches(1))
        found.append(result(trainer)["weights"])
    return found


@case
def resumed(folder: Path) -> Any:
    found = {}
    for make, poisson in ((privacy_outside, False), (privacy_inside, True)):
        place = folder / make.__name__
        privacy, kept = {"poisson_sampling": poisson}, {"checkpoint_dir": place, "save_every": 3}
        whole, started = make(privacy), make(privacy, **kept)
        whole.fit(data(53), max_length=Epochs(2))
        started.fit(data(53), max_length=Batches(7))
        # No seed: the noise is restored only from the checkpoint.
        second = make({**privacy, "noise_seed": None}, **kept)
        second.fit(data(53), max_length=Epochs(2), resume="auto")
        found[place.name] = [result(whole), result(second)]
    return found


@case
def resumed_alone(folder: Path) -> Any:
    started, rest, whole = privacy_outside({}, checkpoint_dir=folder), alone({"noise_seed": None}), alone({})
    started.fit(data(53), max_length=Epochs(1))
    # The first process writes the files that are read.
    torch.distributed.barrier()
    rest.fit(data(53), max_length=Epochs(2), resume=folder / "ck_epoch_1_iter_5")
    whole.fit(data(53), max_length=Epochs(2))
    return [result(whole), result(rest)]


@case
def built_by_name(folder: Path) -> Any:
    model = plain(6).model
    trainer: Any = build_trainer(
        "ddp-dp", model, "cpu", batch_size=6, verbose=False, per_sample_max_grad_norm=0.5, sample_rate=0.0
    )
    trainer.fit(data(48), max_length=Epochs(1))
    return {"norm": trainer.max_grad_norm, "spent": result(trainer)["spent"]}


@case
def distributed_sampler(folder: Path) -> Any:
    dataset = TensorDataset(*data(48))
    sampler: Any = DistributedSampler(dataset, num_replicas=WORLD, rank=RANK)
    trainer = privacy_outside({"sample_rate": 0.25, "delta": 0.01})
    try:
        trainer.fit(DataLoader(dataset, batch_size=6, sampler=sampler), max_length=Epochs(1))
    except ConfigError as error:
        return str(error)
    return None


if __name__ == "__main__":
    torch.set_num_threads(1)
    target = Path(sys.argv[1])
    results = {}
    for name, function in CASES.items():
        place = target / name
        place.mkdir(exist_ok=True)
        results[name] = function(place)
    (target / f"{RANK}.json").write_text(json.dumps(results), encoding="utf-8")
    # Torch's threads sometimes abort a process of a group at its very end, when all is done.
    os._exit(0)
