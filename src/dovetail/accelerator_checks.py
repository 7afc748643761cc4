"""Checks of training on a real accelerator: equal numbers, no waits in a step, overlapping copies, exact resume.

`dovetail doctor --accelerator` runs this module in a separate process: `python -m dovetail.accelerator_checks`.
It prints one line of JSON for every finished check.
"""

from __future__ import annotations

import gc
import json
import math
import platform
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dovetail import accelerators
from dovetail.callbacks import EMA, Callback
from dovetail.data import DataLoader
from dovetail.profiler_trace import Overlap, measure_overlap, read_trace
from dovetail.trainers import AMPTrainer, Trainer
from dovetail.trainers.memory_plan import plan_memory
from dovetail.units import Batches, Epochs

__all__ = ["CHECKS", "Result", "check_accelerator", "judge_overlap", "main"]

_NUM_BATCHES = 12
# Seconds after which no further check starts, so that the command ends within three minutes.
_TIME_LIMIT = 140.0


@dataclass(frozen=True)
class Result:
    """The result of one check.

    Attributes:
        name: The name of the check.
        status: `"ok"`; `"problem"` if the claim does not hold; `"note"` if it could not be measured on this device.
        found: The result, in plain words.
        numbers: The measurements.
    """

    name: str
    status: Literal["ok", "note", "problem"]
    found: str
    numbers: dict[str, Any] = field(default_factory=dict)


def check_accelerator(device: torch.device, time_limit: float = _TIME_LIMIT) -> Iterator[Result]:
    """Yield the result of every check on a device; an error of a check is a problem.

    Args:
        device: The device.
        time_limit: Seconds after which no further check starts.
    """
    end = time.monotonic() + time_limit
    for name, check in CHECKS.items():
        if time.monotonic() > end:
            yield Result(name, "note", f"not measured: the checks before it took {time_limit:.0f} seconds")
            continue
        start = time.monotonic()
        try:
            status, found, numbers = check(accelerators.numbered(device))
        except Exception as error:
            status, found, numbers = "problem", f"{type(error).__name__}: {error}", {}
        yield Result(name, status, found, {**numbers, "seconds": round(time.monotonic() - start, 2)})


_Answer = tuple[Literal["ok", "note", "problem"], str, dict[str, Any]]


def _describe(device: torch.device) -> _Answer:
    names = accelerators.device_names(device.type)
    numbers = {
        "devices": names,
        "torch": torch.__version__,
        "built_for": torch.version.cuda or torch.version.hip or "",
        "python": platform.python_version(),
        "system": platform.platform(),
        "can_pin": accelerators.can_pin(device.type),
        "supports_bfloat16": accelerators.supports_bfloat16(device.type),
    }
    return "ok", ", ".join(names), numbers


def _same_as_cpu(device: torch.device) -> _Answer:
    """Train on both devices in float32 without random numbers, and compare the losses."""
    losses = []
    for place in (torch.device("cpu"), device):
        trainer = _make_trainer(place, dropout=0.0)
        losses.append(trainer.fit(_make_batches(), max_length=Epochs(2)).losses)
    largest = max(abs(one - other) for one, other in zip(*losses, strict=True))
    is_near = math.isfinite(largest) and largest < 1e-3
    text = f"the losses of 24 steps differ from the CPU's by at most {largest:.1e}"
    return "ok" if is_near else "problem", text, {"largest_difference": largest}


def _no_waits(
    device: torch.device, *, allowed: int = 0, wrap: Callable[[Any], Any] | None = None, **options: Any
) -> _Answer:
    """Train two epochs, and count the operations for which the host waits inside of the second one."""
    if not _Waits.is_supported(device):
        return "note", f"not measured: torch has no sync debug mode for {device.type}", {}
    control = _Waits(device)
    with control:
        torch.ones(1, device=device).sum().item()
    if not control.messages:
        return "note", "not measured: the sync debug mode does not report a read of a value", {}
    watch = _Watch(device)
    callbacks = [watch, *options.pop("callbacks", ())]
    trainer = _make_trainer(device, callbacks=callbacks, **options)
    (trainer if wrap is None else wrap(trainer)).fit(_make_batches(), max_length=Epochs(2))
    # A slow run reports its losses once a second, which is a read.
    number = max(0, len(watch.waits.messages) - watch.num_reports)
    numbers = {"waits": number, "steps": watch.num_steps, "messages": sorted(set(watch.waits.messages))[:5]}
    status: Literal["ok", "problem"] = "ok" if number <= allowed * watch.num_steps else "problem"
    text = f"{number} waits in {watch.num_steps} steps"
    return status, f"{text} (torch's scaler reads one flag per update)" if allowed else text, numbers


