"""Steps of users that return the loss alone, or differentiate it themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from problem import Problem, assert_same_weights
from torch import Tensor, nn

from dovetail import Epochs, Trainer
from dovetail.errors import ConfigError
from dovetail.trainers import AutoBatchTrainer


def loss_of(trainer: Any, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(trainer.model(batch[0]), batch[1])


class Bare(Trainer):
    def train_step(self, batch: Any) -> Any:
        return loss_of(self, batch)

    def test_step(self, batch: Any) -> Any:
        return loss_of(self, batch)


def build(kind: type[Trainer], model: nn.Module, **options: Any) -> Any:
    return kind(model, "cpu", optimizer=torch.optim.SGD(model.parameters(), lr=0.1), verbose=False, **options)


@pytest.mark.parametrize(
    "make",
    [
        lambda model: build(Bare, model),
        lambda model: build(Trainer, model, train_step=loss_of, test_step=loss_of),
        lambda model: AutoBatchTrainer(build(Bare, model)),
    ],
    ids=["subclass", "function", "micro-batches"],
)
def test_a_bare_loss_trains_like_a_loss_by_name(problem: Problem, make: Callable[[nn.Module], Any]) -> None:
    ours, theirs = problem.model(), problem.model()
    length = {"max_length": Epochs(2)}
    history = make(ours).fit(problem.batches, problem.batches[:3], **length)
    expected = build(Trainer, theirs, metrics={}).fit(problem.batches, problem.batches[:3], **length)
    assert_same_weights(ours, theirs)
    assert history.get_metric_values("valid_loss") == expected.get_metric_values("valid_loss")


@pytest.mark.parametrize("detaches", [False, True])
@pytest.mark.parametrize("steps", [False, True])
def test_a_step_that_calls_backward_itself_is_answered(problem: Problem, detaches: bool, steps: bool) -> None:
    def step(trainer: Any, batch: Any) -> Tensor:
        loss = loss_of(trainer, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        if steps:
            trainer.optimizer.step()
        return loss.detach() if detaches else loss

    with pytest.raises(ConfigError, match=r"write self\.context\.backward\(loss\) and self\.context\.step"):
        build(Trainer, problem.model(), train_step=step).fit(problem.batches)


def test_another_failure_of_backward_keeps_its_type(problem: Problem) -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, loss: Tensor) -> Tensor:
            return loss.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            raise RuntimeError("out of luck")

    def step(trainer: Any, batch: Any) -> Any:
        return Fails.apply(loss_of(trainer, batch))  # type: ignore[no-untyped-call]

    with pytest.raises(RuntimeError, match="out of luck"):
        build(Trainer, problem.model(), train_step=step).fit(problem.batches)


def test_a_loss_that_was_differentiated_and_returned_as_a_number_is_answered(problem: Problem) -> None:
    def step(trainer: Any, batch: Any) -> float:
        loss = loss_of(trainer, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.item()

    with pytest.raises(ConfigError, match=r"write self\.context\.backward\(loss\) and self\.context\.step"):
        build(Trainer, problem.model(), train_step=step).fit(problem.batches)


def test_a_retained_graph_does_not_double_the_gradients(problem: Problem) -> None:
    def step(trainer: Any, batch: Any) -> Tensor:
        loss = loss_of(trainer, batch)
        loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
        return loss

    with pytest.raises(ConfigError, match=r"write self\.context\.backward\(loss\) and self\.context\.step"):
        build(Trainer, problem.model(), train_step=step).fit(problem.batches)


def test_a_step_may_differentiate_another_loss_besides_the_returned_one(problem: Problem) -> None:
    def penalty(trainer: Any) -> Tensor:
        return torch.stack([it.square().sum() for it in trainer.model.parameters()]).sum()

    def aided(trainer: Any, batch: Any) -> Tensor:
        penalty(trainer).backward()  # type: ignore[no-untyped-call]
        return loss_of(trainer, batch)

    def summed(trainer: Any, batch: Any) -> Tensor:
        return loss_of(trainer, batch) + penalty(trainer)

    models = [problem.model(dtype=torch.float64) for _ in range(2)]
    batches = [(inputs.double(), targets) for inputs, targets in problem.batches]
    for model, step in zip(models, (aided, summed), strict=True):
        build(Trainer, model, train_step=step).fit(batches, max_length=Epochs(1))
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-12)
