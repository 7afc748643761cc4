"""Single-process trainer: options, objects, reproducibility and resume."""

from __future__ import annotations

import math
import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data as torch_data
from problem import Problem, assert_same_weights, weights
from torch import Tensor, nn

from dovetail import Batches, Epochs, Trainer, seed_everything
from dovetail.callbacks import EMA, Callback, EarlyStopping
from dovetail.data import DataLoader
from dovetail.errors import CheckpointError, ConfigError, DataError, UnknownNameError
from dovetail.trainers.composable import ComposableTrainer
from dovetail.trainers.context import TrainingContext
from dovetail.trainers.reuse import fit_new_run, reset
from dovetail.trainers.schedules import DecayWhenAcc, TriangularMtm
from dovetail.trainers.strategies import (
    AdamOptimizerStrategy,
    DynamicBatchSizeDataLoaderStrategy,
    ExponentialLRSchedulerStrategy,
    GradientAccumulationStepStrategy,
    MixedPrecisionStepStrategy,
    MultipleForwardPassStepStrategy,
)


def quiet(model: Any, **options: Any) -> Trainer:
    return Trainer(model, verbose=False, **options)


# ---------------------------------------------------------------------- bad input


def test_an_unknown_keyword_suggests_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="unknown keyword 'learning_rte': did you mean 'learning_rate'"):
        Trainer(learning_rte=0.1)
    with pytest.raises(UnknownNameError, match="did you mean 'optimizer'"):
        Trainer(optimiser=None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size: expected a whole number that is at least 1, got 0"),
        ({"num_epochs": 1.5}, "num_epochs: expected a whole number that is at least 0, got 1.5"),
        ({"accumulation_steps": "4"}, "accumulation_steps: expected a whole number that is at least 1, got '4'"),
        ({"momentum": "x"}, "momentum: expected a number that is at least 0.0, got 'x'"),
        ({"learning_rate": math.nan}, "learning_rate: expected a number that is at least 0.0, got nan"),
        ({"keep_last": 0}, "keep_last: expected None or a whole number that is at least 1, got 0"),
        ({"keep_every": "a"}, "keep_every: expected None or a whole number that is at least 1, got 'a'"),
        ({"best_mode": "up"}, "best_mode: expected 'min', 'max' or None, got 'up'"),
        ({"on_save_error": "ignore"}, "on_save_error: expected 'raise' or 'warn', got 'ignore'"),
        ({"seed": "1"}, "seed: expected a whole number or None, got '1'"),
        ({"checkpoint_dir": None}, "checkpoint_dir: expected the path of a folder, got None; leave it out"),
        ({"early_stop": 3}, "early_stop: expected the keys 'num_epochs' and 'improv', got 3"),
        ({"nonfinite": "explode"}, "nonfinite: expected 'raise', 'stop', 'warn' or 'ignore', got 'explode'"),
        ({"loss_function": "CrosEntropyLoss"}, "unknown loss 'CrosEntropyLoss': did you mean 'CrossEntropyLoss'"),
        ({"optim_function": "Adm"}, "unknown optimizer 'Adm': did you mean 'Adam'"),
        ({"lr_scheduler": "StepRL"}, "unknown scheduler 'StepRL': did you mean 'StepLR'"),
        ({"lr_scheduler": 3}, "lr_scheduler: expected a scheduler of torch"),
        ({"optimizer": 3}, "optimizer: expected an optimizer of torch"),
        ({"criterion": 3}, "criterion: expected a loss of torch.nn"),
        ({"checkpoint_dir": "x", "checkpoint_name": "../up"}, "checkpoint_name: expected a plain file name"),
        ({"max_concurrency": 0}, "max_concurrency: expected None or a whole number that is at least 1, got 0"),
        ({"lr_scheduler": "StepLR"}, r"lr_scheduler: StepLR needs step_size; give partial\(StepLR, step_size=…\)"),
        ({"metrics": "acc"}, "unknown metric 'acc': did you mean 'accuracy'"),
        ({"callbacks": [3]}, "callbacks: expected"),
        ({"callbacks": print}, "callbacks: expected a list of callbacks, got <built-in function print>"),
        ({"device": "cuda:99"}, "device: 'cuda:99' is not available here; use 'cpu' or 'auto'"),
    ],
)
def test_an_invalid_option_raises_a_one_sentence_error(problem: Problem, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        quiet(problem.model(), **options).fit(problem.batches, max_length=Epochs(1))


def test_a_resume_value_that_names_no_checkpoint_is_rejected(problem: Problem) -> None:
    with pytest.raises(ConfigError, match="resume: expected 'auto' or the path of a checkpoint, got True"):
        quiet(problem.model()).fit(problem.batches, resume=True)  # type: ignore[arg-type] # the mistake under test


def test_a_schedule_is_rejected_as_a_length(problem: Problem) -> None:
    with pytest.raises(
        ConfigError, match=r"max_length: expected one whole number such as Epochs\(5\), got the schedule"
    ):
        quiet(problem.model()).fit(problem.batches, max_length=Epochs([1, 5]))


def test_data_without_samples_is_rejected(problem: Problem) -> None:
    with pytest.raises(DataError, match="data: expected at least one sample, got none"):
        quiet(problem.model()).fit((problem.x[:0], problem.y[:0]))


def test_an_add_on_that_reads_validations_does_not_require_validation_data(problem: Problem) -> None:
    class Looks:
        def val_epoch(self) -> Any:
            measured = super().val_epoch()  # type: ignore[misc] # the method of the trainer that it is mounted on
            seen.append(dict(measured))
            return measured

    seen: list[dict[str, float]] = []
    trainer = Trainer.add_on(Looks)(problem.model(), verbose=False)
    trainer.fit(problem.batches, max_length=Epochs(1))
    assert seen == [{}]
    assert trainer.history.get_metric_names() == {"train_loss", "train_lr"}
    trainer.fit(problem.batches, problem.batches, max_length=Epochs(2))
    assert seen[1].keys() == {"loss", "accuracy"}


def test_a_trainer_without_a_model_raises_an_error(problem: Problem) -> None:
    with pytest.raises(ConfigError, match="has no model"):
        Trainer(verbose=False).fit(problem.batches)
    for use in (Trainer.save_model, Trainer.load_model, Trainer.save_checkpoint):
        with pytest.raises(ConfigError, match="has no model"):
            use(Trainer(verbose=False), "nowhere")


def test_a_frozen_model_raises_an_error_about_nothing_to_optimize(problem: Problem) -> None:
    model = problem.model().requires_grad_(False)
    with pytest.raises(ConfigError, match="nothing to optimise"):
        quiet(model).fit(problem.batches)


def test_lbfgs_rejects_accumulation(problem: Problem) -> None:
    with pytest.raises(ConfigError, match="LBFGS"):
        quiet(problem.model(), optimizer=torch.optim.LBFGS, accumulation_steps=2).fit(problem.batches)


def test_lbfgs_rejects_mixed_precision(problem: Problem) -> None:
    step = MixedPrecisionStepStrategy(precision="bf16")
    with pytest.raises(ConfigError, match="needs full precision"):
        quiet(problem.model(), optimizer=torch.optim.LBFGS, training_step_strategy=step).fit(problem.batches)


def test_an_option_decided_by_a_strategy_is_rejected(problem: Problem) -> None:
    with pytest.raises(ConfigError, match=r"momentum: AdamOptimizerStrategy\(lr=0.1\) decides this"):
        quiet(problem.model(), optimizer_strategy=AdamOptimizerStrategy(lr=0.1), momentum=0.5)


def test_an_option_replaces_a_default_strategy(problem: Problem) -> None:
    trainer = ComposableTrainer(problem.model(), optim_function="Adam", learning_rate=0.5, verbose=False)
    assert isinstance(trainer.optimizer, torch.optim.Adam)
    assert trainer.optimizer.param_groups[0]["lr"] == 0.5
    assert ComposableTrainer(problem.model(), learning_rate=0.25, verbose=False).optimizer.param_groups[0]["lr"] == 0.25


def test_a_closed_trainer_cannot_train(problem: Problem) -> None:
    with quiet(problem.model()) as trainer:
        trainer.fit(problem.batches, max_length=Epochs(1))
    with pytest.raises(ConfigError, match="the trainer is closed"):
        trainer.fit(problem.batches, max_length=Epochs(2))


def test_the_configuration_of_one_run_does_not_affect_the_next(problem: Problem) -> None:
    trainer = ComposableTrainer(problem.model(), verbose=False)
    trainer.train_model({"epochs": 1, "batch_size": 48, "lr": 0.3}, (problem.x, problem.y))
    trainer.train_model({"epochs": 1}, (problem.x, problem.y))
    assert trainer.optimizer.param_groups[0]["lr"] == 0.01
    assert trainer.context.config["batch_size"] == 64


# ---------------------------------------------------------------------- options that would have no effect


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "cpu", "device_id": 3}, "device_id: device='cpu' names another device; give one or the other"),
        (
            {"optimizer": partial(torch.optim.SGD, lr=0.3), "learning_rate": 0.5},
            "learning_rate: the optimizer has its own, 0.3, so 0.5 would have no effect",
        ),
        (
            {"optimizer_strategy": AdamOptimizerStrategy(lr=0.3), "learning_rate": 0.5},
            "learning_rate: the optimizer has its own, 0.3, so 0.5 would have no effect",
        ),
        (
            {"optimizer": partial(torch.optim.SGD, lr=0.3, weight_decay=0.1), "weight_decay": 0.5},
            "weight_decay: the optimizer has its own, 0.1, so 0.5 would have no effect",
        ),
        ({"lr_scheduler": DecayWhenAcc()}, "DecayWhenAcc.* follows 'valid_accuracy', which this run does not measure"),
        ({"save_best": True, "checkpoint_dir": "x"}, "save_best: this run validates nothing"),
        ({"keep_best": 2, "checkpoint_dir": "x"}, "keep_best: this run validates nothing"),
    ],
)
def test_an_option_without_effect_is_an_error(
    problem: Problem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        with pytest.raises(ConfigError, match=message):
            quiet(problem.model(), **options).fit(problem.batches, max_length=Epochs(1))


@pytest.mark.parametrize("option", [{"save_in_background": True}, {"on_save_error": "warn"}])
def test_saving_options_warn_in_a_run_without_checkpoints(problem: Problem, option: dict[str, Any]) -> None:
    trainer = quiet(problem.model(), **option)
    with pytest.warns(UserWarning, match=f"{next(iter(option))} has no effect: this run writes no checkpoints"):
        trainer.fit(problem.batches, problem.batches, max_length=Epochs(1))


def test_a_schedule_by_accuracy_needs_an_accuracy_in_every_validation(problem: Problem) -> None:
    trainer = quiet(problem.model(), lr_scheduler=DecayWhenAcc(), metrics={})
    with pytest.raises(ConfigError, match="follows 'valid_accuracy'"):
        trainer.fit(problem.batches, problem.batches, max_length=Epochs(1))
    every_second = quiet(problem.model(), lr_scheduler=DecayWhenAcc())
    every_second.fit(problem.batches, problem.batches, max_length=Epochs(3), validation_period=Epochs(2))


def test_the_optimizer_rate_may_be_given_twice_if_equal(problem: Problem) -> None:
    model = problem.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scheduler = partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5)
    trainer = quiet(model, optimizer=optimizer, learning_rate=0.5, lr_scheduler=scheduler)
    for _ in range(2):
        fit_new_run(trainer, problem.batches, config={"epochs": 1})
    assert trainer.optimizer.param_groups[0]["lr"] == 0.125


