"""Steps that read or change what is no input of a graph: they train eagerly, with the numbers of an eager run."""

from __future__ import annotations

import random
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from problem import Problem, assert_same_weights
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from dovetail.callbacks import Callback
from dovetail.trainers import CompiledTrainer, Trainer
from dovetail.units import Epochs

Step = Callable[[Trainer, Any], Any]


def train(problem: Problem, step: Any, *, compiled: bool, **settings: Any) -> Any:
    """Train two epochs of four batches, with a graph whose operations are called one by one."""
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(1)
    inner = Trainer(problem.model(), "cpu", train_step=step, verbose=False, **settings)
    trainer: Any = CompiledTrainer(inner, backend="eager") if compiled else inner
    trainer.fit(problem.batches[:4], max_length=Epochs(2))
    return trainer


def loss_of(trainer: Any, batch: Any) -> Tensor:
    loss: Tensor = cross_entropy(trainer.model(batch[0]), batch[1])
    return loss


def weigh_by_update(trainer: Any, batch: Any) -> Tensor:
    # The loss changes by less than 0.1 %, so a comparison would not find it.
    weight: float = 1e-5 * trainer.context.progress.updates
    penalty: Tensor = trainer.model(batch[0]).square().mean()
    return loss_of(trainer, batch) + weight * penalty


def weigh_by_numpy(trainer: Any, batch: Any) -> Tensor:
    return loss_of(trainer, batch) * float(np.random.uniform(0.5, 1.0))


def weigh_by_python(trainer: Any, batch: Any) -> Tensor:
    return loss_of(trainer, batch) * random.uniform(0.5, 1.0)


def recompute(trainer: Any, batch: Any) -> Tensor:
    # Without parameters: a graph would have drawn another mask in the backward pass.
    hidden: Any = checkpoint(nn.Dropout(0.5), trainer.model(batch[0]), use_reentrant=False)
    return cross_entropy(hidden, batch[1])


def add_gradients(trainer: Any, batch: Any) -> Tensor:
    penalty: Any = 0.1 * trainer.model(batch[0]).square().mean()
    penalty.backward()
    return loss_of(trainer, batch)


def change_rate(trainer: Any, batch: Any) -> Tensor:
    trainer.context.optimizers[0].param_groups[0]["lr"] *= 0.9
    return loss_of(trainer, batch)


def with_generator() -> Step:
    generator = torch.Generator().manual_seed(5)
    return lambda trainer, batch: loss_of(trainer, batch) * torch.rand((), generator=generator)


def with_list() -> Step:
    seen: list[Tensor] = []

    def step(trainer: Any, batch: Any) -> Tensor:
        seen.append(trainer.model(batch[0]).detach())
        return loss_of(trainer, batch)

    return step


def with_inner_list() -> Step:
    # No variable or attribute is this list, so its change is not undone.
    seen: list[list[Tensor]] = [[]]

    def step(trainer: Any, batch: Any) -> Tensor:
        seen[0].append(trainer.model(batch[0]).detach())
        return loss_of(trainer, batch)

    return step


@pytest.mark.parametrize(
    ("cause", "step"),
    [
        ("the step reads context.progress.updates", lambda: weigh_by_update),
        ("draws random numbers from Python or numpy", lambda: weigh_by_numpy),
        ("draws random numbers from Python or numpy", lambda: weigh_by_python),
        ("computes activations again in the backward pass", lambda: recompute),
        ("the step uses a Generator", with_generator),
        ("the step adds gradients by itself", lambda: add_gradients),
        ("the step changes Adam.lr", lambda: change_rate),
        ("the step changes step.seen", with_list),
        ("the step stores a tensor", with_inner_list),
    ],
)
def test_a_step_with_an_effect_that_no_graph_repeats_is_eager_from_the_first_batch(
    problem: Problem, cause: str, step: Callable[[], Step]
) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compiled = train(problem, step(), compiled=True)
    (reported,) = [str(it.message) for it in caught if "without a graph" in str(it.message)]
    assert cause in reported
    eager = train(problem, step(), compiled=False)
    assert compiled.history.losses == eager.history.losses
    assert_same_weights(compiled.model, eager.model)


