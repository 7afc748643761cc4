"""Optimizer step without torch's wrapper: the same update, and hooks are still called."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from problem import Problem
from torch import nn
from torch.optim import SGD, Adam, Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from dovetail import Epochs
from dovetail.callbacks import Callback
from dovetail.trainers import Trainer
from dovetail.trainers.stepping import make_update


def weight_with_gradient() -> nn.Parameter:
    weight = nn.Parameter(torch.tensor([1.0, -2.0]))
    weight.grad = torch.tensor([0.5, 3.0])
    return weight


def wrapped(optimizer: Optimizer) -> list[str]:
    """Return how often torch's wrapper is called in an update, counted by the name that profilers see."""
    seen: list[str] = []
    record = torch.autograd.profiler.record_function

    class Noted(record):  # type: ignore[misc, valid-type]
        def __init__(self, name: str, args: str | None = None) -> None:
            seen.append(name)
            super().__init__(name, args)

    torch.autograd.profiler.record_function = Noted  # type: ignore[misc, assignment]
    try:
        make_update(optimizer)
    finally:
        torch.autograd.profiler.record_function = record  # type: ignore[misc]
    return seen


@pytest.mark.parametrize(
    "make",
    [
        lambda params: SGD(params, lr=0.1),
        lambda params: SGD(params, lr=0.1, momentum=0.9, weight_decay=0.1),
        lambda params: Adam(params, lr=0.1),
    ],
)
def test_a_fast_update_equals_torch_and_skips_the_wrappers(
    make: Callable[[list[nn.Parameter]], Optimizer],
) -> None:
    mine, torchs = weight_with_gradient(), weight_with_gradient()
    ours, reference = make([mine]), make([torchs])
    for _ in range(3):
        assert wrapped(ours) == []
        reference.step()
    assert torch.equal(mine, torchs)
    assert torch.is_grad_enabled()


def test_hooks_of_an_optimizer_and_of_all_optimizers_are_called() -> None:
    heard: list[str] = []

    def receive(what: str) -> Callable[..., None]:
        return lambda optimizer, args, kwargs: heard.append(what)

    optimizer = SGD([weight_with_gradient()], lr=0.1)
    for register in (
        optimizer.register_step_pre_hook,
        optimizer.register_step_post_hook,
        register_optimizer_step_pre_hook,
        register_optimizer_step_post_hook,
    ):
        handle = register(receive(register.__name__))
        make_update(optimizer)
        handle.remove()
        make_update(optimizer)
    assert heard == [
        "register_step_pre_hook",
        "register_step_post_hook",
        "register_optimizer_step_pre_hook",
        "register_optimizer_step_post_hook",
    ]


def test_a_profiler_sees_the_update_by_its_name() -> None:
    optimizer = SGD([weight_with_gradient()], lr=0.1)
    with torch.autograd.profiler.profile() as profile:
        make_update(optimizer)
    assert "Optimizer.step#SGD.step" in [event.name for event in profile.function_events]


def test_a_replaced_optimizer_step_is_called() -> None:
    made: list[str] = []
    optimizer = SGD([weight_with_gradient()], lr=0.1)
    optimizer.step = lambda closure=None: made.append("mine")  # type: ignore[method-assign, misc, assignment, return-value]
    make_update(optimizer)
    assert made == ["mine"]


def test_an_overridden_optimizer_step_is_called_even_if_it_looks_like_torch() -> None:
    SGD([weight_with_gradient()], lr=0.1)
    made: list[str] = []

    class Own(SGD):
        @functools.wraps(SGD.step)
        def step(self, closure: Any = None) -> Any:
            made.append("mine")
            return super().step(closure)

    weight = weight_with_gradient()
    make_update(Own([weight], lr=0.1))
    assert made == ["mine"]
    assert weight.tolist() == pytest.approx([0.95, -2.3])


def test_an_optimizer_hook_added_during_a_run_is_called(problem: Problem) -> None:
    class Late(Callback):
        heard = 0

        def on_step_end(self, context: Any, output: Any) -> None:
            if context.progress.batches == 2:
                context.optimizers[0].register_step_post_hook(self._hear)

        def _hear(self, *_: Any) -> None:
            self.heard += 1

    late = Late()
    trainer = Trainer(problem.model(), "cpu", callbacks=[late], verbose=False)
    trainer.fit(problem.batches, max_length=Epochs(1))
    assert late.heard == trainer.context.progress.updates - 2 > 0