def test_the_rate_of_the_run_configuration_is_used(problem: Problem) -> None:
    trainer = quiet(problem.model(), optim_function="SGD")
    fit_new_run(trainer, problem.batches, config={"epochs": 1, "lr": 0.25})
    assert trainer.optimizer.param_groups[0]["lr"] == 0.25
    fit_new_run(trainer, problem.batches, config={"epochs": 1})
    assert trainer.optimizer.param_groups[0]["lr"] == 1e-4


def test_a_sampler_rejects_batched_data(problem: Problem) -> None:
    trainer = quiet(problem.model(), train_dataset=(problem.x, problem.y))
    with pytest.raises(ConfigError, match=r"call train\(trainset, sampler\)"):
        trainer.train(sampler=[0, 1])
    with pytest.raises(DataError, match="sampler: a list holds batches already; give the dataset instead"):
        fit_new_run(trainer, problem.batches, [0, 1], {"epochs": 1})


def test_a_loader_strategy_rejects_batched_data(problem: Problem) -> None:
    trainer = quiet(problem.model(), data_loader_strategy=DynamicBatchSizeDataLoaderStrategy())
    with pytest.raises(DataError, match="forms batches of samples, but a list holds batches already"):
        trainer.fit(problem.batches)


def test_a_step_method_together_with_a_step_strategy_is_rejected(problem: Problem) -> None:
    class Own(Trainer):
        def train_step(self, batch: Any) -> dict[str, Tensor]:
            return {"loss": self.criterion(self.model(batch[0]), batch[1])}

    class PassesOn(Trainer):
        def train_step(self, batch: Any) -> Any:
            return super().train_step(batch)

    with pytest.raises(ConfigError, match=r"train_step: MultipleForwardPassStepStrategy\(.* decides this"):
        Own(problem.model(), training_step_strategy=MultipleForwardPassStepStrategy(2))
    Own(problem.model(), training_step_strategy=GradientAccumulationStepStrategy(2))
    PassesOn(problem.model(), training_step_strategy=MultipleForwardPassStepStrategy(2))


