"""Overhead of a step, in counts that are the same on every machine."""

from __future__ import annotations

import gc
import io
import os
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
import torch
from compiling import needs_compiler
from counting import NUM_STEPS, calls_per_step, code_called, make_batches, make_model, make_trainer
from rich.console import Console
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dovetail.callbacks import Callback, ProgressDisplay
from dovetail.trainers.composable import ComposableTrainer
from dovetail.trainers.decorators import (
    AMPTrainer,
    AutoBatchTrainer,
    CompiledTrainer,
    DDPTrainer,
    FSDPTrainer,
    TimedTrainer,
)
from dovetail.trainers.strategies import SGDOptimizerStrategy
from dovetail.units import Batches, Epochs

MANY_STEPS = 10_000 if os.environ.get("DOVETAIL_TORTURE") == "1" else 4_000


# ------------------------------------------------------------------ calls


def by_hand(accumulation_steps: int = 1) -> Callable[[Any], None]:
    model, criterion = make_model(), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def run(batches: Any) -> None:
        for number, (inputs, targets) in enumerate(batches, start=1):
            loss = criterion(model(inputs), targets)
            if accumulation_steps > 1:
                loss = loss / accumulation_steps
            loss.backward()
            if number % accumulation_steps == 0:
                optimizer.step()
                optimizer.zero_grad()

    return run


def with_trainer(**settings: Any) -> Callable[[Any], Any]:
    trainer = make_trainer(**settings)
    return lambda batches: trainer.fit(batches, max_length=Epochs(1))


def with_display(**settings: Any) -> Callable[[Any], Any]:
    """As a new user gets it at a terminal: display, history and the check of every loss."""
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    # Drawn once, at the start: how often the clock asks for it is not the same on every machine.
    display = ProgressDisplay(refresh_per_second=1e-9, console=console)
    return with_trainer(nonfinite="raise", callbacks=[display], **settings)


@pytest.mark.parametrize(
    ("ours", "by_hand"),
    [
        pytest.param(lambda: with_trainer(nonfinite="ignore"), by_hand, id="bare"),
        pytest.param(with_display, by_hand, id="as a new user gets it"),
        pytest.param(lambda: with_trainer(accumulation_steps=4), lambda: by_hand(4), id="accumulating"),
    ],
)
def test_a_step_makes_at_most_25_python_calls_beyond_the_work_itself(
    ours: Callable[[], Callable[[Any], Any]], by_hand: Callable[[], Callable[[Any], Any]]
) -> None:
    in_all, own = calls_per_step(ours)
    extra = in_all - calls_per_step(by_hand)[0]
    found = f"{own} calls of Dovetail's functions per step, {extra:+.1f} in all against the hand-written loop"
    # The second number is the smaller one: torch's zero_grad, which the loop goes without, makes many calls.
    assert own <= 25, found
    assert extra <= 25, found


def under(layer: Callable[..., Any], **settings: Any) -> Callable[[], Callable[[Any], Any]]:
    def prepare() -> Callable[[Any], Any]:
        trainer = layer(make_trainer(nonfinite="ignore"), **settings)
        return lambda batches: trainer.fit(batches, max_length=Epochs(1))

    return prepare


@pytest.mark.usefixtures("compiler_cache")
@pytest.mark.parametrize(
    ("layer", "settings"),
    [
        pytest.param(AMPTrainer, {"precision": "bf16"}, id="mixed precision"),
        pytest.param(DDPTrainer, {}, id="data parallel, one process"),
        pytest.param(FSDPTrainer, {}, id="sharded, one process"),
        pytest.param(AutoBatchTrainer, {}, id="auto batch, all fit"),
        # Seven verbs and the data, each of which is one call more.
        pytest.param(TimedTrainer, {}, id="timed"),
        pytest.param(CompiledTrainer, {"backend": "eager"}, id="traced"),
        pytest.param(CompiledTrainer, {"backend": "eager", "steps_per_call": 2}, id="traced, two per call"),
        pytest.param(CompiledTrainer, {}, marks=[needs_compiler, pytest.mark.slow, pytest.mark.torture], id="compiled"),
    ],
)
def test_a_layer_makes_at_most_8_more_python_calls_per_step(
    layer: Callable[..., Any], settings: dict[str, Any]
) -> None:
    # Dovetail's own: what torch calls inside of autocast, or of a graph, is work.
    own = calls_per_step(under(layer, **settings))[1]
    bare = calls_per_step(lambda: with_trainer(nonfinite="ignore"))[1]
    assert own - bare <= 8, f"{own - bare:+.1f} calls per step"


