"""Counts of Python calls, which are the same on every machine."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn

import dovetail
from dovetail.trainers import Trainer

NUM_STEPS = 100
HOME = str(Path(dovetail.__file__).parent)


def code_called(run: Callable[[], Any]) -> Counter[CodeType]:
    """Every Python function that a run calls, by its code, and how often."""
    calls: Counter[CodeType] = Counter()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            calls[frame.f_code] += 1

    # A finaliser that runs in between would be counted, too.
    gc.collect()
    gc.disable()
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
        gc.enable()
    return calls


def calls_per_step(prepare: Callable[[], Callable[[Any], Any]]) -> tuple[float, float]:
    """The Python calls that one more batch costs, in all and of Dovetail's own; a run's start and end are not in it."""
    # Torch imports some of itself when it is first used, and then need not be looked through for what is left over.
    prepare()(make_batches(1))
    gc.freeze()
    few, many = make_batches(NUM_STEPS), make_batches(2 * NUM_STEPS)
    run = prepare()
    calls = code_called(lambda: run(few))
    run = prepare()
    more = code_called(lambda: run(many))
    more.subtract(calls)
    own = sum(number for code, number in more.items() if code.co_filename.startswith(HOME))
    return sum(more.values()) / NUM_STEPS, own / NUM_STEPS


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 10))


def make_batches(number: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    inputs, targets = torch.randn(32, 10, generator=generator), torch.randint(10, (32,), generator=generator)
    return [(inputs, targets)] * number


def make_trainer(**settings: Any) -> Trainer:
    model = make_model()
    settings = {"optimizer": torch.optim.SGD(model.parameters(), lr=0.01), "verbose": False, **settings}
    return Trainer(model, "cpu", criterion=nn.CrossEntropyLoss(), **settings)