# ---------------------------------------------------------------------- pieces


@pytest.mark.parametrize(
    "device",
    [None, "cpu", "auto", torch.device("cpu"), ["cpu", "cuda:1"]],
    ids=["none", "name", "auto", "object", "list"],
)
def test_a_device_may_be_spelled_in_many_ways(problem: Problem, device: Any) -> None:
    if device in (None, "auto") and (torch.cuda.is_available() or torch.backends.mps.is_available()):
        pytest.skip("this machine has an accelerator, so 'auto' is not the CPU")
    assert quiet(problem.model(), device=device).context.device == torch.device("cpu")


def test_device_id_counts_cuda_devices() -> None:
    assert Trainer(device_id=-1).context.device == torch.device("cpu")
    assert Trainer(device_id=1).context.device == torch.device("cuda", 1)
    with pytest.raises(ConfigError, match="got 'gpu'"):
        Trainer(device="gpu")


@pytest.mark.parametrize(
    "optimizer",
    ["SGD", torch.optim.SGD, partial(torch.optim.SGD, lr=0.1, momentum=0.5), lambda ps: torch.optim.SGD(ps, lr=0.1)],
    ids=["name", "class", "partial", "function"],
)
def test_an_optimizer_may_be_given_in_many_ways(problem: Problem, optimizer: Any) -> None:
    trainer = quiet(problem.model(), optimizer=optimizer, learning_rate=0.1, weight_decay=0.0)
    assert isinstance(trainer.optimizer, torch.optim.SGD)
    assert trainer.optimizer.param_groups[0]["lr"] == 0.1