def test_hooks_without_an_override_are_never_called() -> None:
    class Count(Callback):
        def on_step_end(self, context: Any, output: Any) -> None:
            pass

    trainer = make_trainer(callbacks=[Count(), Callback()])
    batches = make_batches(NUM_STEPS)
    called = code_called(lambda: trainer.fit(batches, batches, max_length=Epochs(2)))

    assert called[Count.on_step_end.__code__] == 2 * NUM_STEPS
    defaults = [hook for name, hook in vars(Callback).items() if name.startswith("on_")]
    assert len(defaults) > 10
    assert not [hook.__name__ for hook in defaults if called[hook.__code__]]


# ------------------------------------------------------------------ waiting for the device


class CountTransfers(TorchFunctionMode):
    """Count what makes the host wait for a tensor's value."""

    waiting = frozenset(
        {Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.cpu}
        | {Tensor.__float__, Tensor.__int__, Tensor.__bool__, Tensor.__index__, Tensor.__format__, Tensor.__repr__}
    )

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += func in self.waiting
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("print_every", [10, 50])
def test_losses_are_copied_to_the_host_once_per_report(print_every: int) -> None:
    run = with_display(print_every=print_every)
    batches = make_batches(NUM_STEPS)
    with CountTransfers() as transfers:
        run(batches)
    # Beyond the reports, a few at the end of an epoch.
    assert NUM_STEPS // print_every <= transfers.number <= NUM_STEPS // print_every + 3


def test_strategies_make_at_most_6_more_python_calls_per_step() -> None:
    def with_strategies() -> Callable[[Any], Any]:
        model = make_model()
        trainer = ComposableTrainer(
            model,
            optimizer_strategy=SGDOptimizerStrategy(lr=0.01),
            nonfinite="ignore",
            verbose=False,
        )
        return lambda batches: trainer.fit(batches, max_length=Epochs(1))

    more = calls_per_step(with_strategies)[0] - calls_per_step(lambda: with_trainer(nonfinite="ignore"))[0]
    assert more <= 6, f"{more:+.1f} calls per step"


# ------------------------------------------------------------------ memory


@pytest.mark.full_size
@pytest.mark.slow
def test_thousands_of_steps_use_no_more_memory_than_one_thousand() -> None:
    batch = make_batches(1)[0]
    process = psutil.Process()
    sizes: list[dict[str, int]] = []

    def stream() -> Iterator[tuple[Tensor, Tensor]]:
        for number in range(MANY_STEPS + 1):
            if number in (1_000, MANY_STEPS):
                gc.collect()
                objects = gc.get_objects()
                sizes.append(
                    {
                        "tensors": sum(issubclass(type(it), Tensor) for it in objects),
                        "objects": len(objects),
                        "python": tracemalloc.get_traced_memory()[0],
                        "process": process.memory_info().rss,
                    }
                )
                del objects
            yield batch

    trainer = make_trainer()
    tracemalloc.start()
    try:
        trainer.fit(stream(), max_length=Batches(MANY_STEPS + 1))
    finally:
        tracemalloc.stop()
    growth = {name: sizes[1][name] - sizes[0][name] for name in sizes[0]}

    # Up to ten losses wait for the next report, which comes earlier where the machine is slow.
    assert growth["tensors"] <= 10
    assert growth["objects"] <= 40
    # Two floats per step: the loss in the history, and in the means of the epoch.
    assert growth["python"] <= 64 * (MANY_STEPS - 1_000)
    # A graph that is kept takes six kilobytes per step, and Python would see none of them.
    assert growth["process"] <= 8 << 20
