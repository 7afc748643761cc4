"""Training loop: equality with a hand-written loop, exact windows, evaluation without side effects."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data as torch_data
from problem import Problem, assert_same_weights, train_by_hand, weights
from torch import Tensor, nn

from dovetail import Batches, Epochs, Records, Trainer, Updates
from dovetail.callbacks import Callback
from dovetail.errors import ConfigError, DataError, UnknownNameError
from dovetail.trainers.context import TrainingContext
from dovetail.trainers.reuse import reset


def sgd(model: nn.Module, lr: float = 0.1, momentum: float = 0.9) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)


def quiet(model: nn.Module, **options: Any) -> Trainer:
    options.setdefault("optimizer", sgd(model))
    return Trainer(model, verbose=False, **options)


class Recorder(Callback):
    """Writes down which hook fired, and when."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def on_train_start(self, context: TrainingContext) -> None:
        self.events.append("train_start")

    def on_epoch_start(self, context: TrainingContext) -> None:
        self.events.append("epoch_start")

    def on_step_start(self, context: TrainingContext, batch: Any) -> None:
        self.events.append(f"step_start {context.progress.batch}")

    def on_gradients(self, context: TrainingContext, optimizer: Any) -> None:
        self.events.append("gradients")

    def on_update(self, context: TrainingContext) -> None:
        self.events.append(f"update {context.progress.updates}")

    def on_step_end(self, context: TrainingContext, output: Mapping[str, Any]) -> None:
        self.events.append(f"step_end {context.progress.batch}")

    def on_validation_end(self, context: TrainingContext, metrics: Mapping[str, float]) -> None:
        self.events.append(f"validation_end {context.progress.batches}")

    def on_epoch_end(self, context: TrainingContext, metrics: Mapping[str, float]) -> None:
        self.events.append("epoch_end")

    def on_train_end(self, context: TrainingContext) -> None:
        self.events.append("train_end")


# ---------------------------------------------------------------------- the plain case


@pytest.mark.parametrize("optimizer", ["SGD", "Adam", "AdamW", "RMSprop"])
def test_fit_equals_the_hand_written_loop_bit_for_bit(problem: Problem, optimizer: str) -> None:
    ours, theirs = problem.model(dropout=0.3), problem.model(dropout=0.3)
    make = getattr(torch.optim, optimizer)
    torch.manual_seed(5)
    expected = train_by_hand(theirs, problem.batches, make(theirs.parameters(), lr=0.01), epochs=3)
    torch.manual_seed(5)
    history = quiet(ours, optimizer=make(ours.parameters(), lr=0.01)).fit(problem.batches, max_length=Epochs(3))
    assert list(history.losses) == expected
    assert_same_weights(ours, theirs)


def test_hooks_fire_in_the_order_of_the_pseudo_code(problem: Problem) -> None:
    recorder = Recorder()
    quiet(problem.model(), callbacks=[recorder]).fit(problem.batches[:2], problem.batches[:1], max_length=Epochs(1))
    step = [
        "step_start 0",
        "gradients",
        "update 1",
        "step_end 1",
        "step_start 1",
        "gradients",
        "update 2",
        "step_end 2",
    ]
    assert recorder.events == ["train_start", "epoch_start", *step, "validation_end 2", "epoch_end", "train_end"]


def test_an_lbfgs_step_evaluates_the_loss_several_times(problem: Problem) -> None:
    ours, theirs = problem.model(), problem.model()
    whole = [(problem.x, problem.y)]
    history = quiet(ours, optimizer=torch.optim.LBFGS(ours.parameters(), max_iter=5)).fit(whole, max_length=Epochs(4))
    optimizer = torch.optim.LBFGS(theirs.parameters(), max_iter=5)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(theirs(problem.x), problem.y)
        loss.backward()
        return loss

    for _ in range(4):
        optimizer.step(closure)
    assert_same_weights(ours, theirs)
    assert history.losses[-1] < 0.5 * history.losses[0]


# ---------------------------------------------------------------------- accumulation


def gradient_of(problem: Problem, model: nn.Module, x: Tensor, y: Tensor) -> list[Tensor]:
    loss = nn.functional.cross_entropy(model(x), y)
    return list(torch.autograd.grad(loss, list(model.parameters())))