class _ScheduledSubclass(Trainer):
    def get_lr_scheduler(self, config: Any, optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Trainer, {"lr_scheduler": lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)}),
        (Trainer, {"scheduler": partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5)}),
        (Trainer, {"lr_scheduler_strategy": ExponentialLRSchedulerStrategy(gamma=0.5)}),
        (_ScheduledSubclass, {}),
    ],
)
def test_a_scheduler_moves_every_optimizer(problem: Problem, kind: Any, options: dict[str, Any]) -> None:
    model = problem.model()
    optimizers = [torch.optim.SGD(model[0].parameters(), lr=1.0), torch.optim.SGD(model[3].parameters(), lr=4.0)]
    trainer = kind(model, optimizer=optimizers, verbose=False, **options)
    trainer.fit(problem.batches, max_length=Epochs(2))
    assert [it.param_groups[0]["lr"] for it in optimizers] == [0.25, 1.0]
    assert [bound.optimizer for bound in trainer.context.schedulers] == optimizers


def test_a_momentum_schedule_moves_every_optimizer(problem: Problem) -> None:
    model = problem.model()
    optimizers = [torch.optim.SGD(model[part].parameters(), lr=0.1, momentum=0.9) for part in (0, 3)]
    schedule = TriangularMtm(mtm_min=0.5, mtm_max=0.8, stepsize=6)
    Trainer(model, optimizer=optimizers, mtm_scheduler=schedule, verbose=False).fit(
        problem.batches, max_length=Batches(3)
    )
    first, second = (it.param_groups[0]["momentum"] for it in optimizers)
    assert first == second != 0.9