class Count(nn.Module):
    """A metric like torchmetrics': a module whose state is an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.total = torch.zeros(())

    def update(self, values: Tensor) -> None:
        self.total = self.total + values.sum()


class Counting(Trainer):
    counts: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.counts = {"targets": Count()}

    def train_step(self, batch: Any) -> Mapping[str, Any]:
        self.counts["targets"].update(batch[1])
        return {"loss": loss_of(self, batch)}


def test_a_metric_that_a_step_updates_has_the_values_of_eager_training(problem: Problem) -> None:
    trainer = Counting(problem.model(), "cpu", verbose=False)
    with pytest.warns(UserWarning, match=r"the step changes Count\.total"):
        CompiledTrainer(trainer, backend="eager").fit(problem.batches[:4], max_length=Epochs(2))
    assert trainer.counts["targets"].total == 2 * sum(batch[1].sum() for batch in problem.batches[:4])


SEEN: list[Tensor] = []
LATEST: deque[Tensor] = deque(maxlen=2)
TOTAL = torch.zeros(())


class Sum:
    """A meter that is no module."""

    def __init__(self) -> None:
        self.values = torch.zeros(())


def collecting(count: Count, total: Sum) -> Step:
    batches = 0

    def step(trainer: Any, batch: Any) -> Tensor:
        nonlocal batches
        global TOTAL
        targets = batch[1].float()
        count.update(targets)
        total.values = total.values + targets.sum()
        SEEN.append(targets.sum())
        LATEST.append(targets.sum())
        TOTAL = TOTAL + targets.sum()
        batches += 1
        trainer.context.state["num"] = batches
        return loss_of(trainer, batch)

    return step


def test_variables_of_a_step_have_the_values_of_eager_training(problem: Problem) -> None:
    SEEN.clear()
    TOTAL.zero_()
    count, total = Count(), Sum()
    with pytest.warns(UserWarning, match="training continues without a graph: the step changes"):
        trainer = train(problem, collecting(count, total), compiled=True)
    sums = [batch[1].sum().float() for batch in problem.batches[:4]] * 2
    assert torch.equal(torch.stack(SEEN), torch.stack(sums))
    assert torch.equal(torch.stack([*LATEST]), torch.stack(sums[-2:]))
    assert count.total == total.values == TOTAL == sum(sums)
    assert trainer.context.state["num"] == 8


@pytest.mark.parametrize("accumulation_steps", [1, 3])
def test_a_weighted_loss_is_compiled(problem: Problem, accumulation_steps: int) -> None:
    generator = torch.Generator().manual_seed(5)
    batches = [(x, y, torch.rand(len(x), generator=generator)) for x, y in problem.batches[:4]]
    settings: Any = {"class_weight": [0.5, 1.0, 2.0], "sample_weight": True, "accumulation_steps": accumulation_steps}

    def trained(*, compiled: bool) -> Any:
        trainer: Any = Trainer(problem.model(), "cpu", verbose=False, **settings)
        trainer = CompiledTrainer(trainer, backend="eager") if compiled else trainer
        trainer.fit(batches, max_length=Epochs(2))
        return trainer

    compiled, eager = trained(compiled=True), trained(compiled=False)
    assert compiled.graphs == 1
    assert compiled.history.losses == pytest.approx(eager.history.losses, rel=1e-6)
    torch.testing.assert_close(compiled.model.state_dict(), eager.model.state_dict(), rtol=0, atol=2e-6)


# ------------------------------------------------------------------ changes in place


class InPlace(nn.Module):
    """A module that changes its input, a frozen copy of a layer, a trained weight and a tensor in every call."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(6, 3), nn.Linear(6, 3).requires_grad_(False)
        self.scale, self.decay = nn.Parameter(torch.ones(6)), torch.ones(6)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for slow, fast in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                slow.lerp_(fast, 0.1)
            self.scale.mul_(0.9)
        self.decay.mul_(0.9)
        x.mul_(0.5)
        logits: Tensor = self.student(x * self.scale) + self.teacher(x * self.decay)
        return logits


def test_changes_in_place_are_made_once(problem: Problem) -> None:
    def trained(*, compiled: bool) -> Any:
        torch.manual_seed(1)
        trainer: Any = Trainer(InPlace(), "cpu", verbose=False, learning_rate=0.1)
        trainer = CompiledTrainer(trainer, backend="eager") if compiled else trainer
        for epoch in (1, 2):
            trainer.fit([(x.clone(), y) for x, y in problem.batches[:4]], max_length=Epochs(epoch))
        return trainer

    compiled, eager = trained(compiled=True), trained(compiled=False)
    assert compiled.graphs == 1
    torch.testing.assert_close(compiled.model.state_dict(), eager.model.state_dict(), rtol=0, atol=2e-6)
    torch.testing.assert_close(compiled.model.decay, eager.model.decay)


# ------------------------------------------------------------------ caches


TABLES: dict[int, Tensor] = {}


@lru_cache
def table_of(length: int) -> Tensor:
    return torch.linspace(0.5, 1.5, length)


class Scaled(nn.Module):
    """A module with a table that its first call creates."""

    table: Any

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.tables, self.owner = nn.Linear(6, 3), {}, SimpleNamespace(table=None)  # type: ignore[var-annotated]
        self.register_buffer("table", None, persistent=False)
        self.later = None

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.linear(x * self.scale(x.shape[1]))
        return logits

    def scale(self, length: int) -> Any:
        raise NotImplementedError


class OfFunction(Scaled):
    def scale(self, length: int) -> Any:
        return table_of(length)


class OfModule(Scaled):
    def scale(self, length: int) -> Any:
        if length not in TABLES:
            TABLES[length] = torch.linspace(0.5, 1.5, length)
        return TABLES[length]


