"""The planned peak of memory against the peak of torch's allocator, and planned against recorded messages.

    python benchmarks/memory_plan.py

Every model is planned and then really trained on the CPU: in one process, in two processes with `DDPTrainer` or
`FSDPTrainer` or tensor parallel, and in four with hybrid sharding. The processes are real and connected by gloo.
"""

from __future__ import annotations

import gc
import json
import os
import socket
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dovetail import Batches
from dovetail.callbacks import Callback
from dovetail.printing import show_bytes
from dovetail.trainers import ActivationCheckpointTrainer, AMPTrainer, DDPTrainer, FSDPTrainer, PowerSGD, Trainer
from dovetail.trainers.memory_plan import MemoryPlan, plan_memory
from report import Row, Section, Table, library, parser

__all__ = ["CASES", "PLANS", "SETTINGS", "TENSOR", "main", "measure", "plan"]

TENSOR = "FSDP, 2 tensor-parallel processes"
SETTINGS: dict[str, int] = {
    "one process": 1,
    "DDP, 2 processes": 2,
    "FSDP, 2 processes": 2,
    "FSDP, 2 copies of 2 parts": 4,
    TENSOR: 2,
}
CASES = ("MLP", "MLP, accumulation", "wide MLP", "CNN", "transformer", "GPT-2", "activation checkpointing", "bfloat16")
QUICK = ("MLP", "CNN")
# The bar of the plan: its distance from the measured peak, in percent.
BAR = 5.0
_PEAKS = "peak of memory: planned over measured, and the measured bytes of the process that needs most"
_MESSAGES_TITLE = "messages: bytes that a process gives to collective operations per update"
# A hidden option: this process is one of a group, and writes what it measured to the folder.
_RANK = "--rank"


def main(arguments: list[str] | None = None) -> int:
    options = parser(__doc__).parse_args(arguments)
    cases = [name for name in CASES if not (options.quick and name not in QUICK)]
    cases = [name for name in cases if name != "GPT-2" or library("transformers")]
    section = Section(
        "memory_plan",
        "Memory plans",
        "The peak of memory that `plan_memory` computes without training, over the largest number of bytes that "
        "torch's allocator had really given out to a process of a run with two accumulation windows, on the CPU with "
        "gloo. The messages are the bytes that a process gives to collective operations per update: planned, and "
        "recorded in the real processes.",
        is_quick=options.quick,
    )
    # By case and setting: the ratio and the measured peak, the bytes of messages, and how far they are from the
    # recorded ones.
    peaks: dict[str, dict[str, tuple[float, int]]] = {name: {} for name in cases}
    sent: dict[str, dict[str, tuple[int, int]]] = {name: {} for name in cases}
    for setting, size in SETTINGS.items():
        # The other models have no plan that divides their tensors.
        able = [name for name in cases if setting != TENSOR or name in PLANS]
        found = run_group(able, setting, size)
        for name in able:
            planned = plan(name, setting)
            measured = max(each[name]["peak"] for each in found)
            peaks[name][setting] = planned.peak / measured, measured
            if size > 1:
                differences = [_difference(planned.collectives, each[name]["messages"]) for each in found]
                sent[name][setting] = sum(planned.collectives.values()), max(differences)
    rows = []
    for name, pairs in peaks.items():
        far = max(abs(ratio - 1) for ratio, _ in pairs.values())
        texts = tuple(
            "–" if it not in pairs else f"{pairs[it][0]:.3f} of {show_bytes(pairs[it][1])}" for it in SETTINGS
        )
        rows.append(Row(name, [100 * far], BAR, verdict="met" if 100 * far <= BAR else "missed", cells=texts))
    section.add(Table(_PEAKS, "largest difference, %", rows, tuple(SETTINGS), "{:.1f}", is_drawn=False))
    groups = tuple(setting for setting, size in SETTINGS.items() if size > 1)
    rows = [
        Row(
            name,
            [max(far for _, far in pairs.values())],
            cells=tuple("–" if it not in pairs else show_bytes(pairs[it][0]) for it in groups),
        )
        for name, pairs in sent.items()
    ]
    section.add(Table(_MESSAGES_TITLE, "planned minus recorded, bytes", rows, groups, "{:.0f}", is_drawn=False))
    section.save(options)
    return 0


def _difference(planned: Mapping[str, int], recorded: Mapping[str, int]) -> int:
    return sum(abs(planned.get(name, 0) - recorded.get(name, 0)) for name in planned.keys() | recorded.keys())