def test_a_scheduler_object_changes_only_its_optimizer(problem: Problem) -> None:
    model = problem.model()
    optimizers = [torch.optim.SGD(model[part].parameters(), lr=1.0) for part in (0, 3)]
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizers[1], 0.5)
    trainer = quiet(model, optimizer=optimizers, scheduler=scheduler)
    trainer.fit(problem.batches, max_length=Epochs(2))
    assert [it.param_groups[0]["lr"] for it in optimizers] == [1.0, 0.25]
    assert len(trainer.context.schedulers) == 1


def test_a_scheduler_of_an_unknown_optimizer_is_an_error_in_every_run(problem: Problem) -> None:
    other = torch.optim.SGD(problem.model().parameters(), lr=1.0)
    trainer = quiet(problem.model(), scheduler=torch.optim.lr_scheduler.ExponentialLR(other, 0.5))
    for _ in range(2):
        with pytest.raises(ConfigError, match="ExponentialLR schedules an optimizer that this trainer does not have"):
            trainer.fit(problem.batches, max_length=Epochs(1))


@pytest.mark.parametrize("criterion", ["MSELoss", nn.MSELoss, nn.MSELoss(), nn.functional.mse_loss])
def test_a_regression_has_a_loss_and_no_accuracy(criterion: Any) -> None:
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    y = x.sum(dim=1, keepdim=True)
    trainer = quiet(nn.Linear(3, 1), criterion=criterion, optimizer=partial(torch.optim.SGD, lr=0.1), seed=0)
    history = trainer.fit((x, y), (x, y), max_length=Epochs(40))
    assert history.get_latest_metric("valid_loss") < 1e-3
    assert history.get_metric_names() == {"train_loss", "train_lr", "valid_loss"}


def test_numpy_arrays_are_accepted_as_data(problem: Problem) -> None:
    ours, theirs = problem.model(), problem.model()
    quiet(ours, seed=1).fit((problem.x.numpy(), problem.y.numpy()), max_length=Epochs(2))
    quiet(theirs, seed=1).fit((problem.x, problem.y), max_length=Epochs(2))
    assert_same_weights(ours, theirs)


