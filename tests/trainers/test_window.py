"""Gradients in front of steps by hand, in accumulation windows of unequal batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dovetail import Epochs
from dovetail.callbacks import Callback
from dovetail.trainers import Trainer

# Two windows of at most three batches: of 3, 5 and 2 samples, then a short one of 4 and 1.
SIZES = [3, 5, 2, 4, 1]
WINDOWS = [(3, 5, 2), (4, 1)]
Losses = Callable[[nn.Module, Tensor], list[Tensor]]


def make_batches() -> list[tuple[Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [(torch.randn(size, 4, generator=generator, dtype=torch.float64),) for size in SIZES]


def make_model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.ModuleList([nn.Linear(4, 3), nn.Linear(4, 2)]).double()


def two_losses(model: Any, x: Tensor) -> list[Tensor]:
    """Both losses reach the first layer, and only the second one reaches the second layer."""
    first, second = model
    return [first(x).square().sum(1).mean(), (first(x).tanh().sum(1) * second(x).exp().sum(1)).mean()]


class Recorded(Callback):
    """The gradients in front of every step."""

    def __init__(self) -> None:
        self.gradients: list[list[Tensor]] = []

    def on_gradients(self, context: Any, optimizer: Any) -> None:
        found = [it.grad for group in optimizer.param_groups for it in group["params"] if it.grad is not None]
        self.gradients.append([it.clone() for it in found])


def recorded(train_step: Callable[..., Any], *parts: int, is_known: bool = True) -> list[list[Tensor]]:
    """Return the gradients in front of every step of a run; a rate of 0 keeps the weights as they are."""
    model: Any = make_model()
    optimizers = [torch.optim.SGD(model[part].parameters(), lr=0.0) for part in parts]
    found = Recorded()
    Trainer(
        model,
        "cpu",
        optimizer=optimizers if is_known else torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=0.0),
        train_step=partial(train_step, optimizers),
        accumulation_steps=3,
        callbacks=[found],
        verbose=False,
    ).fit(make_batches(), max_length=Epochs(1))
    return found.gradients


def of_large_batch(parts: Sequence[int], *numbers: int, window: int, without_last: int | None = None) -> list[Tensor]:
    """Return the gradients of the sum of some losses for all samples of a window, added over its batches.

    The last batch of the window is left out of the loss `without_last`.
    """
    model: Any = make_model()
    first = sum(map(len, WINDOWS[:window]))
    batches = [x for (x,) in make_batches()[first : first + len(WINDOWS[window])]]
    num_samples = sum(map(len, batches))
    parameters = [it for part in parts for it in model[part].parameters()]
    for number in numbers:
        for x in batches[:-1] if number == without_last else batches:
            (two_losses(model, x)[number] * len(x) / num_samples).backward()  # type: ignore[no-untyped-call]
    return [it.grad for it in parameters]


def in_turns(optimizers: Any, trainer: Any, batch: Any) -> dict[str, Any]:
    """A step between two losses keeps its gradients; the parameter of two optimizers is rescaled once."""
    context, (x,) = trainer.context, batch
    losses = two_losses(trainer.model, x)
    context.backward(losses[0])
    context.step(optimizers[0], zero_grad=False)
    context.step(optimizers[1], zero_grad=False)
    context.backward(losses[1])
    context.step(optimizers[2])
    context.step(optimizers[0])
    return {"loss": torch.zeros(())}


def assert_equal(found: list[list[Tensor]], expected: list[list[Tensor]]) -> None:
    assert len(found) == len(expected)
    for own, other in zip(found, expected, strict=True):
        torch.testing.assert_close(own, other, rtol=0, atol=1e-12)


def twice(optimizers: Any, trainer: Any, batch: Any, *, is_tensor: bool = False) -> dict[str, Any]:
    """Step after each of two losses; the second step has the gradients of both."""
    context, (x,) = trainer.context, batch
    if is_tensor:
        context.run.num_items = torch.tensor(len(x))
    for number in range(2):
        context.backward(two_losses(trainer.model, x)[number])
        context.step(*optimizers, zero_grad=number == 1)
    return {"loss": torch.zeros(())}


@pytest.mark.parametrize("is_known", [True, False], ids=["optimizer of the trainer", "optimizer of the user"])
@pytest.mark.parametrize("is_tensor", [False, True], ids=["numbers", "tensors"])
def test_gradients_that_a_step_keeps_are_rescaled_once(is_tensor: bool, is_known: bool) -> None:
    found = recorded(partial(twice, is_tensor=is_tensor), 0, is_known=is_known)
    # The second loss of the last batch comes after the first step.
    expected = [
        of_large_batch([0], 0, 1, window=window, without_last=left_out) for window in (0, 1) for left_out in (1, None)
    ]
    assert_equal(found, expected)


def test_gradients_of_a_parameter_of_two_optimizers_are_rescaled_once() -> None:
    found = recorded(in_turns, 0, 0, 1)
    expected = []
    for window in (0, 1):
        expected += [of_large_batch([0], 0, 1, window=window, without_last=1)] * 2
        expected += [of_large_batch([part], 0, 1, window=window) for part in (1, 0)]
    assert_equal(found, expected)


def test_a_finished_window_holds_no_optimizer() -> None:
    """A trainer is copied and sent to other processes with its window."""
    model: Any = make_model()
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.0)

    def train_step(trainer: Any, batch: Any) -> dict[str, Any]:
        trainer.context.backward(two_losses(trainer.model, batch[0])[0])
        trainer.context.step(zero_grad=False)
        return {"loss": torch.zeros(())}

    trainer = Trainer(model, "cpu", optimizer=optimizer, train_step=train_step, accumulation_steps=3, verbose=False)
    trainer.fit(make_batches(), max_length=Epochs(1))
    window = trainer.context.run.window
    assert not any(optimizer in getattr(window, name) for name in ("_kept", "_deferred"))