def _overlap(device: torch.device) -> _Answer:
    """Profile steps with large batches, and measure how much of the copy time passes while kernels run."""
    activity = _activity(device)
    if activity is None:
        return "note", f"not measured: torch's profiler does not record {device.type}", {}
    rows = 4096
    batches = [(torch.randn(rows, 2048), torch.randint(3, (rows,))) for _ in range(8)]
    model = nn.Sequential(nn.Linear(2048, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 3))
    trainer = Trainer(model, device, verbose=False, print_every=10**6, criterion=nn.CrossEntropyLoss())
    trainer.fit(batches, max_length=Epochs(1))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU, activity]) as profile:
        trainer.fit(batches, max_length=Epochs(2))
        torch.accelerator.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profile.export_chrome_trace(str(path))
        return judge_overlap(measure_overlap(read_trace(path)))


def judge_overlap(found: Overlap) -> _Answer:
    """Return a problem if less than half of the time of copies or of collective operations is hidden by kernels."""
    numbers = asdict(found)
    if not found.copies:
        return "note", "not measured: the trace contains no copy to the device", numbers
    shares = {"copies to the device": found.hidden_copies / found.copies}
    if found.collectives:
        shares["collective operations"] = found.hidden_collectives / found.collectives
    text = " and ".join(f"{share:.0%} of the time of {name}" for name, share in shares.items())
    return "ok" if min(shares.values()) >= 0.5 else "problem", f"{text} passes while kernels run", numbers


def _memory(device: torch.device, *, rows: int = 1024) -> _Answer:
    """Compare the peak of memory of a step with the plan; in later epochs it must not grow.

    A step of the default size needs about 1 GiB. The libraries of a device may take some tens of MiB from the same
    allocator during a step, which is then less than the accepted difference.
    """
    if accelerators.peak_memory(device) is None:
        return "note", f"not measured: torch does not count the memory of {device.type}", {}
    generator = torch.Generator().manual_seed(5)
    batches = [(torch.randn(rows, 16, generator=generator), torch.zeros(rows, dtype=torch.long)) for _ in range(2)]

    def build(place: torch.device | str, **options: Any) -> Trainer:
        # Wide between narrow layers: many bytes for few operations.
        wide = 32 * rows
        layers = [nn.Linear(16, wide), nn.Tanh(), nn.Tanh(), nn.Linear(wide, 64), nn.Linear(64, 2 * wide)]
        model = nn.Sequential(*layers, nn.Tanh(), nn.Linear(2 * wide, 4))
        # On every device the same algorithm: its default differs, and with it the memory.
        optimizer = partial(torch.optim.AdamW, lr=1e-3, foreach=True)
        return Trainer(model, place, optimizer=optimizer, verbose=False, print_every=10**6, **options)

    peaks: list[int] = []

    class Peaks(Callback):
        def on_epoch_end(self, context: Any, metrics: Any) -> None:
            peaks.append(accelerators.peak_memory(device, reset=True) or 0)

    # Libraries of the device keep workspaces, which are no part of the plan.
    build(device).fit(batches, max_length=Epochs(1))
    gc.collect()
    accelerators.peak_memory(device, reset=True)
    before = accelerators.peak_memory(device) or 0
    plan = plan_memory(build("cpu"), batches)
    build(device, callbacks=[Peaks()]).fit(batches, max_length=Epochs(3))
    # The next batch is copied ahead.
    planned = plan.peak + plan.kinds["batch"]
    measured = max(peaks) - before
    numbers = {"planned": planned, "measured": measured, "peaks": peaks, "before": before, "kinds": dict(plan.kinds)}
    text = f"a peak of {measured / 2**20:.1f} MiB, {measured / planned:.1%} of the plan"
    # The host may be some batches ahead, so the peaks of equal epochs differ a little.
    if peaks[-1] > 1.1 * peaks[1]:
        return "problem", f"{text}; it grows from {peaks[1]} to {peaks[-1]} bytes", numbers
    return "ok" if abs(measured / planned - 1) <= 0.1 else "problem", text, numbers


def _exact_resume(device: torch.device, *, num_workers: int = 0) -> _Answer:
    """Stop in the middle of an epoch, resume from the checkpoint, and compare with the uninterrupted run bit by bit."""

    def loader() -> Any:
        columns = [torch.cat(column) for column in zip(*_make_batches(), strict=True)]
        dataset = torch.utils.data.TensorDataset(*columns)
        # Torch's collation, so that workers read the samples.
        collate = None if num_workers == 0 else partial(_collate)
        return DataLoader(dataset, 8, shuffle=True, num_workers=num_workers, collate_fn=collate, seed=3)

    with tempfile.TemporaryDirectory() as folder:
        whole = _make_trainer(device)
        whole.fit(loader(), max_length=Epochs(2))
        _make_trainer(device, checkpoint_dir=folder).fit(loader(), max_length=Batches(5))
        resumed = _make_trainer(device, checkpoint_dir=folder)
        resumed.fit(loader(), max_length=Epochs(2), resume="auto")
    pairs = zip(whole.model.parameters(), resumed.model.parameters(), strict=True)
    differs = sum(not torch.equal(one.detach().cpu(), other.detach().cpu()) for one, other in pairs)
    if differs:
        return "problem", f"{differs} of 4 tensors differ from the uninterrupted run", {"differing_tensors": differs}
    return "ok", "stopped after 5 of 24 batches and resumed: the same bits, with dropout", {"differing_tensors": 0}