def test_a_data_set_of_single_samples_equals_tensors(problem: Problem) -> None:
    class Samples(torch_data.Dataset[tuple[Tensor, Tensor]]):
        def __len__(self) -> int:
            return 96

        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            return problem.x[index], problem.y[index]

    ours, theirs = problem.model(), problem.model()
    quiet(ours, seed=1, batch_size=8, num_workers=0).fit(Samples(), max_length=Epochs(2))
    quiet(theirs, seed=1, batch_size=8).fit((problem.x, problem.y), max_length=Epochs(2))
    assert_same_weights(ours, theirs)


def test_add_ons_are_mounted_left_to_right(problem: Problem) -> None:
    calls: list[str] = []

    class First:
        def after_step(self, output: Any) -> None:
            calls.append("first")
            super().after_step(output)  # type: ignore[misc]

    class Second:
        def after_step(self, output: Any) -> None:
            calls.append("second")
            super().after_step(output)  # type: ignore[misc]

    built = Trainer.add_on(First, Second)
    built(problem.model(), verbose=False).fit(problem.batches[:1], max_length=Epochs(1))
    assert calls == ["second", "first"]
    with pytest.raises(ConfigError, match="expected add-on classes"):
        Trainer.add_on("StateManager")  # type: ignore[arg-type]


# ---------------------------------------------------------------------- reproducible


def test_one_seed_determines_everything(problem: Problem) -> None:
    drawn = []
    for _ in range(2):
        model = quiet(lambda: nn.Sequential(nn.Linear(6, 9), nn.Dropout(0.5), nn.Linear(9, 3)), seed=11)
        model.fit((problem.x, problem.y), max_length=Epochs(2))
        drawn.append((list(model.history.losses), random.random(), np.random.rand(), torch.rand(1).item()))
        torch.manual_seed(random.randrange(2**31))
    assert drawn[0] == drawn[1]


def test_the_data_order_depends_only_on_seed_and_epoch(problem: Problem) -> None:
    def orders(seed: int, noise: int) -> list[list[float]]:
        seen: list[list[float]] = [[], []]

        class Look(Callback):
            def on_step_start(self, context: TrainingContext, batch: Any) -> None:
                seen[context.progress.epoch] += batch[0][:, 0].tolist()
                torch.rand(noise)

        quiet(problem.model(), seed=seed, batch_size=8, callbacks=[Look]).fit(
            (problem.x, problem.y), max_length=Epochs(2)
        )
        return seen

    first = orders(1, 1)
    assert first == orders(1, 5)
    assert first[0] != first[1]
    assert first != orders(2, 1)
    assert sorted(first[0]) == sorted(first[1]) == sorted(problem.x[:, 0].tolist())


def test_seed_everything_seeds_the_three_generators() -> None:
    drawn = []
    for _ in range(2):
        seed_everything(2**40 + 3)
        drawn.append((random.random(), np.random.rand(), torch.rand(1).item()))
    assert drawn[0] == drawn[1]


# ---------------------------------------------------------------------- checkpoints


def full_trainer(problem: Problem, folder: Path, **options: Any) -> Trainer:
    """Shuffling, dropout, accumulation, a schedule, momentum, an average, early stopping: all that has a state."""
    options.setdefault("train_dataset", (problem.x, problem.y))
    return quiet(
        problem.model(dropout=0.4),
        optimizer=partial(torch.optim.Adam, lr=0.02),
        scheduler=partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.7),
        callbacks=[EMA(0.9), EarlyStopping("valid_loss", patience=2)],
        val_dataset=(problem.x[:30], problem.y[:30]),
        batch_size=7,
        drop_last=False,
        accumulation_steps=3,
        seed=5,
        checkpoint_dir=folder,
        **options,
    )


LOADERS: dict[str, Any] = {
    "tensors": lambda p: (p.x, p.y),
    "list": lambda p: p.batches,
    "torch, global generator": lambda p: torch_data.DataLoader(
        torch_data.TensorDataset(p.x, p.y), batch_size=8, shuffle=True
    ),
    "torch, own generator": lambda p: torch_data.DataLoader(
        torch_data.TensorDataset(p.x, p.y), batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(3)
    ),
    "ours, own generator": lambda p: DataLoader(
        torch_data.TensorDataset(p.x, p.y), batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(3)
    ),
}