def run_group(cases: list[str], setting: str, size: int) -> list[dict[str, Any]]:
    """Return what each process of a real group measured, by case."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    shared = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "KINETO_LOG_LEVEL": "6", "OMP_NUM_THREADS": "1"}
    if size > 1:
        shared |= {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "GROUP_RANK": "0"}
        shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, _RANK, folder, setting, *cases]
        places = [{"RANK": str(it), "LOCAL_RANK": str(it)} if size > 1 else {} for it in range(size)]
        processes = [subprocess.Popen(command, env={**shared, **place}) for place in places]
        codes = [process.wait() for process in processes]
        if any(codes):
            raise SystemExit(f"{setting}: exit codes {codes}")
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(size)]


def rank_main(folder: Path, setting: str, cases: list[str]) -> None:
    """Measure cases in this process of a group, and write the results."""
    found = {name: measure(name, setting) for name in cases}
    (folder / f"{os.environ.get('RANK', '0')}.json").write_text(json.dumps(found))


def plan(name: str, setting: str) -> MemoryPlan:
    """Return the plan of a case, with the copies that gloo makes."""
    trainer, data = build(name, setting)
    return plan_memory(trainer, data, num_processes=SETTINGS[setting], backend="gloo")


def measure(name: str, setting: str, repeats: int = 3) -> dict[str, Any]:
    """Return the peak of the allocator in a run of two accumulation windows, and the messages of the second one."""
    messages = Messages()
    peaks = [_peak(name, setting, messages)]
    peaks += [_peak(name, setting) for _ in range(repeats - 1 if SETTINGS[setting] > 1 else 0)]
    # The profiler misses some buffers that threads of gloo free, so a measurement may be too large, but not too small.
    return {"peak": min(peaks), "messages": dict(messages.of_update)}


def _train(trainer: Any, data: list[Any]) -> None:
    with warnings.catch_warnings():
        # Torch warns of operations in place on the outputs of sharded modules, and these models have none.
        warnings.simplefilter("ignore")
        trainer.fit(data, max_length=Batches(2 * trainer.context.run.window.size))


def _peak(name: str, setting: str, messages: Messages | None = None) -> int:
    """Return the largest number of bytes that torch's allocator had given out, as if only one batch were in memory."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        trainer, data = build(name, setting)
        if messages is not None:
            trainer.context.callbacks.add(messages)
        with nullcontext() if messages is None else messages.recorder:
            _train(trainer, data)
    events: list[tuple[int, int, int]] = []
    profiler: Any = recorded.profiler
    _collect(profiler.kineto_results.experimental_event_tree(), events)
    alive: dict[int, int] = {}
    now = peak = 0
    for _, address, size in sorted(events):
        if size < 0:
            now -= alive.pop(address, 0)
            continue
        # The profiler does not record frees in some threads of gloo, but the memory is then used again.
        for other in [it for it, length in alive.items() if it < address + size and address < it + length]:
            now -= alive.pop(other)
        alive[address] = size
        now += size
        peak = max(peak, now)
    return peak - (bytes_of(data) - bytes_of(data[0]))


def _collect(branches: Iterable[Any], events: list[tuple[int, int, int]]) -> None:
    for event in branches:
        if event.tag.name == "Allocation":
            events.append((event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size))
        _collect(event.children, events)


class Messages(Callback):
    """Records the bytes that this process gives to collective operations in the second update."""

    def __init__(self) -> None:
        self.recorder = _Recorder()
        self.of_update: Counter[str] = Counter()

    def on_step_end(self, context: Any, output: Any) -> None:
        window = context.run.window.size
        if context.progress.batches == window:
            self.recorder.sent.clear()
        elif context.progress.batches == 2 * window:
            self.of_update = Counter(self.recorder.sent)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sent: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(it, DTensor) for it in types):
            # It calls the operator again, with its local part.
            return NotImplemented
        name = func._schema.name
        if name in _MESSAGES:
            operation, position = _MESSAGES[name]
            self.sent[operation] += bytes_of(args[position])
        elif name.startswith(("c10d::", "_c10d_functional::")) and "wait" not in name and "wrap" not in name:
            raise NotImplementedError(f"{name} is not recorded")
        return func(*args, **(kwargs or {}))


# The operators of real process groups, and the position of the larger tensors.
_MESSAGES = {
    "c10d::allreduce_": ("all_reduce", 0),
    "c10d::_allgather_base_": ("all_gather", 0),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", 1),
    "c10d::broadcast_": ("broadcast", 0),
    "c10d::allgather_": ("all_gather", 0),
    "_c10d_functional::all_reduce": ("all_reduce", 0),
}


# ------------------------------------------------------------------ models


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        x = x + self.attention(normed, normed, normed, need_weights=False)[0]
        outputs: Tensor = x + self.mlp(x)
        return outputs


