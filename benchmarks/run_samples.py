"""Cost of the samples of a running run, as a share of its time.

A sample is measured with and without child processes. Then runs with steps of about 1 ms, with and without samples,
alternate, and their CPU times are compared.

    python benchmarks/run_samples.py
"""

from __future__ import annotations

import math
import statistics
import subprocess
import sys
import tempfile
import time
from array import array
from pathlib import Path

import psutil
import torch
from torch import nn

from dovetail.history import samples
from dovetail.history.samples import Sampler
from dovetail.trainers import Trainer


def sample_milliseconds(num_children: int, number: int = 200) -> float:
    """Return the median CPU time of a sample with 1,000 new losses."""
    children = [subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) for _ in range(num_children)]
    losses, times = array("d"), []
    with tempfile.TemporaryDirectory() as folder:
        sampler = Sampler(Path(folder) / "ck_samples.jsonl")
        sampler.start(is_new=True)
        for _ in range(number):
            losses.extend([1.0] * 1000)
            before = time.thread_time()
            sampler.sample(losses)
            times.append(time.thread_time() - before)
    for child in children:
        child.kill()
        child.wait()
    return 1000 * statistics.median(times)


def run_seconds(*, is_sampled: bool, steps: int) -> float:
    """Return the CPU time of a run."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10))
    data = torch.randn(64 * steps, 256), torch.randint(10, (64 * steps,))
    samples.FIRST = 0.0 if is_sampled else math.inf
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(model, "cpu", checkpoint_dir=folder, batch_size=64, num_epochs=1, verbose=False)
        before = time.process_time()
        trainer.fit(data)
        return time.process_time() - before


def main() -> None:
    torch.set_num_threads(1)
    print(f"{len(psutil.pids())} processes on the machine")
    for children in (0, 8):
        cost = sample_milliseconds(children)
        period = max(1000 * samples.SHORTEST, samples._COST_FACTOR * cost)
        print(
            f"sample with {children} children: {cost:.2f} ms, at most every {period / 1000:.1f} s: {cost / period:.3%}"
        )
    steps = 3000
    run_seconds(is_sampled=True, steps=100)
    pairs = [[run_seconds(is_sampled=it, steps=steps) for it in (True, False)] for _ in range(5)]
    ratios = [sampled / plain for sampled, plain in pairs]
    step = 1000 * statistics.median(plain for _, plain in pairs) / steps
    print(f"runs of {steps} steps of {step:.2f} ms, CPU time with samples / without: {statistics.median(ratios):.4f} "
          f"({min(ratios):.4f} to {max(ratios):.4f})")  # fmt: skip


if __name__ == "__main__":
    main()