class Fail(Callback):
    def __init__(self, at: int) -> None:
        self.at = at

    def on_step_end(self, context: TrainingContext, output: Any) -> None:
        if context.progress.batches == self.at:
            raise ZeroDivisionError


@pytest.mark.parametrize("loader", list(LOADERS))
@pytest.mark.parametrize("cut", [3, 14, 25, 43])
def test_a_resumed_run_equals_an_uninterrupted_one(problem: Problem, tmp_path: Path, cut: int, loader: str) -> None:
    whole = full_trainer(problem, tmp_path / "whole", train_dataset=LOADERS[loader](problem))
    whole.fit(max_length=Epochs(5), checkpoint_period=Batches(6))
    before = full_trainer(problem, tmp_path / "cut", train_dataset=LOADERS[loader](problem))
    before.context.callbacks.add(Fail(cut))
    with pytest.raises(ZeroDivisionError):
        before.fit(max_length=Epochs(5), checkpoint_period=Batches(6))
    seed_everything(999)
    after = full_trainer(problem, tmp_path / "cut", train_dataset=LOADERS[loader](problem))
    after.fit(max_length=Epochs(5), checkpoint_period=Batches(6), resume="auto")
    assert list(after.history.losses) == list(whole.history.losses)
    assert_same_weights(after.model, whole.model)
    assert after.context.progress == whole.context.progress
    assert after.history == whole.history
    files = [(tmp_path / folder / "ck_history.jsonl").read_bytes() for folder in ("whole", "cut")]
    assert files[0] == files[1]


def test_resuming_from_the_best_checkpoint_repeats_the_later_epochs(problem: Problem, tmp_path: Path) -> None:
    whole = full_trainer(problem, tmp_path)
    whole.fit(max_length=Epochs(4))
    other = full_trainer(problem, tmp_path / "other")
    other.fit(max_length=Epochs(4), resume=tmp_path / "best_ck")
    assert_same_weights(other.model, whole.model)
    assert other.history == whole.history


def test_resume_auto_without_a_checkpoint_starts_fresh(problem: Problem, tmp_path: Path) -> None:
    trainer = full_trainer(problem, tmp_path / "new")
    trainer.fit(max_length=Epochs(1), resume="auto")
    assert trainer.context.progress.epoch == 1


def test_resume_auto_needs_a_folder(problem: Problem) -> None:
    with pytest.raises(CheckpointError, match="give the trainer a checkpoint_dir"):
        quiet(problem.model()).fit(problem.batches, resume="auto")


def test_resuming_a_finished_run_does_nothing(problem: Problem, tmp_path: Path) -> None:
    full_trainer(problem, tmp_path).fit(max_length=Epochs(1))
    again = full_trainer(problem, tmp_path)
    again.fit(max_length=Epochs(1), resume="auto")
    assert again.context.progress.epoch == 1


def test_training_can_be_extended_on_resume(problem: Problem, tmp_path: Path) -> None:
    whole = full_trainer(problem, tmp_path / "whole")
    whole.fit(max_length=Epochs(4))
    full_trainer(problem, tmp_path / "cut").fit(max_length=Epochs(2))
    longer = full_trainer(problem, tmp_path / "cut")
    longer.fit(max_length=Epochs(4), resume="auto")
    assert_same_weights(longer.model, whole.model)


def test_only_the_last_k_periodic_checkpoints_are_kept(problem: Problem, tmp_path: Path) -> None:
    full_trainer(problem, tmp_path, keep_last=2).fit(max_length=Epochs(4))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "best_ck", "ck_epoch_3_iter_42", "ck_epoch_4_iter_56", "ck_history.jsonl", "ck_run.jsonl",
    ]  # fmt: skip