class Transformer(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.head = nn.Linear(width, 10)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        outputs: Tensor = self.head(x).mean(1)
        return outputs


def _mlp(width: int = 256) -> nn.Module:
    layers = [nn.Linear(100, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)]
    return nn.Sequential(*layers)


def _cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    )


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    tokens = {"bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=50, n_positions=32, **tokens))


def _labelled(*shape: int) -> tuple[Tensor, Tensor]:
    return torch.randn(*shape), torch.zeros(shape[0], dtype=torch.long)


def _tokens() -> tuple[Tensor, Tensor]:
    return torch.randint(0, 50, (8, 32)), torch.zeros(8, dtype=torch.long)


def _named_tokens() -> dict[str, Tensor]:
    ids = torch.randint(0, 50, (8, 32))
    return {"input_ids": ids, "labels": ids.clone()}


_BUILD: Mapping[str, tuple[Callable[[], nn.Module], Callable[[], Any], Any, Mapping[str, Any]]] = {
    "MLP": (_mlp, partial(_labelled, 32, 100), None, {}),
    "MLP, accumulation": (_mlp, partial(_labelled, 32, 100), None, {"accumulation_steps": 2, "gradient_clip": 1.0}),
    # Several buckets of gradients, which `DDPTrainer` sends early.
    "wide MLP": (partial(_mlp, 640), partial(_labelled, 32, 100), None, {}),
    "CNN": (_cnn, partial(_labelled, 16, 3, 16, 16), None, {}),
    "transformer": (Transformer, _tokens, None, {}),
    "GPT-2": (_gpt2, _named_tokens, None, {}),
    "activation checkpointing": (Transformer, _tokens, ActivationCheckpointTrainer, {}),
    "bfloat16": (Transformer, _tokens, partial(AMPTrainer, precision="bf16"), {}),
    # In the tests only.
    "float16": (_mlp, partial(_labelled, 2000, 100), partial(AMPTrainer, precision="fp16", init_scale=1.0), {}),
    "PowerSGD": (partial(_mlp, 640), partial(_labelled, 32, 100), None, {}),
    "bfloat16 messages": (partial(_mlp, 640), partial(_labelled, 32, 100), None, {}),
}
# Of `DDPTrainer`, by case.
_COMPRESSIONS: Mapping[str, Any] = {"PowerSGD": PowerSGD(rank=4, warm_up=0), "bfloat16 messages": "bf16"}


_MLP_PLAN = {"0": "colwise", "2": "rowwise"}
_TRANSFORMER_PLAN = {"blocks.*.mlp.0": "colwise", "blocks.*.mlp.3": "rowwise"}
# How tensors are divided among tensor-parallel processes, by case.
PLANS: Mapping[str, Mapping[str, str]] = {
    "MLP": _MLP_PLAN,
    "MLP, accumulation": _MLP_PLAN,
    "wide MLP": _MLP_PLAN,
    "transformer": _TRANSFORMER_PLAN,
    "activation checkpointing": _TRANSFORMER_PLAN,
    "bfloat16": _TRANSFORMER_PLAN,
}


def build(name: str, setting: str) -> tuple[Any, list[Any]]:
    """Return the trainer of a case in a setting, and its batches: those of two windows for each process."""
    model, inputs, wrap, options = _BUILD[name]
    torch.manual_seed(0)
    optimizer = partial(torch.optim.AdamW, lr=1e-3)
    trainer: Any = Trainer(model(), "cpu", optimizer=optimizer, seed=0, verbose=False, **options)
    trainer = trainer if wrap is None else wrap(trainer)
    size = SETTINGS[setting]
    if setting.startswith("DDP"):
        trainer = DDPTrainer(trainer, compression=_COMPRESSIONS.get(name))
    elif setting == TENSOR:
        trainer = FSDPTrainer(trainer, mesh={"tensor": 2}, parallelize=PLANS[name])
    elif setting.startswith("FSDP"):
        trainer = FSDPTrainer(trainer, mesh={"replicate": 2, "shard": 2} if size == 4 else None)
    # Tensor-parallel processes compute the same batches.
    size = 1 if setting == TENSOR else size
    return trainer, [inputs() for _ in range(2 * size * options.get("accumulation_steps", 1))]


def bytes_of(values: Any) -> int:
    """Return the bytes of all tensors in a structure."""
    return sum(it.numel() * it.element_size() for it in tree_leaves(values) if isinstance(it, Tensor))


if __name__ == "__main__":
    if sys.argv[1:2] == [_RANK]:
        rank_main(Path(sys.argv[2]), sys.argv[3], sys.argv[4:])
    else:
        sys.exit(main())
