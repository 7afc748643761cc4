"""What one process of a group does in `test_core_ranks.py`: `python core_ranks.py FOLDER`, in torchrun's place.

Every case is a function that returns plain values; the results of each rank go to `FOLDER/<rank>.json`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dovetail import core
from dovetail.core import METRICS, Context, DistributedContext, read_metrics
from dovetail.info import VARIABLE, TrialInfo, write_info
from dovetail.pytorch.batch_process import TorchBatchProcessor, torch_batch_process
from dovetail.runtime.signals import Interrupted

CASES: dict[str, Callable[..., Any]] = {}


def case(function: Callable[..., Any]) -> Callable[..., Any]:
    CASES[function.__name__] = function
    return function


def sentence_of(function: Callable[[], Any]) -> list[str]:
    try:
        function()
    except Exception as error:
        return [type(error).__name__, str(error)]
    return ["nothing", ""]


# ------------------------------------------------------------------ messages


@case
def messages(context: Context, folder: Path) -> Any:
    peers = context.distributed
    return {
        "gather": peers.gather(peers.rank),
        "gather_local": peers.gather_local(peers.rank),
        "allgather": peers.allgather({"rank": peers.rank, "list": [1, "a", None]}),
        "allgather_local": peers.allgather_local(peers.rank),
        "broadcast": peers.broadcast(f"from {peers.rank}"),
        "broadcast_local": peers.broadcast_local(f"from {peers.rank}"),
    }


@case
def structures(context: Context, folder: Path) -> Any:
    peers = context.distributed
    sent = (peers.rank, torch.full((2,), peers.rank), np.float32(0.5), {"large": torch.zeros(100_000)})
    received = peers.allgather(sent)
    return [
        [type(each).__name__, each[0], each[1].tolist(), type(each[2]).__name__, each[3]["large"].numel()]
        for each in received
    ]


@case
def several_machines(context: Context, folder: Path) -> Any:
    """As if every process were alone on its machine."""
    peers = DistributedContext(rank=context.distributed.rank, size=2, cross_rank=context.distributed.rank, cross_size=2)
    return [peers.allgather_local(peers.rank), peers.gather_local(peers.rank), peers.broadcast_local(peers.rank)]


@case
def a_value_that_cannot_be_sent(context: Context, folder: Path) -> Any:
    peers = context.distributed
    sentence = sentence_of(lambda: peers.allgather({1, 2} if peers.rank == 1 else 0))
    return [sentence, peers.allgather(peers.rank)]


@case
def another_place(context: Context, folder: Path) -> Any:
    wrong = DistributedContext(rank=1 - context.distributed.rank, size=2, local_size=2)
    return sentence_of(lambda: wrong.allgather(0))


# ------------------------------------------------------------------ checkpoints


@case
def shards(context: Context, folder: Path) -> Any:
    checkpoints, rank = context.checkpoint, context.distributed.rank
    metadata = {"steps_completed": 3, f"rank {rank}": rank}
    with checkpoints.store_path(metadata, shard=True) as (path, storage_id):
        (path / "deep").mkdir()
        (path / "deep" / f"own-{rank}").write_text(f"own {rank}")
        (path / "same").write_text("the same")
    with checkpoints.restore_path(storage_id) as path:
        files = {str(it.relative_to(path)): it.read_text() for it in path.rglob("*") if it.is_file()}
    checkpoints.download(storage_id, folder / "copy")
    context.distributed.allgather(0)
    copied = sorted(str(it.relative_to(folder / "copy")) for it in (folder / "copy").rglob("*") if it.is_file())
    return {
        "id": storage_id,
        "latest": checkpoints.latest(),
        "files": files,
        "copied": copied,
        "metadata": checkpoints.get_metadata(storage_id),
    }


@case
def uploads(context: Context, folder: Path) -> Any:
    rank = context.distributed.rank
    source = folder / "source"
    if rank == 1:
        source.mkdir()
        (source / "only").write_text("x")
    storage_id = context.checkpoint.upload(source if rank == 1 else None, shard=True)
    with context.checkpoint.restore_path(storage_id) as path:
        return os.listdir(path)


def store(context: Context, content: str, **metadata: Any) -> None:
    with context.checkpoint.store_path(metadata, shard=True) as (path, _):
        (path / "file").write_text(content)


def fail(context: Context) -> None:
    with context.checkpoint.store_path(shard=True):
        if context.distributed.rank == 1:
            raise ArithmeticError("no luck")


@case
def refused_shards(context: Context, folder: Path) -> Any:
    rank = context.distributed.rank
    context.distributed.allgather(0)
    before = sorted(os.listdir(context.checkpoint.directory))
    sentences = [
        sentence_of(lambda: store(context, f"by {rank}")),
        sentence_of(lambda: store(context, "same", note=rank)),
        sentence_of(lambda: store(context, "same", steps_completed="x" if rank == 1 else 1)),
        sentence_of(lambda: context.checkpoint.upload(folder / "missing" if rank == 1 else None, shard=True)),
        sentence_of(lambda: fail(context)),
    ]
    context.distributed.allgather(0)
    return {"sentences": sentences, "left": sorted(os.listdir(context.checkpoint.directory)) == before}


# ------------------------------------------------------------------ preemption and reports


@case
def preemption(context: Context, folder: Path) -> Any:
    answers = []
    for told in (1, 0):
        answers.append(context.preempt.should_preempt())
        if context.distributed.rank == told:
            os.kill(os.getpid(), signal.SIGTERM)
        answers.append(context.preempt.should_preempt())
    return answers


@case
def reports(context: Context, folder: Path) -> Any:
    context.train.report_validation_metrics(1, {"rank": context.distributed.rank})
    context.distributed.allgather(0)
    rows = read_metrics(context.train.directory / METRICS)
    return [row["metrics"] for row in rows if row.get("group") == "validation"]


# ------------------------------------------------------------------ batch processing

SEEN: list[Any] = []


class Recorder(TorchBatchProcessor):
    """Notes every batch; the second one of a rank is preceded by a signal where that is wanted."""

    told: int | None = None

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self.total = context.wrap_reducer(sum, name="total")

    def process_batch(self, batch: Any, batch_idx: int) -> None:
        assert not torch.is_grad_enabled()
        if self.told is not None and (self.context.distributed.rank, batch_idx) == (self.told, 1):
            os.kill(os.getpid(), signal.SIGTERM)
        SEEN.append([batch_idx, batch.tolist()])
        self.total.update(batch.sum().item())
        with self.context.upload_path() as path:
            (path / f"{batch_idx}.txt").write_text(str(batch.tolist()))


def processed(folder: Path, **arguments: Any) -> Any:
    folder.mkdir(exist_ok=True)
    trial = folder / f"trial-{os.environ['RANK']}.json"
    write_info(trial, TrialInfo(trial_id=1, directory=str(folder / "trial")))
    os.environ[VARIABLE] = str(trial)
    SEEN.clear()
    code = None
    try:
        torch_batch_process(Recorder, torch.arange(15), batch_size=2, **arguments)
    except Interrupted as interruption:
        code = interruption.code
    finally:
        del os.environ[VARIABLE]
    rows = read_metrics(folder / "trial" / METRICS) if os.environ["RANK"] == "0" else []
    return {
        "seen": list(SEEN),
        "code": code,
        "metrics": [row["metrics"] for row in rows if row.get("group") == "inference"],
        "progress": [row["progress"] for row in rows if "progress" in row],
        "left": sorted(name.split("-")[0] for name in os.listdir(folder / "trial")),
    }


@case
def batches(context: Context, folder: Path) -> Any:
    return processed(folder / "all", checkpoint_interval=3)


@case
def few_batches(context: Context, folder: Path) -> Any:
    return processed(folder / "few", max_batches=2)


@case
def interrupted_batches(context: Context, folder: Path) -> Any:
    Recorder.told = 0
    first = processed(folder / "interrupted", checkpoint_interval=2)
    Recorder.told = None
    second = processed(folder / "interrupted", checkpoint_interval=2)
    outputs = sorted(path.name for path in (folder / "interrupted" / "trial").rglob("*.txt"))
    return [first, second, outputs]


@case
def more_processes_go_on(context: Context, folder: Path) -> Any:
    if context.distributed.is_chief:
        Recorder.told = 0
        processed(folder / "grown", checkpoint_interval=3, distributed_context=core.DistributedContext())
        Recorder.told = None
    context.distributed.allgather(None)
    return processed(folder / "grown", checkpoint_interval=2)


# ------------------------------------------------------------------ an error in one process, the last case


@case
def an_error_in_one_process(context: Context, folder: Path) -> Any:
    def body() -> None:
        with core.init(checkpoint_storage=folder / "error") as own:
            own.distributed.allgather(0)
            if own.distributed.rank == 1:
                raise ArithmeticError("no luck")
            own.distributed.allgather(0)

    return sentence_of(body)


if __name__ == "__main__":
    target = Path(sys.argv[1])
    results = {}
    with core.init(checkpoint_storage=target / "storage") as everything:
        for name, function in CASES.items():
            if name != "an_error_in_one_process":
                place = target / name
                place.mkdir(exist_ok=True)
                results[name] = function(everything, place)
    results["an_error_in_one_process"] = an_error_in_one_process(everything, target)
    (target / f"{os.environ['RANK']}.json").write_text(json.dumps(results), encoding="utf-8")
    # As in the other scripts of this kind: the results are written.
    os._exit(0)