class Gradients(Callback):
    """Keeps a copy of the gradients of every update."""

    def __init__(self) -> None:
        self.kept: list[list[Tensor]] = []

    def on_gradients(self, context: TrainingContext, optimizer: torch.optim.Optimizer) -> None:
        self.kept.append([p.grad.clone() for group in optimizer.param_groups for p in group["params"]])


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
@pytest.mark.parametrize("sizes", [[8, 8, 8, 8], [8, 3, 5, 1], [1, 16, 4, 9, 2, 7], [5, 5, 5, 5, 5, 2]])
@pytest.mark.parametrize("has_length", [True, False])
def test_every_window_has_the_gradient_of_one_large_batch(
    problem: Problem, dtype: torch.dtype, tolerance: float, sizes: list[int], has_length: bool
) -> None:
    x, y = problem.x[: sum(sizes)].to(dtype), problem.y[: sum(sizes)]
    batches = list(zip(x.split(sizes), y.split(sizes), strict=True))
    model, seen = problem.model(dtype=dtype), Gradients()
    trainer = quiet(model, optimizer=sgd(model, lr=0.0), accumulation_steps=4, callbacks=[seen])
    trainer.fit(batches if has_length else Stream(batches), max_length=Epochs(1))
    starts = list(range(0, len(sizes), 4))
    assert len(seen.kept) == len(starts)
    for start, gradients in zip(starts, seen.kept, strict=True):
        window = batches[start : start + 4]
        expected = gradient_of(problem, model, torch.cat([a for a, _ in window]), torch.cat([b for _, b in window]))
        for gradient, wanted in zip(gradients, expected, strict=True):
            assert (gradient - wanted).abs().max() <= tolerance


def test_equal_full_windows_need_no_rescaling_at_all(problem: Problem) -> None:
    ours, theirs = problem.model(), problem.model()
    quiet(ours, accumulation_steps=4).fit(problem.batches, max_length=Epochs(2))
    optimizer = sgd(theirs)
    for _ in range(2):
        for start in range(0, 12, 4):
            optimizer.zero_grad()
            for x, y in problem.batches[start : start + 4]:
                (nn.functional.cross_entropy(theirs(x), y) * 0.25).backward()
            optimizer.step()
    assert_same_weights(ours, theirs)


def test_accumulation_4_over_10_batches_makes_3_updates(problem: Problem) -> None:
    recorder = Recorder()
    trainer = quiet(problem.model(), accumulation_steps=4, callbacks=[recorder])
    trainer.fit(problem.batches[:10], max_length=Epochs(1))
    assert trainer.context.progress.updates == 3
    assert [event for event in recorder.events if event.startswith("update")] == ["update 1", "update 2", "update 3"]
    assert recorder.events.count("gradients") == 3


def test_a_loss_over_tokens_is_weighted_by_its_items(problem: Problem) -> None:
    """The number of valid targets differs from the number of samples: the mean of all of them is what counts."""
    targets = problem.y.clone()
    targets[[0, 1, 2, 9, 25]] = -100
    batches = list(zip(problem.x[:32].split(8), targets[:32].split(8), strict=True))

    def train_step(trainer: Trainer, batch: Any) -> dict[str, Any]:
        x, y = batch
        loss = nn.functional.cross_entropy(trainer.model(x), y, ignore_index=-100)
        return {"loss": loss, "num_items": (y != -100).sum()}

    model, seen = problem.model(dtype=torch.float64), Gradients()
    batches = [(x.double(), y) for x, y in batches]
    quiet(model, accumulation_steps=4, callbacks=[seen], optimizer=sgd(model, 0.0), train_step=train_step).fit(
        batches, max_length=Epochs(1)
    )
    whole = nn.functional.cross_entropy(model(problem.x[:32].double()), targets[:32], ignore_index=-100)
    for gradient, wanted in zip(seen.kept[0], torch.autograd.grad(whole, list(model.parameters())), strict=True):
        assert (gradient - wanted).abs().max() <= 1e-12


def test_a_window_never_spans_two_epochs(problem: Problem) -> None:
    trainer = quiet(problem.model(), accumulation_steps=5)
    trainer.fit(problem.batches, max_length=Epochs(2))
    assert trainer.context.progress.updates == 2 * 3


# ---------------------------------------------------------------------- manual optimisation


def manual_step(trainer: Trainer, batch: Any) -> dict[str, Any]:
    x, y = batch
    loss = nn.functional.cross_entropy(trainer.model(x), y)
    trainer.context.backward(loss)
    trainer.context.step(trainer.optimizer)
    return {"loss": loss}


@pytest.mark.parametrize("accumulation", [1, 5])
def test_a_manual_step_equals_the_automatic_one(problem: Problem, accumulation: int) -> None:
    automatic, manual = problem.model(), problem.model()
    quiet(automatic, accumulation_steps=accumulation).fit(problem.batches, max_length=Epochs(2))
    trainer = quiet(manual, accumulation_steps=accumulation, train_step=manual_step)
    trainer.fit(problem.batches, max_length=Epochs(2))
    assert_same_weights(automatic, manual)
    assert trainer.context.progress.updates == 2 * math.ceil(12 / accumulation)


