"""What a compiled step gains: the workloads of `loop.py`, with one graph for a step, and with one for eight.

    python benchmarks/compile.py
    python benchmarks/compile.py --workload list --threads 1

A graph is made before its clock starts; how long that takes, without and with what the compiler has kept from an
earlier process, is a table of its own. Losses are not bit for bit those of the hand-written loop, because a compiler
sums in another order.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import loop
from dovetail import Batches, Epochs
from dovetail.trainers import CompiledTrainer, Trainer
from loop import AGAIN, COMPILED, HAND, OFF, SEVERAL, WORKLOADS
from report import Row, Section, Table, parser

__all__ = ["main"]

# The workloads whose first calls are measured, and their steps per call.
FIRST_CALLS = (("list", 1), ("list", 8), ("cnn", 1), ("transformer", 1))


def main(arguments: list[str] | None = None) -> int:
    words = parser(__doc__)
    taking_part = [workload for workload in WORKLOADS if COMPILED in workload.bars]
    names = [workload.name for workload in taking_part]
    words.add_argument("--workload", action="append", choices=names, help="only this one; may be given several times")
    words.add_argument("--threads", type=int, default=1, help="threads of torch; 1 by default")
    words.add_argument(
        "--first-step", type=int, help="print the seconds of a first call of so many steps of one workload, and no more"
    )
    options = words.parse_args(arguments)
    torch.set_num_threads(options.threads)
    if options.first_step is not None:
        (name,) = options.workload
        print(first_step(name, options.first_step))
        return 0

    section = Section(
        "compile",
        "Compilation",
        "`CompiledTrainer` against the hand-written loop and against the same trainer without a graph, on four "
        "workloads of [the loop](#the-loop). Graphs are there before the clock starts.",
        is_quick=options.quick,
    )
    for workload in taking_part:
        if options.workload and workload.name not in options.workload:
            continue
        contestants = {HAND: loop.by_hand, AGAIN: loop.by_hand, OFF: loop.with_dovetail_off}
        contestants[COMPILED] = loop.with_compiled
        # Several steps per call are for tiny steps.
        if SEVERAL in workload.bars:
            contestants[SEVERAL] = loop.with_several
        bars = {name: bar for name, bar in workload.bars.items() if name in (COMPILED, SEVERAL)}
        judged = loop.Workload(**{**vars(workload), "bars": bars, "within_noise": False})
        results, missing = loop.measure(judged, contestants, workload.repeats[options.quick], options.quick)
        section.add(loop.tabulate(judged, results, missing))
    if not options.workload or "transformer" in options.workload:
        section.add(floor(1 if options.quick else 7))
    if not options.workload:
        section.add(making(FIRST_CALLS[: 1 if options.quick else None], 1 if options.quick else 2))
    section.save(options)
    return 0


def floor(repeats: int) -> Table:
    """Return where a step of the transformer spends its time: a graph calls products and random numbers as they are."""
    # Not at the top: its import is a part of a first step, which is measured in other processes.
    from torch._inductor import config

    workload = next(workload for workload in WORKLOADS if workload.name == "transformer")
    trainers: dict[str, Any] = {}
    for name in ("eager", "graph"):
        job = workload.job(OFF, quick=False)
        plain = Trainer(
            job.model,
            "cpu",
            optimizer=job.optimizer,
            criterion=job.criterion,
            gradient_clip=job.clip,
            nonfinite="ignore",
            verbose=False,
        )
        trainers[name] = plain if name == "eager" else CompiledTrainer(plain)
        # A graph shows its calls of torch's operations to the profiler only with this setting.
        with config.patch({"cpp.enable_kernel_profile": True}):
            trainers[name].fit(job.train, max_length=Epochs(1))
    samples: dict[str, list[float]] = {}
    for number in range(repeats):
        for name, trainer in trainers.items():
            for part, milliseconds in _parts(trainer, job.train, number + 2).items():
                samples.setdefault(f"{name}, {part}", []).append(milliseconds)
    return Table(
        "Where a step of the transformer spends its time",
        "ms per step",
        [Row(name, values) for name, values in samples.items()],
        form="{:.1f}",
        note=f"{repeats} interleaved rounds of {len(job.train)} steps, under torch's profiler.",
        is_drawn=False,
    )


def _parts(trainer: Any, batches: Any, epochs: int) -> dict[str, float]:
    """Return the milliseconds per step of one more epoch: products of matrices, random numbers, and the rest."""
    started = time.perf_counter()
    with profile(activities=[ProfilerActivity.CPU]) as found:
        trainer.fit(batches, max_length=Epochs(epochs))
        seconds = time.perf_counter() - started
    spent = {"products of matrices": 0.0, "random numbers": 0.0}
    for event in found.key_averages():
        operation = event.key.removeprefix("aten::").removeprefix("aoti_torch_cpu_").removesuffix("_out")
        for part, operations in (("products of matrices", _PRODUCTS), ("random numbers", _DRAWS)):
            if operation in operations:
                spent[part] += event.self_cpu_time_total / 1e6
    spent["all else"] = seconds - sum(spent.values())
    return {part: 1e3 * value / len(batches) for part, value in spent.items()}


_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "mkl_linear", "_mkl_linear"})
_DRAWS = frozenset({"bernoulli_", "bernoulli", "native_dropout", "uniform_"})


def making(calls: tuple[tuple[str, int], ...], repeats: int) -> Table:
    """Return the seconds of first calls: with the compiler, and with the code that an earlier process has stored."""
    rows = []
    for name, size in calls:
        cold, warm = [], []
        for _ in range(repeats):
            with tempfile.TemporaryDirectory() as folder:
                cold.append(in_a_process(name, size, folder))
                warm.append(in_a_process(name, size, folder))
        what = f"{_MODELS[name]}, " + ("a step" if size == 1 else f"{size} steps per call")
        rows += [Row(f"{what}, compiled", cold), Row(f"{what}, from the compiler's cache", warm)]
    return Table(
        "The first call, with the making of its graph",
        "seconds",
        rows,
        form="{:.2f}",
        note=f"{repeats} new processes each.",
        is_log=True,
    )


_MODELS = {"list": "MLP", "cnn": "CNN", "transformer": "transformer"}


def in_a_process(name: str, steps_per_call: int, cache: str) -> float:
    """Return the seconds of a first call in a new process, with the compiler's cache in that folder."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}
    command = [sys.executable, __file__, "--workload", name, "--first-step", str(steps_per_call)]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return float(done.stdout.split()[-1])


def first_step(name: str, steps_per_call: int) -> float:
    """Return the seconds of training up to the end of the first call."""
    job = next(workload for workload in WORKLOADS if workload.name == name).job(COMPILED, quick=True)
    plain = Trainer(
        job.model, "cpu", optimizer=job.optimizer, criterion=job.criterion, gradient_clip=job.clip, verbose=False
    )
    trainer = CompiledTrainer(plain, steps_per_call=steps_per_call)
    started = time.perf_counter()
    # The steps of a larger call are first made one by one.
    trainer.fit(job.train, max_length=Batches(steps_per_call + (steps_per_call > 1)))
    return time.perf_counter() - started


if __name__ == "__main__":
    sys.exit(main())
