"""What a data-parallel step costs beside a hand-written torchrun script: two processes, both sides in turns.

    python benchmarks/ddp.py

Each round trains both ways in the same two processes, one after the other, the order changing from round to round.
Printed are the median of the ratios of their times, its middle half, and for scale the hand-written side against
itself.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

BAR = 1.02
ROUNDS = 41


def main() -> int:
    if "RANK" in os.environ:
        return work(Path(sys.argv[1]))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result.json")
        processes = [
            subprocess.Popen(
                [sys.executable, __file__, str(result)],
                # One core each: two processes with two threads each would wait for each other, spinning.
                env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"},
            )
            for rank in range(2)
        ]
        codes = [process.wait() for process in processes]
        if any(codes):
            return 1
        rows = json.loads(result.read_text())
    print(f"{'model':<14}{'by hand':>12}{'ours':>12}{'ratio':>8}{'middle half':>16}{'by hand twice':>16}")
    for name, times in rows.items():
        ratios = sorted(ours / hand for hand, ours, _ in times)
        low, middle, high = statistics.quantiles(ratios, n=4)
        noise = statistics.median(again / hand for hand, _, again in times)
        hand, ours = (statistics.median(column) * 1e3 for column in list(zip(*times, strict=True))[:2])
        verdict = (
            "met" if high <= BAR else "missed" if low > BAR else "unclear" if middle > BAR else "met, by the median"
        )
        spread = f"{low:.3f} to {high:.3f}"
        print(f"{name:<14}{hand:>9.3f} ms{ours:>9.3f} ms{middle:>8.3f}{spread:>16}{noise:>16.3f}  {verdict}")
    print(f"bar: {BAR}")
    return 0


def work(target: Path) -> int:
    import torch
    import torch.distributed as dist
    from torch import Tensor, nn
    from torch.nn.parallel import DistributedDataParallel

    from dovetail import Epochs
    from dovetail.trainers import DDPTrainer, Trainer

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()

    def mlp() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))

    def wide() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))

    def cnn() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(32 * 49, 10),
        )

    problems: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
        "MLP": (mlp, (64,), 150),
        "wide MLP, 4 MB": (wide, (64,), 30),
        "CNN": (cnn, (1, 28, 28), 30),
    }

    def by_hand(make: Callable[[], nn.Module], batches: list[tuple[Tensor, Tensor]]) -> Callable[[], float]:
        torch.manual_seed(0)
        model = DistributedDataParallel(make())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        criterion = nn.CrossEntropyLoss()
        own = batches[rank::2]

        def run() -> float:
            started = time.perf_counter()
            for inputs, targets in own:
                optimizer.zero_grad()
                loss = criterion(model(inputs), targets)
                loss.backward()
                optimizer.step()
            return (time.perf_counter() - started) / len(own)

        return run

    def with_trainer(make: Callable[[], nn.Module], batches: list[tuple[Tensor, Tensor]]) -> Callable[[], float]:
        torch.manual_seed(0)
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        trainer = DDPTrainer(Trainer(model, "cpu", optimizer=optimizer, verbose=False))
        clock = Clock()
        trainer.callbacks.add(clock)

        def run() -> float:
            trainer.fit(batches, max_length=Epochs(trainer.context.progress.epoch + 1))
            return clock.seconds / (len(batches) // 2)

        return run

    from dovetail.callbacks import Callback

    class Clock(Callback):
        """Measures an epoch; what a run costs once is not in it, as the making of the model is not by hand."""

        def on_epoch_start(self, context: Any) -> None:
            self.started = time.perf_counter()

        def on_epoch_end(self, context: Any, metrics: Any) -> None:
            self.seconds = time.perf_counter() - self.started

    rows = {}
    for name, (make, shape, steps) in problems.items():
        generator = torch.Generator().manual_seed(1)
        batches = [
            (torch.randn(32, *shape, generator=generator), torch.randint(10, (32,), generator=generator))
            for _ in range(2 * steps)
        ]
        sides = [by_hand(make, batches), with_trainer(make, batches), by_hand(make, batches)]
        for side in sides:
            side()
        times = []
        for number in range(ROUNDS):
            order = [0, 1, 2] if number % 2 == 0 else [2, 1, 0]
            found = [0.0] * 3
            for index in order:
                dist.barrier()
                found[index] = sides[index]()
            times.append(found)
        rows[name] = times
    if rank == 0:
        target.write_text(json.dumps(rows))
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