def test_two_optimizers_step_in_turn_as_written_by_hand(problem: Problem) -> None:
    """A generator and a discriminator: the second loss also reaches the first one's parameters."""

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.g, self.d = nn.Linear(2, 6), nn.Linear(6, 1)

    def optimizers(pair: Pair) -> list[torch.optim.Optimizer]:
        return [torch.optim.Adam(pair.d.parameters(), lr=0.01), torch.optim.Adam(pair.g.parameters(), lr=0.01)]

    def losses(pair: Pair, x: Tensor, noise: Tensor) -> Iterator[Tensor]:
        yield (pair.d(pair.g(noise).detach()) - pair.d(x)).mean()
        yield -pair.d(pair.g(noise)).mean()

    noises = [torch.randn(8, 2, generator=torch.Generator().manual_seed(i)) for i in range(12)]

    def train_step(trainer: Trainer, batch: Any) -> dict[str, Any]:
        x, noise = batch
        total = torch.zeros(())
        for loss, optimizer in zip(losses(trainer.model, x, noise), trainer.context.optimizers, strict=True):
            trainer.context.backward(loss)
            trainer.context.step(optimizer)
            total = total + loss.detach()
        return {"loss": total}

    ours, theirs = Pair(), Pair()
    data = [(x, noise) for (x, _), noise in zip(problem.batches, noises, strict=True)]
    trainer = quiet(ours, optimizer=optimizers(ours), train_step=train_step)
    trainer.fit(data, max_length=Epochs(2))
    by_hand = optimizers(theirs)
    for _ in range(2):
        for x, noise in data:
            for loss, optimizer in zip(losses(theirs, x, noise), by_hand, strict=True):
                for each in by_hand:
                    each.zero_grad()
                loss.backward()
                optimizer.step()
    assert_same_weights(ours, theirs)
    assert trainer.context.progress.updates == 24


def test_an_early_optimizer_step_is_delayed_until_the_window_closes(problem: Problem) -> None:
    """With a window of 2, a step asked for in the first batch only still happens in the second."""

    def train_step(trainer: Trainer, batch: Any) -> dict[str, Any]:
        x, y = batch
        loss = nn.functional.cross_entropy(trainer.model(x), y)
        trainer.context.backward(loss)
        if trainer.context.run.window.opens:
            trainer.context.step()
        return {"loss": loss}

    ours, theirs = problem.model(), problem.model()
    quiet(ours, accumulation_steps=2, train_step=train_step).fit(problem.batches, max_length=Epochs(1))
    quiet(theirs, accumulation_steps=2).fit(problem.batches, max_length=Epochs(1))
    assert_same_weights(ours, theirs)


def test_an_optimizer_step_pending_at_an_error_is_dropped(problem: Problem) -> None:
    asked: list[torch.optim.Optimizer] = []

    class Look(Callback):
        def on_gradients(self, context: TrainingContext, optimizer: torch.optim.Optimizer) -> None:
            asked.append(optimizer)

    def train_step(trainer: Trainer, batch: Any) -> dict[str, Any]:
        output = manual_step(trainer, batch)
        if fails:
            raise fails.pop()
        return output

    fails = [ZeroDivisionError()]
    trainer = quiet(
        problem.model(),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        accumulation_steps=2,
        train_step=train_step,
        callbacks=[Look],
    )
    with pytest.raises(ZeroDivisionError):
        trainer.fit(problem.batches, max_length=Batches(2))
    reset(trainer)
    trainer.fit(problem.batches, max_length=Batches(2))
    assert asked == [trainer.optimizer]


# ---------------------------------------------------------------------- lengths and periods


@pytest.mark.parametrize(
    ("length", "batches"), [(Epochs(2), 24), (Batches(17), 17), (Records(33), 5), (Updates(7), 7), (Epochs(0), 0)]
)
def test_training_ends_at_its_length(problem: Problem, length: Any, batches: int) -> None:
    trainer = quiet(problem.model())
    if batches:
        trainer.fit(problem.batches, max_length=length)
    else:
        with pytest.warns(UserWarning, match="nothing to train"):
            trainer.fit(problem.batches, max_length=length)
    assert trainer.context.progress.batches == batches


def test_a_length_counts_from_the_first_run_of_the_trainer(problem: Problem) -> None:
    once, twice = problem.model(), problem.model()
    quiet(once).fit(problem.batches, max_length=Epochs(3))
    trainer = quiet(twice)
    trainer.fit(problem.batches, max_length=Epochs(1))
    trainer.fit(problem.batches, max_length=Epochs(3))
    assert_same_weights(once, twice)


