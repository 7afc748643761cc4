"""Compiled steps read no value from the device.

The pretend device cannot run them: a graph is traced with the parameters of the model, and torch's tracer does not
accept parameters of a subclass with its own kernels (`CompiledTrainer` reports it and trains eagerly). The claim is
therefore proven on the CPU, by counting every operator and method that returns a value to the host.
"""

from __future__ import annotations

import math
from types import TracebackType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from dovetail import Epochs, Trainer
from dovetail.callbacks import EMA, Callback, EarlyStopping
from dovetail.trainers import AMPTrainer, CompiledTrainer, loop

NUM_BATCHES = 6
READ = "aten._local_scalar_dense.default"

_aten = torch.ops.aten
# The result is a value for the host, or its shape depends on values.
_OPERATORS = {
    _aten._local_scalar_dense.default,
    _aten.equal.default,
    _aten.is_nonzero.default,
    _aten.nonzero.default,
    _aten.masked_select.default,
    _aten._unique2.default,
    _aten.unique_dim.default,
    _aten.unique_consecutive.default,
    _aten.repeat_interleave.Tensor,
    _aten.bincount.default,
}
# A copy to the host is no operator if the tensor is there already.
_METHODS = {Tensor.tolist, Tensor.cpu}


class HostReads:
    """Records the reads of a block: `with HostReads() as reads: ...`, then `reads.causes`."""

    def __init__(self) -> None:
        self.causes: list[str] = []
        self._modes = _Operators(self.causes), _Methods(self.causes)

    def __enter__(self) -> HostReads:
        for mode in self._modes:
            mode.__enter__()  # type: ignore[no-untyped-call]  # torch
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(kind, error, traceback)  # type: ignore[no-untyped-call]  # torch


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch
    def __init__(self, causes: list[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch
        self.causes = causes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _OPERATORS or (func is _aten.index.Tensor and any(map(_is_mask, args[1]))):
            self.causes.append(str(func))
        return func(*args, **(kwargs or {}))


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)


class _Methods(TorchFunctionMode):
    def __init__(self, causes: list[str]) -> None:
        super().__init__()
        self.causes = causes

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _METHODS:
            self.causes.append(func.__name__)
        return func(*args, **(kwargs or {}))


class Marks(Callback):
    """Notes after every step how many reads there were."""

    def __init__(self, reads: HostReads) -> None:
        self.reads = reads
        self.marks: list[int] = []

    def on_step_end(self, context: Any, output: Any) -> None:
        self.marks.append(len(self.reads.causes))


def make_batches() -> list[tuple[Tensor, Tensor]]:
    x = torch.randn(8 * NUM_BATCHES, 6, generator=torch.Generator().manual_seed(5))
    return list(zip(x.split(8), x[:, :3].argmax(dim=1).split(8), strict=True))  # type: ignore[no-untyped-call]  # torch


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    # Adam would read its counters of steps, which are always on the host.
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def reads_per_step(*callbacks: Callback, precision: Any = None, validates: bool = False, **options: Any) -> list[Any]:
    """Return the reads of every step, without the first two and without the steps around the end of an epoch."""
    torch.manual_seed(0)
    reads = HostReads()
    marks = Marks(reads)
    model = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Dropout(0.2), nn.Linear(10, 3))
    settings = {"optimizer": make_optimizer, "seed": 1, "verbose": False, "print_every": 10**6, **options}
    trainer: Any = Trainer(model, "cpu", callbacks=[*callbacks, marks], **settings)
    if precision is not None:
        trainer = AMPTrainer(trainer, precision=precision)
    compiled = CompiledTrainer(trainer, mode="step", backend="eager")
    batches = make_batches()
    with reads:
        compiled.fit(batches, batches if validates else None, max_length=Epochs(2))
    assert compiled.graphs == 1
    numbers = [number for number in range(2, 2 * NUM_BATCHES) if number % NUM_BATCHES]
    return [reads.causes[marks.marks[number - 1] : marks.marks[number]] for number in numbers]


@pytest.fixture(autouse=True)
def _no_timed_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    # The loop also reports once a second. This would be a read in a slow step.
    monkeypatch.setattr(loop, "_SLOWEST_REPORT", math.inf)


@pytest.mark.parametrize(
    ("callbacks", "options"),
    [
        ([], {}),
        ([], {"precision": "bf16"}),
        ([], {"accumulation_steps": 4}),
        ([], {"gradient_clip": 0.1}),
        ([EMA(0.9)], {}),
        ([EarlyStopping("valid_loss", patience=1)], {"validates": True}),
    ],
    ids=["plain", "bf16", "accumulation", "clipping", "ema", "early stopping"],
)
def test_a_compiled_step_reads_nothing(callbacks: list[Callback], options: dict[str, Any]) -> None:
    assert reads_per_step(*callbacks, **options) == [[]] * 9


def test_a_compiled_step_in_float16_reads_one_flag() -> None:
    assert reads_per_step(precision="fp16") == [[READ]] * 9


def test_the_counter_sees_every_way_to_read_a_value() -> None:
    x = torch.tensor([1.0, 2.0])
    with HostReads() as reads:
        float(x[0])
        bool(x[0] > 0)
        x.tolist()
        x[x > 1]
        x.cpu()
        torch.equal(x, x)
        x + 1
    assert reads.causes == [READ, READ, "tolist", "aten.index.Tensor", "cpu", "aten.equal.default"]
