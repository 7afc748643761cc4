"""Time of `fit`, `evaluate`, `predict` and `evaluate` of a trainer that starts its own two processes.

    python benchmarks/launching.py

In each round, new interpreters (the start on other systems than Linux), forked processes and one process make the same
four calls in turns. The first call of a program, which starts the fork server, is a row of its own.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from report import Row, Section, Table, parser, ratios

__all__ = ["main"]

ROUNDS = (9, 2)
CALLS = ("fit", "evaluate", "predict", "evaluate, again")
ONE, FORKED, NEW = "one process", "two processes, forked", "two processes, new interpreters"
NUM_SAMPLES = 269


def main(arguments: list[str] | None = None) -> int:
    import torch

    from dovetail.trainers import launching

    options = parser(__doc__).parse_args(arguments)
    rounds = ROUNDS[options.quick]
    torch.set_num_threads(1)
    is_forked = launching._FORKS
    started = time.perf_counter()
    _calls(2)["evaluate"]()
    first = time.perf_counter() - started
    times: dict[str, dict[str, list[float]]] = {name: {call: [] for call in CALLS} for name in (ONE, FORKED, NEW)}
    for number in range(rounds):
        names = list(times)
        random.Random(number).shuffle(names)
        for name in names:
            launching._FORKS = is_forked and name == FORKED
            for call, run in _calls(1 if name == ONE else 2).items():
                started = time.perf_counter()
                run()
                times[name][call].append(time.perf_counter() - started)
    section = Section(
        "launching",
        "Starting processes",
        f"A small model and {NUM_SAMPLES} samples, so that only the start of the processes takes time. Each call "
        "starts two new processes: forked from a process that has imported torch, or as new interpreters.",
        is_quick=options.quick,
    )
    for call in CALLS:
        rows = []
        for name, found in times.items():
            over = statistics.median(ratios(found[call], times[ONE][call]))
            rows.append(Row(name, found[call], cells=(f"{over:.0f}",)))
        if call == "evaluate":
            rows.append(Row(f"{FORKED}, the first call of the program", [first], cells=("",)))
        section.add(Table(call, "seconds", rows, ("over one process",), note=f"{rounds} rounds.", is_log=True))
    section.save(options)
    return 0


def _calls(num_processes: int) -> dict[str, Callable[[], Any]]:
    import torch
    from torch import nn

    from dovetail import Epochs
    from dovetail.trainers import DDPTrainer, Trainer

    torch.manual_seed(0)
    inputs = torch.randn(NUM_SAMPLES, 8)
    data = inputs, (inputs.sum(dim=1) > 0).long()
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
    trainer = DDPTrainer(Trainer(model, "cpu", batch_size=16, seed=0, verbose=False), num_processes=num_processes)
    runs = (
        lambda: trainer.fit(data, max_length=Epochs(1)),
        lambda: trainer.evaluate(data),
        lambda: trainer.predict(inputs),
        lambda: trainer.evaluate(data),
    )
    return dict(zip(CALLS, runs, strict=True))


if __name__ == "__main__":
    sys.exit(main())