def test_stopping_and_continuing_within_an_epoch_equals_one_run(problem: Problem) -> None:
    once, pieces = problem.model(dropout=0.2), problem.model(dropout=0.2)
    data = (problem.x, problem.y)
    quiet(once, batch_size=8, seed=3).fit(data, max_length=Epochs(2))
    trainer = quiet(pieces, batch_size=8, seed=3)
    for length in (5, 12, 13, 24):
        trainer.fit(data, max_length=Batches(length))
    assert_same_weights(once, pieces)
    assert trainer.history.get_metric_values("train_loss") == trainer.history.get_metric_values("train_loss")
    assert len(trainer.history.losses) == 24


@pytest.mark.parametrize(
    ("period", "at"),
    [
        (Epochs(1), [12, 24]),
        (Epochs(2), [24]),
        (Batches(5), [5, 10, 15, 20, 24]),
        (Batches(12), [12, 24]),
        (Records(40), [5, 10, 15, 20, 24]),
        (Batches({3, 24}), [3, 24]),
        ({"updates": 7}, [7, 14, 21, 24]),
    ],
)
def test_validation_happens_at_its_period_and_at_the_end(problem: Problem, period: Any, at: list[int]) -> None:
    trainer = quiet(problem.model())
    trainer.fit(problem.batches, problem.batches[:2], max_length=Epochs(2), validation_period=period)
    assert [row["batches"] for row in trainer.history.rows if row["stage"] == "valid"] == at


def test_a_stop_waits_for_the_running_update(problem: Problem) -> None:
    class StopAt(Callback):
        def on_step_end(self, context: TrainingContext, output: Any) -> None:
            if context.progress.batches == 6:
                context.stop("six is enough")

    trainer = quiet(problem.model(), accumulation_steps=4, callbacks=[StopAt])
    trainer.fit(problem.batches, max_length=Epochs(9))
    assert trainer.context.progress.batches == 8
    assert trainer.context.run.stop_reason == "six is enough"


def test_a_stop_at_the_last_batch_still_ends_the_epoch(problem: Problem) -> None:
    class StopAt(Callback):
        def on_step_end(self, context: TrainingContext, output: Any) -> None:
            if context.progress.batches == 12:
                context.stop("done")

    trainer = quiet(problem.model(), callbacks=[StopAt])
    trainer.fit(problem.batches, max_length=Epochs(9))
    assert (trainer.context.progress.epoch, trainer.context.progress.batch) == (1, 0)
    assert len(trainer.history.get_metric_values("train_loss")) == 1


# ---------------------------------------------------------------------- schedules


def test_a_schedule_per_update_with_frequency_2_steps_at_updates_2_4_6(problem: Problem) -> None:
    model = problem.model()
    optimizer = sgd(model, lr=1.0)
    trainer = quiet(model, optimizer=optimizer, accumulation_steps=4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    rates = []

    class Rates(Callback):
        def on_update(self, context: TrainingContext) -> None:
            rates.append(optimizer.param_groups[0]["lr"])

    trainer.context.callbacks.add(Rates)
    trainer.setup()
    from dovetail.trainers.context import BoundScheduler

    trainer.context.schedulers.append(BoundScheduler(scheduler, "update", frequency=2))
    trainer.fit(problem.batches, max_length=Epochs(2))
    assert rates == [1.0, 0.5, 0.5, 0.25, 0.25, 0.125]


def test_a_schedule_per_batch_catches_up_at_updates(problem: Problem) -> None:
    model = problem.model()
    trainer = quiet(
        model,
        optimizer=sgd(model, lr=1.0),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5),
        scheduler_step_on_batch=True,
        accumulation_steps=4,
    )
    trainer.fit(problem.batches[:10], max_length=Epochs(1))
    assert trainer.optimizer.param_groups[0]["lr"] == 0.5**10


def test_a_plateau_schedule_sees_the_validation_loss(problem: Problem) -> None:
    model = problem.model()
    seen: list[float] = []

    class Spy(torch.optim.lr_scheduler.ReduceLROnPlateau):
        def step(self, metrics: Any, epoch: Any = None) -> None:
            seen.append(float(metrics))
            super().step(metrics)

    trainer = quiet(model, optimizer=sgd(model), scheduler=Spy)
    trainer.fit(problem.batches, problem.batches[:3], max_length=Epochs(3))
    assert seen == trainer.history.get_metric_values("valid_loss")


# ---------------------------------------------------------------------- looking leaves no trace