class OfDictionary(Scaled):
    def scale(self, length: int) -> Any:
        if length not in self.tables:
            self.tables[length] = torch.linspace(0.5, 1.5, length)
        return self.tables[length]


class OfObject(Scaled):
    def scale(self, length: int) -> Any:
        if self.owner.table is None:
            self.owner.table = torch.linspace(0.5, 1.5, length)
        return self.owner.table


class OfAttribute(Scaled):
    def scale(self, length: int) -> Any:
        if self.later is None:
            self.later = torch.linspace(0.5, 1.5, length)  # type: ignore[assignment]
        return self.later


class OfBuffer(Scaled):
    def scale(self, length: int) -> Any:
        if self.table is None:
            self.register_buffer("table", torch.linspace(0.5, 1.5, length), persistent=False)
        return self.table


@pytest.mark.parametrize("kind", [OfFunction, OfModule, OfDictionary, OfObject, OfAttribute, OfBuffer])
def test_a_model_that_creates_a_table_in_its_first_call_is_compiled(problem: Problem, kind: type[Scaled]) -> None:
    table_of.cache_clear()
    TABLES.clear()

    def trained(*, compiled: bool) -> Any:
        torch.manual_seed(1)
        trainer: Any = Trainer(kind(), "cpu", verbose=False)
        trainer = CompiledTrainer(trainer, backend="eager") if compiled else trainer
        trainer.fit(problem.batches[:4], max_length=Epochs(2))
        return trainer

    compiled = trained(compiled=True)
    assert compiled.graphs == 1
    torch.testing.assert_close(
        compiled.model.state_dict(), trained(compiled=False).model.state_dict(), rtol=0, atol=2e-6
    )


# ------------------------------------------------------------------ changes of gradients alone


STRENGTH = 1.0


class Reverse(torch.autograd.Function):
    """Reverses gradients, as for domain adaptation: its strength does not change the loss."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, strength: float) -> Tensor:
        ctx.strength = strength
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return -ctx.strength * gradient, None


class Reversed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.strength = nn.Linear(6, 6), nn.Linear(6, 3), 0.0

    def forward(self, x: Tensor) -> Tensor:
        reverse: Any = Reverse.apply
        logits: Tensor = self.last(reverse(self.first(x), self.strength + STRENGTH))
        return logits


def train_reversed(problem: Problem, *callbacks: Any, compiled: bool = True, runs: int = 1) -> Any:
    torch.manual_seed(1)
    trainer: Any = Trainer(Reversed(), "cpu", verbose=False, callbacks=[*callbacks], learning_rate=0.1)
    trainer = CompiledTrainer(trainer, backend="eager") if compiled else trainer
    for run in range(runs):
        trainer.model.strength += float(run)
        trainer.fit(problem.batches[:4], max_length=Epochs(3 * run + 3))
    return trainer


def test_a_global_that_changes_only_gradients_gets_its_own_graph(
    problem: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    for strength in (1.0, 0.25):
        monkeypatch.setitem(globals(), "STRENGTH", strength)
        compiled, eager = (train_reversed(problem, compiled=it) for it in (True, False))
        assert compiled.graphs == 1
        torch.testing.assert_close(compiled.model.state_dict(), eager.model.state_dict(), rtol=0, atol=2e-6)


class Strengthen(Callback):
    def on_epoch_start(self, context: Any) -> None:
        context.model.strength = 0.5 * context.progress.epoch


def test_an_attribute_that_changes_only_gradients_twice_ends_the_use_of_the_graph(problem: Problem) -> None:
    with pytest.warns(UserWarning, match="a setting of the model, its loss or the configuration has changed"):
        compiled = train_reversed(problem, Strengthen())
    eager = train_reversed(problem, Strengthen(), compiled=False)
    torch.testing.assert_close(compiled.model.state_dict(), eager.model.state_dict(), rtol=0, atol=2e-6)


class Remembering(nn.Module):
    """A module that keeps its last input in a validation."""

    last: Any

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.last = nn.Linear(6, 3), None

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            self.last = x
        logits: Tensor = self.linear(x)
        return logits


def test_an_attribute_that_a_validation_sets_keeps_the_run_compiled(problem: Problem) -> None:
    trainer: Any = CompiledTrainer(Trainer(Remembering(), "cpu", verbose=False), backend="eager")
    # Warnings are errors.
    trainer.fit(problem.batches[:4], problem.batches[4:5], max_length=Epochs(3))
    assert trainer.graphs == 1


def test_a_changed_attribute_gets_another_graph_in_the_next_run(problem: Problem) -> None:
    compiled, eager = (train_reversed(problem, compiled=it, runs=2) for it in (True, False))
    assert compiled.graphs == 1
    torch.testing.assert_close(compiled.model.state_dict(), eager.model.state_dict(), rtol=0, atol=2e-6)
