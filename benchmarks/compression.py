"""How many bytes an update has, by what it goes through on its way to the server.

    python benchmarks/compression.py

The update is that of a client which has trained an MLP of some 100,000 weights on digits for an epoch. Nothing is timed
here; the error is what is lost on the way, as a share of the update's length.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from dovetail.algorithms import FedAvg
from dovetail.clients.simple import Client
from dovetail.data.datasets import digits
from dovetail.data.models import mlp
from dovetail.federated.data.partition import iid
from dovetail.federated.data.sources import PartitionedData
from dovetail.federated.messages import Task, Update, Weights
from dovetail.federated.postprocess import Chain, Gathering
from dovetail.trainers.composable import ComposableTrainer
from report import Row, Section, Table, parser

__all__ = ["main"]

SEED, NUM_CLIENTS = 7, 4

CHAINS: dict[str, list[Any]] = {
    "as it is": [],
    "`bfloat16`": ["bfloat16"],
    "`quantization`, 8 bits": [{"quantization": {"bits": 8}}],
    "`quantization`, 4 bits": [{"quantization": {"bits": 4}}],
    "`top_k`, 10 %": [{"top_k": {"ratio": 0.1}}],
    "`top_k`, 1 %": [{"top_k": {"ratio": 0.01}}],
    "`zstd`": ["zstd"],
    "`quantization`, 8 bits, then `zstd`": [{"quantization": {"bits": 8}}, "zstd"],
    "`qsgd`, then `zstd`": ["qsgd", "zstd"],
    "`top_k`, 1 %, then `qsgd` and `zstd`": [{"top_k": {"ratio": 0.01}}, "qsgd", "zstd"],
}


def main(arguments: list[str] | None = None) -> int:
    options = parser(__doc__).parse_args(arguments)
    torch.set_num_threads(1)
    task, update = trained()
    section = Section(
        "compression",
        "Sizes of updates",
        "The update of one client after [postprocessors](../docs/postprocessors.md): its bytes against those of the "
        "plain update, and what is lost on the way. Lengths are L2 norms.",
        is_quick=options.quick,
    )
    rows = []
    for name, steps in CHAINS.items():
        chain = Chain(steps)
        sent = chain.encode(update, task, {})
        (found,), faults = chain.decode([sent], Gathering(1, [1], task.weights))
        assert not faults
        lost = {key: found.delta[key] - value for key, value in update.delta.items()}
        error = length(lost) / length(update.delta)
        rows.append(Row(name, [100 * sent.num_bytes / update.num_bytes], cells=[f"{sent.num_bytes:,}", f"{error:.2%}"]))
    section.add(
        Table(
            f"One update of {sum(value.numel() for value in update.delta.values()):,} weights",
            "% of the bytes",
            rows,
            ("bytes", "error"),
            form="{:.1f}",
            note="Rounding by chance (`quantization`, `qsgd`) is unbiased: errors of many clients cancel in the mean.",
            is_drawn=False,
        )
    )
    section.save(options)
    return 0


def trained() -> tuple[Task, Update]:
    """Return what a client was asked, and its answer."""
    images, labels = digits()[0].tensors
    data = PartitionedData((images.flatten(1), labels), iid(len(labels), NUM_CLIENTS, seed=SEED))
    torch.manual_seed(SEED)
    model = mlp(64, 10, (1340,))
    client = Client(trainer=ComposableTrainer(device="cpu", verbose=False))
    client.prepare(model, data, FedAvg())
    weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
    task = Task(1, 1, weights, seed=SEED, config={"epochs": 1, "batch_size": 32})
    return task, client.work(task, {})[0]


def length(weights: Weights) -> float:
    """Return the norm of all weights together."""
    return float(torch.cat([value.flatten() for value in weights.values()]).norm())


if __name__ == "__main__":
    sys.exit(main())
