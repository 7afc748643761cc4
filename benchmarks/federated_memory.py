"""How much memory a federation takes, by the number of its clients.

    python benchmarks/federated_memory.py [--rounds 3] [--per-round 100] [--backend sequential]

Every population runs in a process of its own, with the same model and as many clients per round. What a client learns
from is made when it is asked. Growth is from before the server is made to the most that the process ever had; Python's
share of it is what tracemalloc sees. A row per population: the numbers should not depend on it.
"""

from __future__ import annotations

import argparse
import json
import logging
import resource
import subprocess
import sys
import time
import tracemalloc
from typing import Any

POPULATIONS = (1_000, 100_000, 1_000_000)


def measured(population: int, rounds: int, per_round: int, backend: str) -> dict[str, float]:
    """Run a federation in this process, and return what it took in megabytes and seconds."""
    import torch

    from dovetail.clients import simple
    from dovetail.data.federated import GeneratedData
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
    started = time.perf_counter()
    federation(population, rounds).run(client())
    seconds = (time.perf_counter() - started) / rounds
    traced = tracemalloc.get_traced_memory()[1] / 2**20
    return {"grown": peak() - before, "python": traced, "whole": peak(), "seconds": seconds}


def peak() -> float:
    """Return the most memory that this process ever had, in megabytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**10 if sys.platform == "linux" else 2**20)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--per-round", type=int, default=100)
    parser.add_argument("--backend", default="sequential")
    parser.add_argument("--population", type=int, help="run this one alone, and print what it took as JSON")
    options = parser.parse_args()
    if options.population is not None:
        found = measured(options.population, options.rounds, options.per_round, options.backend)
        print(json.dumps(found))
        return
    print(f"{options.rounds} rounds of {options.per_round} clients, backend {options.backend}, MB")
    print(f"{'clients':>10} {'growth':>8} {'of it Python':>13} {'whole process':>14} {'s per round':>12}")
    for population in POPULATIONS:
        command = [sys.executable, __file__, "--population", str(population), "--rounds", str(options.rounds)]
        command += ["--per-round", str(options.per_round), "--backend", options.backend]
        row = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        memory = f"{row['grown']:>8.1f} {row['python']:>13.2f} {row['whole']:>14.0f}"
        print(f"{population:>10,} {memory} {row['seconds']:>12.2f}")


if __name__ == "__main__":
    main()
