"""What layers add to a step: each around the same trainer, beside the hand-written loop; and mixed precision by hand.

    python benchmarks/layers.py

The step is the smallest of `loop.py`, so that what a layer does can be seen at all. bfloat16 is slower than float32 on
most CPUs: mixed precision is compared with a loop that does the same by hand.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import loop
from dovetail.trainers import AMPTrainer, AutoBatchTrainer, DDPTrainer, TimedTrainer, Trainer, TrainerDecorator
from dovetail.trainers.addons import PrecisionMixerAddon
from dovetail.units import Epochs
from loop import AGAIN, HAND, Job
from report import Section, parser

__all__ = ["main"]

REPEATS = (15, 3)

LAYERS: dict[str, Callable[[Any], Any]] = {
    "no layer": lambda trainer: trainer,
    "a decorator that changes nothing": TrainerDecorator,
    "five of them": lambda trainer: _nested(trainer, 5),
    "TimedTrainer": TimedTrainer,
    "AutoBatchTrainer": AutoBatchTrainer,
    "DDPTrainer, one process": DDPTrainer,
}


def main(arguments: list[str] | None = None) -> int:
    options = parser(__doc__).parse_args(arguments)
    torch.set_num_threads(1)
    repeats = REPEATS[options.quick]
    section = Section(
        "layers",
        "Layers and mixed precision",
        "The time of a step of a two-layer MLP of width 10, with a layer around the trainer; and a step in bfloat16 "
        "as `AMPTrainer`, as an add-on and by hand. Displays are off.",
        is_quick=options.quick,
    )
    tiny = loop.WORKLOADS[0]
    plain: dict[str, loop.Contestant] = {HAND: loop.by_hand, AGAIN: loop.by_hand}
    plain |= {f"dovetail, {name}": _with(layer) for name, layer in LAYERS.items()}
    mixed: dict[str, loop.Contestant] = {
        HAND: by_hand_in_bfloat16,
        AGAIN: by_hand_in_bfloat16,
        "dovetail, AMPTrainer": _with(lambda trainer: AMPTrainer(trainer, precision="bf16")),
        "dovetail, PrecisionMixerAddon": with_add_on,
    }
    for title, contestants in (("Layers, MLP of width 10", plain), ("bfloat16, MLP of width 10", mixed)):
        workload = loop.Workload(**{**vars(tiny), "title": title, "bars": {}})
        section.add(loop.tabulate(workload, *loop.measure(workload, contestants, repeats, options.quick)))
    section.save(options)
    return 0


def _with(layer: Callable[[Any], Any]) -> loop.Contestant:
    def run(job: Job) -> None:
        layer(_trainer(Trainer, job)).fit(job.train, max_length=Epochs(job.epochs))

    return run


def with_add_on(job: Job) -> None:
    trainer = _trainer(Trainer.add_on(PrecisionMixerAddon), job, precision="bf16")
    trainer.fit(job.train, max_length=Epochs(job.epochs))


def by_hand_in_bfloat16(job: Job) -> None:
    """Train with the loop that everyone writes, in mixed precision."""
    for _ in range(job.epochs):
        for inputs, targets in job.train:
            job.optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = job.criterion(job.model(inputs), targets)
            loss.backward()
            job.optimizer.step()


def _trainer(kind: type[Any], job: Job, **settings: Any) -> Any:
    assert isinstance(job.model, nn.Module)
    return kind(
        job.model,
        "cpu",
        optimizer=job.optimizer,
        criterion=job.criterion,
        nonfinite="ignore",
        verbose=False,
        **settings,
    )


def _nested(trainer: Any, depth: int) -> Any:
    for _ in range(depth):
        trainer = TrainerDecorator(trainer)
    return trainer


if __name__ == "__main__":
    sys.exit(main())