def test_validation_changes_nothing_about_training(problem: Problem) -> None:
    """Dropout, a frozen batch norm, all random generators: with and without validation, the same weights."""

    def model() -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            made = nn.Sequential(nn.Linear(6, 10), nn.BatchNorm1d(10), nn.Dropout(0.5), nn.Linear(10, 3))
        made[1].eval()
        return made

    def noisy_test_step(trainer: Trainer, batch: Any) -> dict[str, Any]:
        random.random(), np.random.rand(), torch.rand(3)
        return {"loss": trainer.criterion(trainer.model(batch[0]), batch[1])}

    results = []
    for val_data in (None, problem.batches):
        made = model()
        torch.manual_seed(1)
        random.seed(1)
        trainer = quiet(made, test_step=noisy_test_step, metrics=[])
        trainer.fit(problem.batches, val_data, max_length=Epochs(2), validation_period=Batches(5))
        assert [module.training for module in made] == [True, False, True, True]
        results.append((made, list(trainer.history.losses), random.random(), torch.rand(1).item()))
    assert results[0][1:] == results[1][1:]
    assert_same_weights(results[0][0], results[1][0])


class Remembering(nn.Module):
    """Adds the hidden state of the previous call to the next one, as a language model does between batches."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.head = nn.Linear(6, 10), nn.Linear(10, 3)
        self.state = torch.zeros(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        state = torch.tanh(self.hidden(x) + self.state)
        self.state = state.detach()
        return self.head(state)


def test_training_continues_with_tensors_created_in_validation(problem: Problem) -> None:
    model = Remembering()
    trainer = quiet(model)
    trainer.fit(problem.batches, problem.batches, max_length=Epochs(2), validation_period=Batches(5))
    trainer.evaluate(problem.batches)
    trainer.predict(problem.batches)
    assert not model.state.is_inference()
    trainer.fit(max_length=Epochs(3))
    assert trainer.history.rows[-1]["loss"] < trainer.history.rows[0]["loss"]


def test_evaluate_and_predict_preserve_counters_modes_logs_and_rng(problem: Problem) -> None:
    trainer = quiet(problem.model(dropout=0.5))
    trainer.fit(problem.batches, max_length=Epochs(1))
    before = (trainer.context.progress.copy(), list(trainer.history.rows), torch.get_rng_state())
    trainer.model[2].eval()
    trainer.evaluate(problem.batches)
    trainer.predict(problem.x)
    assert trainer.context.progress == before[0]
    assert trainer.history.rows == before[1]
    assert torch.equal(torch.get_rng_state(), before[2])
    assert [module.training for module in trainer.model] == [True, True, False, True]
    assert trainer.context.run.trainer is None


def test_evaluation_is_weighted_by_samples(problem: Problem) -> None:
    model = problem.model(dtype=torch.float64)
    x = problem.x[:13].double()
    trainer = quiet(model)
    uneven = list(zip(x.split([6, 6, 1]), problem.y[:13].split([6, 6, 1]), strict=True))
    metrics = trainer.evaluate(uneven)
    with torch.no_grad():
        outputs = model.eval()(x)
    assert metrics["loss"] == pytest.approx(nn.functional.cross_entropy(outputs, problem.y[:13]).item(), abs=1e-12)
    assert metrics["accuracy"] == pytest.approx((outputs.argmax(1) == problem.y[:13]).double().mean().item(), abs=1e-7)


def test_evaluate_on_training_data_covers_all_of_it_in_any_epoch(problem: Problem) -> None:
    def trained(*, looks: bool) -> nn.Module:
        trainer = quiet(problem.model(), seed=0)
        order = torch_data.RandomSampler(problem.batches)
        trainer.fit(torch_data.DataLoader(problem.batches, None, sampler=order), max_length=Batches(5))
        if looks:
            here, there = trainer.evaluate(stage="train"), trainer.evaluate(problem.batches)
            assert here == pytest.approx(there)
        trainer.fit(max_length=Batches(24))
        return trainer.model

    assert_same_weights(trained(looks=False), trained(looks=True))


def test_an_unknown_stage_is_rejected_by_name(problem: Problem) -> None:
    trainer = quiet(problem.model())
    with pytest.raises(UnknownNameError, match=r"'tset'.*'test'"):
        trainer.evaluate(problem.batches, "tset")  # type: ignore[arg-type]
    with pytest.raises(DataError, match="no train data"):
        trainer.evaluate(stage="train")


def test_predictions_are_in_order_and_concatenated(problem: Problem) -> None:
    model = problem.model()
    predicted = quiet(model, batch_size=7).predict(problem.x)
    with torch.no_grad():
        expected = torch.cat([model.eval()(part.clone()) for part in problem.x.split(7)])
    assert torch.equal(predicted, expected)


def test_evaluating_inside_a_callback_does_not_disturb_training(problem: Problem) -> None:
    class Look(Callback):
        def on_epoch_end(self, context: TrainingContext, metrics: Any) -> None:
            assert context.run.trainer is not None
            context.run.trainer.evaluate(problem.batches[:1])

    with_look, without = problem.model(dropout=0.5), problem.model(dropout=0.5)
    for model, callbacks in ((with_look, [Look]), (without, [])):
        torch.manual_seed(0)
        quiet(model, callbacks=callbacks).fit(problem.batches, max_length=Epochs(2))
    assert_same_weights(with_look, without)


# ---------------------------------------------------------------------- odd data, and errors


class Stream:
    """Batches of unknown number."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