CHECKS: dict[str, Callable[[torch.device], _Answer]] = {
    "device": _describe,
    "equal to the CPU": _same_as_cpu,
    "no waits": _no_waits,
    "no waits, bf16": partial(_no_waits, wrap=partial(AMPTrainer, precision="bf16")),
    "no waits, fp16": partial(_no_waits, allowed=1, wrap=partial(AMPTrainer, precision="fp16")),
    "no waits, accumulation": partial(_no_waits, accumulation_steps=3),
    "no waits, clipping": partial(_no_waits, gradient_clip=0.1),
    "no waits, average of weights": lambda device: _no_waits(device, callbacks=[EMA(0.9)]),
    "exact resume": _exact_resume,
    "exact resume, workers": partial(_exact_resume, num_workers=2),
    "memory": _memory,
    "overlap": _overlap,
}
"""The checks by name, in order."""


class _Waits:
    """Records the operations for which the host waits, by torch's sync debug mode."""

    def __init__(self, device: torch.device) -> None:
        self._module = accelerators.device_module(device.type)
        self._caught: Any = None
        self._shown: Any = None
        self.messages: list[str] = []

    @staticmethod
    def is_supported(device: torch.device) -> bool:
        return getattr(accelerators.device_module(device.type), "set_sync_debug_mode", None) is not None

    def __enter__(self) -> _Waits:
        self._caught = warnings.catch_warnings(record=True)
        self._shown = self._caught.__enter__()
        warnings.simplefilter("always")
        self._module.set_sync_debug_mode("warn")
        return self

    def __exit__(self, *error: object) -> None:
        self._module.set_sync_debug_mode("default")
        self._caught.__exit__(*error)
        texts = [str(it.message) for it in self._shown]
        # torch also warns, when the mode is set, that it is a prototype. This is no operation.
        self.messages = [it for it in texts if "synchroniz" in it and not it.startswith("Synchronization debug mode")]


class _Watch(Callback):
    """Records the waits of the second epoch, from the end of its second step to the end of the step before the last."""

    def __init__(self, device: torch.device) -> None:
        self.waits = _Waits(device)
        self.num_steps = _NUM_BATCHES - 3
        self.num_reports = 0
        self._is_active = False

    def on_step_end(self, context: Any, output: Any) -> None:
        # The first epoch starts libraries of the device, and is so slow that the loop reports its progress.
        if context.progress.batches == _NUM_BATCHES + 2:
            self.waits.__enter__()
            self._is_active = True
        elif context.progress.batches == 2 * _NUM_BATCHES - 1:
            self.waits.__exit__(None, None, None)
            self._is_active = False

    def on_report(self, context: Any, report: Any) -> None:
        self.num_reports += self._is_active


def _make_trainer(device: torch.device, *, dropout: float = 0.2, **options: Any) -> Trainer:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Dropout(dropout), nn.Linear(32, 3))
    settings = {"seed": 1, "verbose": False, "print_every": 10**6, "criterion": nn.CrossEntropyLoss(), **options}
    return Trainer(model, device, optimizer=partial(torch.optim.AdamW, lr=0.01), **settings)


def _make_batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    inputs = [torch.randn(8, 6, generator=generator) for _ in range(_NUM_BATCHES)]
    return [(x, x[:, :3].argmax(dim=1)) for x in inputs]


def _collate(samples: list[Any]) -> Any:
    return torch.utils.data.default_collate(samples)


def _activity(device: torch.device) -> Any:
    """Return the profiler's activity of a device; None if it cannot record it."""
    name = {"cuda": "CUDA", "xpu": "XPU", "hpu": "HPU", "mtia": "MTIA"}.get(device.type)
    activity = None if name is None else getattr(torch.profiler.ProfilerActivity, name, None)
    # torch has no type hints for this function.
    supported = torch.profiler.supported_activities()  # type: ignore[no-untyped-call]
    return activity if activity in supported else None


def main() -> int:
    """Print a line of JSON for every check of this machine's accelerator, and return the exit code."""
    warnings.simplefilter("ignore")
    device = accelerators.current_accelerator()
    if device is None:
        print(json.dumps({"torch": torch.__version__, "device": None}), flush=True)
        return 1
    for result in check_accelerator(device):
        # Line by line: if a later check crashes the process, earlier results are not lost.
        print(json.dumps(asdict(result)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
