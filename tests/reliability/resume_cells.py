"""Kills runs of one loader and resumes them: `python resume_cells.py LOADER FOLDER [CASE …]` prints cells as JSON.

The cells belong to the second table of `docs/reproducibility.md`. Every part of a run is a fork of this process, or two
forks that form a group, and ends by SIGKILL. Each process records the samples of its batches in a file.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import signal
import socket
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from dovetail.callbacks import LambdaCallback
from dovetail.data import DataLoader as OwnLoader
from dovetail.trainers import DDPTrainer, Trainer
from dovetail.units import Batches, Epochs

NUM_SAMPLES, BATCH_SIZE, NUM_EPOCHS = 48, 4, 2
SAVE_EVERY = 3

# Name of a column: data workers per part of the run. The number of processes per part is 1, or 1, 2 and 1.
KILLED = {"killed, no workers": (0, 0, 0), "killed, 2 workers": (2, 2, 2), "killed, 2 → 1 → 2 workers": (2, 1, 2)}
WORLDS = {"killed, 1 → 2 → 1 processes, no workers": (0, 0, 0), "… 2 workers": (2, 2, 2)}
CASES: Mapping[str, tuple[int, ...]] = {**KILLED, **WORLDS}


class Augment:
    """Adds noise from every generator that transforms use: the global ones, and one of the transform itself."""

    def __init__(self, has_own: bool = True) -> None:
        self.rng = np.random.default_rng(5) if has_own else None

    def __call__(self, index: int) -> Tensor:
        noise = torch.randn(3) + random.random() + np.random.normal()
        if self.rng is not None:
            noise += float(self.rng.normal())
        return torch.cat([torch.tensor([float(index)]), index / NUM_SAMPLES + noise])


class Augmented(Dataset[Any]):
    def __init__(self, has_own: bool = True) -> None:
        self.augment = Augment(has_own)

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.augment(index), index % 3


class Rows(Augment):
    """The transform of a Hugging Face dataset, which receives columns of rows."""

    def rows(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        return {"x": [self(index) for index in columns["id"]], "y": [index % 3 for index in columns["id"]]}


def _hugging_face() -> Any:
    table = importlib.import_module("datasets").Dataset.from_dict({"id": list(range(NUM_SAMPLES))})
    return table.with_transform(Rows().rows)


def _stateful(**options: Any) -> Any:
    module = importlib.import_module("torchdata.stateful_dataloader")
    return module.StatefulDataLoader(Augmented(), batch_size=BATCH_SIZE, shuffle=True, **options)


def _collated(samples: Sequence[Mapping[str, Any]]) -> tuple[Tensor, Tensor]:
    return torch.stack([it["x"] for it in samples]), torch.tensor([it["y"] for it in samples])


# Functions of the number of workers that return the training data and options of the trainer.
LOADERS: dict[str, Callable[[int], tuple[Any, dict[str, Any]]]] = {
    "a dataset given to the trainer": lambda workers: (Augmented(), {"num_workers": workers}),
    "a Hugging Face dataset with a transform": lambda workers: (
        _hugging_face(),
        {"num_workers": workers, "collate_fn": _collated},
    ),
    "torch's `DataLoader`, `shuffle=True`": lambda workers: (
        DataLoader(Augmented(), batch_size=BATCH_SIZE, shuffle=True, num_workers=workers),
        {},
    ),
    "torchdata's `StatefulDataLoader`": lambda workers: (_stateful(num_workers=workers), {}),
    "`dovetail.data.DataLoader`": lambda workers: (
        OwnLoader(Augmented(), batch_size=BATCH_SIZE, shuffle=True, num_workers=workers),
        {},
    ),
    "… with a `seed`, noise of the global generators only": lambda workers: (
        OwnLoader(Augmented(has_own=False), batch_size=BATCH_SIZE, shuffle=True, seed=4, num_workers=workers),
        {},
    ),
}


def cell(loader: str, case: str, folder: Path) -> str:
    """Return what happens to a run that is killed twice, as the table reports it."""
    make, workers = LOADERS[loader], CASES[case]
    worlds = (1, 2, 1) if case in WORLDS else (1, 1, 1)
    # Both kills are inside an epoch, between two checkpoints, and leave a number of batches that two cannot divide.
    kills = (4, 10, None) if case in WORLDS else (4, 17, None)
    whole = folder / f"whole-{workers[0]}"
    expected, _ = _results(whole) if whole.exists() else _run(whole, make, workers[:1], (1,), (None,))
    found, messages = _run(folder / f"killed-{workers}-{worlds}", make, workers, worlds, kills)
    noise = [{tuple(sample) for sample in epoch} for epoch in found["samples"]]
    same_noise = noise == [{tuple(sample) for sample in epoch} for epoch in expected["samples"]]
    if found == expected:
        return "exact"
    for epoch in found["samples"]:
        if sorted(int(sample[0]) for sample in epoch) != list(range(NUM_SAMPLES)):
            return "NOT each sample once"
    if same_noise:
        return "each sample once, same noise"
    if case not in WORLDS and not any("differ" in it for it in messages):
        return "NOT exact, without a warning"
    return "each sample once, other noise"


def _run(folder: Path, make: Any, workers: Sequence[int], worlds: Sequence[int], kills: Sequence[int | None]) -> Any:
    """Run the parts of a run one after the other; return the result of the last one, and all warnings."""
    folder.mkdir()
    for part, (num_workers, world, kill_at) in enumerate(zip(workers, worlds, kills, strict=True)):
        place: dict[str, str] = {}
        if world > 1:
            with socket.create_server(("127.0.0.1", 0)) as free:
                port = free.getsockname()[1]
            place = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        pids = [_fork(partial(_part, folder, part, rank, make, num_workers, kill_at, place)) for rank in range(world)]
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        assert codes == [0 if kill_at is None else -signal.SIGKILL] * world, (part, codes)
    return _results(folder)


def _results(folder: Path) -> Any:
    """Return the samples of every epoch, the result of the last part, and all warnings."""
    steps: dict[int, list[tuple[int, int, list[Any]]]] = {}
    for path in sorted(folder.glob("part-*")):
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        first, part = lines[0]["step"], int(path.name.split("-")[1])
        # Steps after the checkpoint are lost with the killed process.
        for step in [step for step, found in steps.items() if step >= first and found[0][0] < part]:
            del steps[step]
        for line in lines:
            steps.setdefault(line["step"], []).append((part, line["epoch"], line["samples"]))
    epochs: list[list[Any]] = [[] for _ in range(NUM_EPOCHS)]
    for _, found in sorted(steps.items()):
        for _, epoch, samples in found:
            epochs[epoch].extend(samples)
    result = json.loads((folder / "result").read_text(encoding="utf-8"))
    messages = [path.read_text(encoding="utf-8") for path in folder.glob("warnings-*")]
    return {**result, "samples": epochs}, messages


def _fork(run: Callable[[], None]) -> int:
    if pid := os.fork():
        return pid
    code = 1
    try:
        run()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _part(
    folder: Path, part: int, rank: int, make: Any, num_workers: int, kill_at: int | None, place: Mapping[str, str]
) -> None:
    """Train from the newest checkpoint to the end, or until this process kills itself."""
    if place:
        os.environ.update({**place, "RANK": str(rank), "LOCAL_RANK": str(rank), "GLOO_SOCKET_IFNAME": "lo"})
    # As a new process may find them.
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(99 + 10 * part + rank)
    model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(generator=generator)

    def step(trainer: Any, batch: Any) -> Any:
        inputs, targets = batch
        context = trainer.context
        if not context.run.batch.is_idle:
            line = {"step": context.progress.batches, "epoch": context.progress.epoch, "samples": inputs.tolist()}
            with (folder / f"part-{part}-{rank}").open("a", encoding="utf-8") as log:
                log.write(json.dumps(line) + "\n")
        return {"loss": nn.functional.cross_entropy(context.model(inputs[:, 1:]), targets)}

    def die(context: Any, output: Any) -> None:
        if context.progress.batches == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    with warnings.catch_warnings(record=True) as reported:
        # Libraries use names that torch has deprecated.
        warnings.simplefilter("always")
        data, options = make(num_workers)
        settings: dict[str, Any] = {"seed": 11, "batch_size": BATCH_SIZE, "verbose": False, **options}
        trainer = DDPTrainer(Trainer(model, "cpu", train_step=step, checkpoint_dir=folder / "checkpoints", **settings))
        trainer.context.callbacks.add(LambdaCallback(on_step_end=die))
        trainer.fit(data, max_length=Epochs(NUM_EPOCHS), checkpoint_period=Batches(SAVE_EVERY), resume="auto")
    (folder / f"warnings-{part}-{rank}").write_text("\n".join(str(it.message) for it in reported), encoding="utf-8")
    if rank == 0:
        following = [float(torch.rand(())), random.random(), float(np.random.random())]
        weights = [it.tolist() for it in model.parameters()]
        found = {"weights": weights, "losses": list(trainer.history.losses), "following": following}
        (folder / "result").write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    torch.set_num_threads(1)
    chosen, target, *cases = sys.argv[1:]
    # Otherwise each fork imports them, when it builds its optimizer or its data.
    for module in ("torch._dynamo", *(["datasets"] if "Hugging Face" in chosen else [])):
        importlib.import_module(module)
    print(json.dumps({name: cell(chosen, name, Path(target)) for name in cases or CASES}))