def test_a_checkpoint_with_another_number_of_optimizers_is_rejected(problem: Problem, tmp_path: Path) -> None:
    model = problem.model()
    two = [torch.optim.SGD(model[0].parameters(), lr=0.1), torch.optim.SGD(model[3].parameters(), lr=0.1)]
    trainer = quiet(model, optimizer=two)
    trainer.fit(problem.batches, max_length=Epochs(1))
    trainer.save_checkpoint(tmp_path / "two")
    with pytest.raises(CheckpointError, match="its optimizers are SGD, SGD, the trainer's are Adam"):
        quiet(problem.model()).load_checkpoint(tmp_path / "two")


def test_a_checkpoint_of_an_untrained_trainer_can_be_loaded(problem: Problem, tmp_path: Path) -> None:
    first = quiet(problem.model(), seed=1, lr_scheduler=partial(torch.optim.lr_scheduler.StepLR, step_size=1))
    first.save_checkpoint(tmp_path / "begun")
    second = quiet(problem.model(seed=8), seed=2, lr_scheduler=partial(torch.optim.lr_scheduler.StepLR, step_size=1))
    second.fit(problem.batches, max_length=Epochs(1))
    second.load_checkpoint(tmp_path / "begun")
    for trainer in (first, second):
        trainer.fit(problem.batches, max_length=Epochs(2))
    assert_same_weights(first.model, second.model)
    assert first.history.losses == second.history.losses


def test_weights_of_another_model_are_rejected_with_the_first_difference(problem: Problem, tmp_path: Path) -> None:
    quiet(nn.Linear(2, 2)).save_model(tmp_path / "weights.safetensors")
    with pytest.raises(CheckpointError, match=r"do not fit the model: 'weight' has shape \(2, 2\) in it and \(3, 2\)"):
        quiet(nn.Linear(2, 3)).load_model(tmp_path / "weights.safetensors")
    with pytest.raises(CheckpointError, match="do not fit the model: it has 'weight', which the model lacks"):
        quiet(nn.Sequential(nn.Linear(2, 2))).load_model(tmp_path / "weights.safetensors")
    with pytest.raises(CheckpointError, match="do not fit the model: 'weight' has shape"):
        quiet(nn.Bilinear(2, 2, 3)).load_model(tmp_path / "weights.safetensors", strict=False)


@pytest.mark.parametrize("name", ["weights.safetensors", "weights.pt", "weights.ckpt", "weights.bin", "weights"])
def test_saved_weights_can_be_loaded_from_a_file(problem: Problem, tmp_path: Path, name: str) -> None:
    trainer, other = quiet(problem.model()), quiet(problem.model(seed=8))
    trainer.save_model(tmp_path / name)
    before = weights(trainer.model)
    other.load_model(tmp_path / name)
    assert all(torch.equal(value, before[key]) for key, value in other.model.state_dict().items())


def test_weights_are_not_written_with_the_suffix_of_another_format(problem: Problem, tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match=r"call export\(path\) of a trainer"):
        quiet(problem.model()).save_model(tmp_path / "weights.onnx")
    assert not list(tmp_path.iterdir())


def test_a_reset_trainer_starts_from_the_beginning(problem: Problem) -> None:
    trainer = quiet(problem.model(), optimizer=partial(torch.optim.Adam, lr=0.1))
    trainer.fit(problem.batches, max_length=Epochs(1))
    reset(trainer)
    assert trainer.context.progress.batches == 0
    assert len(trainer.history.rows) == 0
    assert trainer.optimizer.state == {}


def test_a_reset_trainer_clears_the_state_of_a_given_optimizer(problem: Problem) -> None:
    model = problem.model()
    trainer = quiet(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    trainer.fit(problem.batches, max_length=Epochs(1))
    reset(trainer)
    assert trainer.optimizer.state == {}
