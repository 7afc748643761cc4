"""What a data-parallel step costs beside a hand-written torchrun script: two processes, both sides in turns.

    python benchmarks/ddp.py

Each round trains both ways in the same two processes, one after the other, the order changing from round to round;
for scale, so does the hand-written side against itself. The second table repeats this over slow networks: a network
namespace whose loopback `tc` limits to a rate. This needs `unshare`, `ip` and `tc`, and the permission to use them.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pair import run_pair
from report import Row, Section, Table, parser, ratios, upper_quartile, verdict

__all__ = ["main"]

BAR = 1.02
# Rounds, and those of a quick run.
ROUNDS = (31, 3)
# Rates of the limited loopback, with the steps and rounds of each; a step at the slowest rate takes a second.
RATES = {"10gbit": (10, (41, 3)), "1gbit": (3, (31, 2)), "400mbit": (2, (25, 2))}


def main(arguments: list[str] | None = None) -> int:
    words = parser(__doc__)
    words.add_argument("--target", type=Path, help="be one of the processes: write what was found to this file")
    words.add_argument("--rate", choices=RATES, help="train over a loopback of this rate; only in such a namespace")
    words.add_argument("--only-rate", choices=RATES, help="measure only at this rate")
    options = words.parse_args(arguments)
    if options.target is not None:
        return work(options.target, options.rate, is_quick=options.quick)
    section = Section(
        "ddp",
        "Several processes",
        "A step of `DDPTrainer` against one of a script written by hand for `torchrun` with torch's "
        "`DistributedDataParallel`: two processes of one thread each, gloo over the loopback.",
        is_quick=options.quick,
    )
    columns = ("by hand, ms", "ours, ms")
    if options.only_rate is None:
        note = f"{ROUNDS[options.quick]} rounds."
        rows = _rows(run_pair(__file__, "--target", options.quick))
        section.add(Table("Time of a step in two processes", "time over by hand", rows, columns, note=note))
    limited: list[Row] = []
    for rate in RATES if options.only_rate is None else [options.only_rate]:
        found = run_limited(rate, options.quick)
        if found is None:
            # Loud, so that a missing table is not mistaken for a passed one.
            print(f"NOT MEASURED: the network of {rate}: {NO_NAMESPACE}", file=sys.stderr)
        else:
            limited += _rows(found)
    note = "Six layers of 1024 × 1024: 25 MB of gradients." if limited else f"NOT MEASURED: {NO_NAMESPACE}."
    section.add(Table("Time of a step over a slow network", "time over by hand", limited, columns, note=note))
    section.save(options)
    return 0


NO_NAMESPACE = "a network namespace with a limited loopback cannot be made here (unshare -n, ip link, tc qdisc)"


def _rows(found: Any) -> list[Row]:
    rows = []
    for name, times in found.items():
        hand, ours, again = zip(*times, strict=True)
        noise = upper_quartile([abs(ratio - 1) for ratio in ratios(again, hand)])
        samples = ratios(ours, hand)
        shown = tuple(f"{statistics.median(column) * 1e3:.3f}" for column in (hand, ours))
        rows.append(Row(f"dovetail: {name}", samples, BAR, verdict=verdict(samples, BAR, noise=noise), cells=shown))
        rows.append(Row(f"by hand, twice: {name}", ratios(again, hand), is_noise=True))
    return rows


def run_limited(rate: str, quick: bool) -> Any:
    """Run both processes over a loopback of a rate, and return the times; None if there can be no namespace."""
    limit = f"ip link set lo up && tc qdisc add dev lo root tbf rate {rate} burst 2mb latency 100ms"
    inside = ["unshare", "--net", *([] if os.geteuid() == 0 else ["--map-root-user"]), "sh", "-ec"]
    try:
        subprocess.run([*inside, limit], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    folder = Path(__file__).parent
    with tempfile.TemporaryDirectory() as place:
        target = Path(place, "found.json")
        program = (
            f"import sys, json; sys.path.insert(0, {str(folder)!r}); from pair import run_pair; "
            f"found = run_pair({__file__!r}, '--target', {quick}, '--rate', {rate!r}); "
            f"open({str(target)!r}, 'w').write(json.dumps(found))"
        )
        subprocess.run([*inside, f'{limit}; exec "$@"', "sh", sys.executable, "-c", program], check=True)
        return json.loads(target.read_text())


def work(target: Path, rate: str | None, *, is_quick: bool) -> int:
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

    def square() -> nn.Module:
        return nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(1024, 1024), nn.ReLU())))

    problems: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
        "MLP": (mlp, (64,), 150),
        "wide MLP, 4 MB": (wide, (64,), 30),
        "CNN": (cnn, (1, 28, 28), 30),
    }
    rounds = ROUNDS[is_quick]
    if rate is not None:
        steps, choices = RATES[rate]
        problems, rounds = {rate: (square, (1024,), steps)}, choices[is_quick]

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
        trainer.context.callbacks.add(clock)

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
        for number in range(rounds):
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
