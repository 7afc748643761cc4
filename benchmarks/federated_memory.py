"""How much memory a federation takes, by the number of its clients.

    python benchmarks/federated_memory.py [--rounds 3] [--per-round 100] [--backend sequential]

Every population runs in a process of its own, with the same model and as many clients per round. What a client learns
from is made when it is asked. Growth is from before the server is made to the most that the process ever had; Python's
share of it is what tracemalloc sees. A row per population: the numbers should not depend on it.
"""

from __future__ import annotations

import json
import logging
import resource
import statistics
import subprocess
import sys
import tracemalloc
from typing import Any

from report import Row, Section, Table, parser

__all__ = ["main"]

POPULATIONS = (1_000, 100_000, 1_000_000)


def measured(population: int, rounds: int, per_round: int, backend: str) -> dict[str, float]:
    """Run a federation in this process, and return what it took in megabytes."""
    import torch

    from dovetail.clients import simple
    from dovetail.federated.data.sources import GeneratedData
    from dovetail.servers import fedavg
    from dovetail.trainers.composable import ComposableTrainer

    logging.disable()
    torch.set_num_threads(1)

    def samples(client_id: int) -> tuple[Any, Any]:
        generator = torch.Generator().manual_seed(client_id)
        return torch.randn(20, 60, generator=generator), torch.randint(0, 10, (20,), generator=generator)

    def federation(num_clients: int, num_rounds: int) -> Any:
        data = GeneratedData(num_clients, samples, num_samples=lambda _: 20, model=lambda: torch.nn.Linear(60, 10))
        return fedavg.Server(
            datasource=data, rounds=num_rounds, total_clients=num_clients, per_round=per_round, backend=backend
        )

    def client() -> simple.Client:
        return simple.Client(trainer=ComposableTrainer(num_epochs=1, batch_size=10, learning_rate=0.1, verbose=False))

    # Whatever is imported, compiled and cached at first use is there afterwards.
    federation(per_round, 1).run(client())
    before = peak()
    tracemalloc.start()
    federation(population, rounds).run(client())
    traced = tracemalloc.get_traced_memory()[1] / 2**20
    return {"grown": peak() - before, "python": traced, "whole": peak()}


def peak() -> float:
    """Return the most memory that this process ever had, in megabytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**10 if sys.platform == "linux" else 2**20)


def main(arguments: list[str] | None = None) -> int:
    words = parser(__doc__)
    words.add_argument("--rounds", type=int, default=3)
    words.add_argument("--per-round", type=int, default=100)
    words.add_argument("--backend", default="sequential")
    words.add_argument("--population", type=int, help="run this one alone, and print what it took as JSON")
    options = words.parse_args(arguments)
    if options.population is not None:
        print(json.dumps(measured(options.population, options.rounds, options.per_round, options.backend)))
        return 0
    repeats = 1 if options.quick else 3
    found: dict[int, list[dict[str, float]]] = {population: [] for population in POPULATIONS}
    for _ in range(repeats):
        for population, each in found.items():
            command = [sys.executable, __file__, "--population", str(population), "--rounds", str(options.rounds)]
            command += ["--per-round", str(options.per_round), "--backend", options.backend]
            each.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    section = Section(
        "federated_memory",
        "Memory of a federation",
        "The same rounds in populations of a thousand to a million clients, each in a process of its own: how much "
        "the process grows. What a client learns from is made when it is asked, so the rows should be alike.",
        is_quick=options.quick,
    )
    rows = [
        Row(
            f"{population:,} clients",
            [one["grown"] for one in each],
            cells=[_middle(each, name, form) for name, form in (("python", "{:.2f}"), ("whole", "{:.0f}"))],
        )
        for population, each in found.items()
    ]
    section.add(
        Table(
            f"{options.rounds} rounds of {options.per_round} clients, backend {options.backend}",
            "growth, MB",
            rows,
            ("of it Python's, MB", "whole process, MB"),
            form="{:.1f}",
            note=f"{repeats} process{'es' if repeats > 1 else ''} each.",
            is_drawn=False,
        )
    )
    section.save(options)
    return 0


def _middle(found: list[dict[str, float]], name: str, form: str) -> str:
    return form.format(statistics.median(one[name] for one in found))


if __name__ == "__main__":
    sys.exit(main())