def test_data_without_length_trains_as_data_with_it(problem: Problem) -> None:
    listed, streamed = problem.model(), problem.model()
    quiet(listed, accumulation_steps=5).fit(problem.batches, max_length=Epochs(2))
    quiet(streamed, accumulation_steps=5).fit(Stream(problem.batches), max_length=Epochs(2))
    assert_same_weights(listed, streamed)


class BudgetSampler(torch_data.Sampler[Any]):
    """Forms batches of another number in every epoch, as with a number of tokens for each batch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        num_batches = 4 + self.epoch % 2
        return iter([list(range(first, 24, num_batches)) for first in range(num_batches)])


class SizedBudgetSampler(BudgetSampler):
    def __len__(self) -> int:
        return 4 + self.epoch % 2


def test_windows_follow_the_length_of_the_epoch(problem: Problem) -> None:
    x, y = (torch.cat(each) for each in zip(*problem.batches, strict=True))
    dataset, models = torch_data.TensorDataset(x[:24], y[:24]), []
    for sampler in (BudgetSampler(), SizedBudgetSampler()):
        models.append(problem.model())
        trainer = quiet(models[-1], accumulation_steps=2)
        trainer.fit(torch_data.DataLoader(dataset, batch_sampler=sampler), max_length=Epochs(3))
        assert trainer.context.progress.updates == 2 + 3 + 2
    assert_same_weights(*models)


def test_data_shorter_than_its_length_is_an_error_inside_a_window(problem: Problem) -> None:
    class Liar(Stream):
        def __len__(self) -> int:
            return 12

    trainer = quiet(problem.model(), accumulation_steps=4)
    with pytest.raises(DataError, match="ended after 6 batches, though its length is 12"):
        trainer.fit(Liar(problem.batches[:6]), max_length=Epochs(1))


def test_a_window_interrupted_by_an_error_is_not_continued(problem: Problem) -> None:
    class Fail(Callback):
        def on_step_end(self, context: TrainingContext, output: Any) -> None:
            if context.progress.batches == 2:
                raise ZeroDivisionError

    trainer, fail = quiet(problem.model(), accumulation_steps=4), Fail()
    trainer.context.callbacks.add(fail)
    with pytest.raises(ZeroDivisionError):
        trainer.fit(problem.batches, max_length=Epochs(1))
    trainer.context.callbacks.remove(fail)
    trainer.fit(problem.batches, max_length=Epochs(1))
    assert trainer.context.progress.updates == 3


@pytest.mark.parametrize("counts", [True, False])
def test_an_overridden_train_epoch_is_validated_and_saved_every_epoch(
    problem: Problem, tmp_path: Path, counts: bool
) -> None:
    class OwnEpochs(Trainer):
        def train_epoch(self) -> dict[str, float] | None:
            for x, y in self.batches("train"):
                self.optimizer.zero_grad()
                self.criterion(self.model(x), y).backward()
                self.optimizer.step()
            return {"loss": 1.0} if counts else None

    trainer = OwnEpochs(problem.model(), verbose=False, checkpoint_dir=tmp_path)
    trainer.fit(problem.batches, problem.batches, max_length=Epochs(3), checkpoint_period=Epochs(2))
    assert len(trainer.history.get_metric_values("valid_loss")) == 3
    assert len(trainer.history.get_metric_values("train_loss")) == (3 if counts else 0)
    assert sorted(path.name for path in tmp_path.glob("ck_epoch*")) == ["ck_epoch_2_iter_0", "ck_epoch_3_iter_0"]


@pytest.mark.filterwarnings("ignore:the training data is empty")
def test_empty_training_data_gives_nan_and_one_warning(problem: Problem) -> None:
    trainer = quiet(problem.model())
    with pytest.warns(UserWarning, match="the training data is empty") as caught:
        trainer.fit([], max_length=Epochs(1))
    assert len(caught) == 1
    assert math.isnan(trainer.history.get_latest_metric("train_loss"))


def test_empty_validation_gives_nan_and_one_warning(problem: Problem) -> None:
    with pytest.warns(UserWarning, match="the test data is empty") as caught:
        metrics = quiet(problem.model()).evaluate([])
    assert len(caught) == 1
    assert set(metrics) == {"loss", "accuracy"}
    assert all(math.isnan(value) for value in metrics.values())


def one_by_one(batches: list[Any]) -> Iterator[Any]:
    yield from batches


class Once:
    """An object that is its own iterator, and never starts again."""

    def __init__(self, batches: list[Any]) -> None:
        self._rest = iter(batches)

    def __iter__(self) -> Once:
        return self

    def __next__(self) -> Any:
        return next(self._rest)


@pytest.mark.parametrize("make", [one_by_one, iter, lambda batches: iter(torch_data.DataLoader(batches))])
def test_one_pass_data_is_rejected_for_several_epochs(problem: Problem, make: Any) -> None:
    trainer = quiet(problem.model())
    with pytest.raises(DataError, match=r"the train data is a \w+, which can be read only once, .* Epochs\(2\)"):
        trainer.fit(make(problem.batches), max_length=Epochs(2))
    with pytest.raises(DataError, match=r"the valid data is a \w+, which can be read only once"):
        trainer.fit(problem.batches, make(problem.batches), max_length=Epochs(2))
    assert trainer.context.progress.batches == 0


def test_one_pass_data_works_for_one_epoch_at_a_time(problem: Problem) -> None:
    streamed, listed = problem.model(), problem.model()
    trainer = quiet(streamed)
    for epoch in (1, 2):
        trainer.fit(one_by_one(problem.batches), one_by_one(problem.batches), max_length=Epochs(epoch))
    quiet(listed).fit(problem.batches, max_length=Epochs(2))
    assert_same_weights(streamed, listed)


@pytest.mark.parametrize("length", [Epochs(2), Batches(20)])
def test_an_epoch_without_batches_after_one_with_batches_is_an_error(problem: Problem, length: Any) -> None:
    trainer = quiet(problem.model())
    with pytest.raises(DataError, match="has no batches in epoch 2, though it had some before"):
        trainer.fit(Once(problem.batches), max_length=length)
    assert trainer.context.progress.batches == 12


def test_a_second_validation_without_batches_is_an_error(problem: Problem) -> None:
    with pytest.raises(DataError, match="the valid data is a Once without batches: it can be read only once"):
        quiet(problem.model()).fit(problem.batches, Once(problem.batches), max_length=Epochs(2))


@pytest.mark.filterwarnings("ignore:the training data is empty")
def test_a_length_that_training_never_reaches_is_an_error(problem: Problem) -> None:
    class OwnEpochs(Trainer):
        def train_epoch(self) -> None:
            """Count nothing."""

    for trainer, data in ((quiet(problem.model()), []), (OwnEpochs(problem.model(), verbose=False), problem.batches)):
        with pytest.raises(DataError, match=r"Batches\(3\) is never reached, because an epoch counted no batch"):
            trainer.fit(data, max_length=Batches(3))


def test_an_epoch_may_have_one_batch(problem: Problem) -> None:
    history = quiet(problem.model()).fit(problem.batches[:1], max_length=Epochs(3))
    assert len(history.losses) == 3


def test_a_dict_batch_calls_the_model_by_name(problem: Problem) -> None:
    class Named(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, left: Tensor, right: Tensor) -> Any:
            return self.inner(torch.cat([left, right], dim=1))

    named, plain = Named(problem.model()), problem.model()
    data = [{"left": x[:, :2], "right": x[:, 2:], "labels": y} for x, y in problem.batches]
    quiet(named).fit(data, max_length=Epochs(1))
    quiet(plain).fit(problem.batches, max_length=Epochs(1))
    assert_same_weights(named.inner, plain)


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ({"acc": 1.0}, r"'loss', got \['acc'\]"),
        (None, "'loss', got NoneType"),
        ({"loss": 1.0}, "'loss'"),
        ({"loss": torch.zeros(3, requires_grad=True)}, r"shape \(3,\)"),
        ({"loss": torch.zeros(())}, "does not depend on any parameter"),
    ],
)
def test_an_invalid_loss_raises_an_explaining_error(problem: Problem, output: Any, message: str) -> None:
    trainer = quiet(problem.model(), train_step=lambda trainer, batch: output)
    with pytest.raises(ConfigError, match=message):
        trainer.fit(problem.batches)


def test_batches_without_targets_raise_an_error_with_a_remedy(problem: Problem) -> None:
    with pytest.raises(DataError, match=r"give pairs \(inputs, targets\)"):
        quiet(problem.model()).fit(problem.x, max_length=Epochs(1))


def test_missing_data_raises_an_error_that_names_it(problem: Problem) -> None:
    with pytest.raises(DataError, match="no train data: pass it to the call, or train_dataset="):
        quiet(problem.model()).fit()


def test_an_error_in_training_keeps_its_type_and_adds_its_position(problem: Problem) -> None:
    class Boom(Exception):
        pass

    class Fail(Callback):
        def on_step_end(self, context: TrainingContext, output: Any) -> None:
            if context.progress.batches == 15:
                raise Boom("inside")

    seen: list[BaseException] = []

    class Watch(Callback):
        def on_exception(self, context: TrainingContext, error: BaseException) -> None:
            seen.append(error)

    trainer = quiet(problem.model(), callbacks=[Fail, Watch])
    torn_down: list[BaseException | None] = []
    trainer.teardown = torn_down.append  # type: ignore[method-assign]
    with pytest.raises(Boom) as caught:
        trainer.fit(problem.batches, max_length=Epochs(2))
    assert caught.value.__notes__ == ["while training: epoch 2, batch 3"]
    assert seen == torn_down == [caught.value]
    assert any(entry.name == "on_step_end" for entry in caught.traceback)
    trainer.context.callbacks.remove(
        *[callback for callback in trainer.context.callbacks if isinstance(callback, Fail)]
    )
    trainer.fit(problem.batches, max_length=Epochs(3))
    assert trainer.context.progress.epoch == 3


@pytest.mark.parametrize(
    ("period", "place"),
    [(Epochs(1), "while validating after epoch 1"), (Batches(5), "while validating: epoch 1, batch 5")],
)
def test_an_error_in_a_validation_names_the_validation(problem: Problem, period: Any, place: str) -> None:
    class Failing(Trainer):
        def test_step(self, batch: Any) -> Mapping[str, Any]:
            raise RuntimeError("broken")

    trainer = Failing(problem.model(), "cpu", verbose=False)
    with pytest.raises(RuntimeError, match="broken") as caught:
        trainer.fit(problem.batches, problem.batches, max_length=Epochs(2), validation_period=period)
    assert caught.value.__notes__ == [place]
    with pytest.raises(RuntimeError, match="broken") as caught:
        trainer.evaluate(problem.batches)
    assert caught.value.__notes__ == ["while testing"]


def test_an_error_before_the_first_epoch_adds_this_position(problem: Problem) -> None:
    class Failing(Callback):
        def on_train_start(self, context: TrainingContext) -> None:
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken") as caught:
        Trainer(problem.model(), "cpu", verbose=False, callbacks=[Failing]).fit(problem.batches)
    assert caught.value.__notes__ == ["while training before the first epoch"]


def test_leftover_gradients_do_not_affect_the_first_update(problem: Problem) -> None:
    clean, dirty = problem.model(), problem.model()
    for parameter in dirty.parameters():
        parameter.grad = torch.full_like(parameter, 7.0)
    quiet(clean).fit(problem.batches, max_length=Epochs(1))
    quiet(dirty).fit(problem.batches, max_length=Epochs(1))
    assert_same_weights(clean, dirty)
    assert weights(clean).keys() == weights(dirty).keys()


# ------------------------------------------------------------------ losses with one element


class OneElement(Trainer):
    """Returns the loss as a tensor of shape `(1,)`, in training and in evaluation."""

    shape: tuple[int, ...] = (1,)

    def train_step(self, batch: Any) -> Mapping[str, Any]:
        x, y = batch
        return {"loss": nn.functional.cross_entropy(self.model(x), y).reshape(self.shape)}

    def test_step(self, batch: Any) -> Mapping[str, Any]:
        return self.train_step(batch)


class NoDimension(OneElement):
    shape = ()


@pytest.mark.parametrize("options", [{}, {"accumulation_steps": 5}, {"nonfinite": "raise"}], ids=str)
def test_a_loss_with_one_element_trains_as_a_scalar_loss(problem: Problem, options: dict[str, Any]) -> None:
    found = []
    for kind in (OneElement, NoDimension):
        model = problem.model()
        trainer = kind(model, optimizer=sgd(model), verbose=False, **options)
        history = trainer.fit(problem.batches, problem.batches[:3], max_length=Epochs(2))
        losses = [history.get_metric_values(name) for name in ("train_loss", "valid_loss")]
        assert all(len(values) == 2 for values in losses)
        found.append((losses, [value.tolist() for value in weights(model).values()]))
    assert found[0] == found[1]


def test_a_manual_step_may_differentiate_a_loss_with_one_element(problem: Problem) -> None:
    class Manual(OneElement):
        def train_step(self, batch: Any) -> Mapping[str, Any]:
            output = super().train_step(batch)
            self.context.backward(output["loss"])
            self.context.step()
            return output

    class WithoutDimension(Manual):
        shape = ()

    found = []
    for kind in (Manual, WithoutDimension):
        model = problem.model()
        trainer = kind(model, optimizer=sgd(model), verbose=False, accumulation_steps=2)
        history = trainer.fit(problem.batches, max_length=Epochs(1))
        found.append((history.get_metric_values("train_loss"), [it.tolist() for it in weights(model).values()]))
    assert found[0] == found[1]
    assert len(found[0][0]) == 1
