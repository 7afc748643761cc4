from __future__ import annotations

import copy
import random
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.data as torch_data
from problem import Problem, assert_same_weights

from dovetail import Epochs, Trainer
from dovetail.compat import plato
from dovetail.errors import ConfigError, UnknownNameError
from dovetail.trainers.context import TrainingContext
from dovetail.trainers.lr_finder import LogFinder, LRFinder, find_learning_rate
from dovetail.trainers.strategies import ModelUpdateStrategy


def trainer_of(problem: Problem, **options: Any) -> Trainer:
    return Trainer(
        problem.model(dropout=0.2),
        optimizer=partial(torch.optim.SGD, lr=0.03, momentum=0.9),
        train_dataset=(problem.x, problem.y),
        batch_size=4,
        verbose=False,
        **options,
    )


def test_the_lr_finder_restores_the_trainer(problem: Problem) -> None:
    trainer = trainer_of(problem, seed=3)
    trainer.fit(max_length=Epochs(1))
    before = copy.deepcopy(trainer.state_dict())
    mode = trainer.model[2].eval().training
    LRFinder(trainer, lr_min=1e-4, lr_max=10, num_epochs=2).find()
    after = trainer.state_dict()
    assert all(torch.equal(after["model"][name], value) for name, value in before["model"].items())
    assert after["optimizers"][0]["param_groups"] == before["optimizers"][0]["param_groups"]
    for key, state in before["optimizers"][0]["state"].items():
        assert torch.equal(after["optimizers"][0]["state"][key]["momentum_buffer"], state["momentum_buffer"])
    assert torch.equal(after["rng"]["torch"], before["rng"]["torch"])
    assert random.getstate() == before["rng"]["python"]
    for name in ("progress", "history", "callbacks", "schedulers", "meter"):
        assert after[name] == before[name]
    assert trainer.model[2].training is mode


@pytest.mark.parametrize("own_generator", [True, False])
def test_training_after_an_lr_sweep_equals_training_without_it(problem: Problem, own_generator: bool) -> None:
    def loader() -> torch_data.DataLoader[Any]:
        generator = torch.Generator().manual_seed(1) if own_generator else None
        dataset = torch_data.TensorDataset(problem.x, problem.y)
        return torch_data.DataLoader(dataset, batch_size=4, shuffle=True, generator=generator)

    swept, plain = trainer_of(problem), trainer_of(problem)
    for trainer in (swept, plain):
        trainer.options.train_dataset = loader()
        torch.manual_seed(8)
        if trainer is swept:
            LRFinder(trainer, lr_max=10).find()
        trainer.fit(max_length=Epochs(2))
    assert_same_weights(swept.model, plain.model)


def test_the_suggested_rate_trains_better_than_far_smaller_or_larger_ones(problem: Problem) -> None:
    def loss_with(rate: float) -> float:
        trainer = Trainer(
            problem.model(), optimizer=partial(torch.optim.SGD, lr=rate), batch_size=8, seed=0, verbose=False,
            nonfinite="ignore",
        )  # fmt: skip
        return trainer.fit((problem.x, problem.y), max_length=Epochs(5)).get_latest_metric("train_loss")

    trainer = Trainer(problem.model(), optim_function="SGD", momentum=0.0, batch_size=4, seed=0, verbose=False)
    finder = LRFinder(trainer, lr_min=1e-5, lr_max=100.0, num_epochs=4)
    low, high = finder.find((problem.x, problem.y))
    assert low < finder.suggestion == high
    assert loss_with(finder.suggestion) < loss_with(finder.suggestion / 100)
    assert loss_with(finder.suggestion) < loss_with(finder.suggestion * 1000)


def test_the_lr_sweep_is_geometric_and_stops_when_the_loss_explodes(problem: Problem) -> None:
    finder = LRFinder(trainer_of(problem, seed=0), lr_min=1e-3, lr_max=1e6, num_epochs=2, beta=0.5)
    finder.find()
    ratios = [after / before for before, after in zip(finder.rates, finder.rates[1:], strict=False)]
    assert ratios == pytest.approx([1e9 ** (1 / 47)] * len(ratios))
    assert len(finder.rates) < 48
    assert len(finder.rates) == len(finder.losses)


@pytest.mark.parametrize("method", ["sobel", "laplace", "min_loss", "max_range"])
def test_every_suggestion_method_chooses_a_rate_of_the_sweep(problem: Problem, method: Any) -> None:
    finder = LRFinder(trainer_of(problem, seed=0), lr_min=1e-4, lr_max=10, num_epochs=2, lr_select_method=method)
    low, high = finder.find()
    assert 1e-4 <= low < high <= 10
    assert finder.suggestion in finder.rates


def test_max_batches_limits_the_lr_sweep(problem: Problem) -> None:
    finder = LogFinder(trainer_of(problem, seed=0), max_batches=10, lr_max=0.1)
    finder.find()
    assert len(finder.rates) == 10
    assert finder.rates[-1] == pytest.approx(0.1)


def test_the_lr_finder_writes_no_checkpoint(problem: Problem, tmp_path: Path) -> None:
    trainer = trainer_of(problem, seed=0, checkpoint_dir=tmp_path / "ck", save_every=1)
    LRFinder(trainer).find()
    assert not (tmp_path / "ck").exists()


def test_the_lr_finder_draws_its_curve(problem: Problem, tmp_path: Path) -> None:
    finder = LRFinder(trainer_of(problem, seed=0))
    finder.find()
    path = finder.plot(tmp_path / "deep" / "curve.png")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_the_lr_sweep_calls_the_hooks_of_strategies_and_of_the_class(problem: Problem) -> None:
    received: list[str] = []

    class Note(ModelUpdateStrategy):
        def on_train_start(self, context: TrainingContext) -> None:
            received.append("strategy")

    class Own(plato.Trainer):
        def train_run_start(self, config: Mapping[str, Any]) -> None:
            received.append("class")

    LRFinder(Own(problem.model(), "cpu", model_update_strategy=Note(), verbose=False)).find(problem.batches)
    assert sorted(received) == ["class", "strategy"]


def test_the_lr_finder_rejects_invalid_arguments_by_name(problem: Problem) -> None:
    trainer = trainer_of(problem)
    with pytest.raises(ConfigError, match="0 < lr_min < lr_max"):
        LRFinder(trainer, lr_min=1.0, lr_max=0.1)
    with pytest.raises(UnknownNameError, match="did you mean 'sobel'"):
        LRFinder(trainer, lr_select_method="sobl")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"call find\(\) first"):
        _ = LRFinder(trainer).suggestion


def test_one_call_finds_the_rate_of_the_class_and_changes_no_bit(problem: Problem, tmp_path: Path) -> None:
    trainer, untouched = trainer_of(problem, seed=3), trainer_of(problem, seed=3)
    rate = find_learning_rate(trainer, num_epochs=4, plot=tmp_path / "plots" / "sweep.png")
    finder = LRFinder(trainer_of(problem, seed=3), lr_max=10.0, num_epochs=4)
    finder.find()
    assert rate == float(f"{finder.suggestion:.3g}")
    assert (tmp_path / "plots" / "sweep.png").stat().st_size > 0
    for each in (trainer, untouched):
        each.fit(max_length=Epochs(1))
    assert trainer.history == untouched.history
    assert_same_weights(trainer.model, untouched.model)


def test_a_short_epoch_is_repeated_until_the_sweep_has_enough_rates(problem: Problem) -> None:
    # Ten batches in an epoch.
    trainer = trainer_of(problem, seed=3)
    data = problem.x[:40], problem.y[:40]
    assert find_learning_rate(trainer, data, explode_thresh=1e9) == find_learning_rate(
        trainer, data, explode_thresh=1e9, num_epochs=10
    )


def test_a_finder_is_shown_as_a_line_and_as_a_plot(problem: Problem) -> None:
    finder = LRFinder(trainer_of(problem, seed=3), lr_max=10.0, num_epochs=4)
    assert repr(finder) == "LRFinder(no sweep yet)"
    assert finder._repr_png_() is None
    finder.find()
    assert f"{len(finder.rates)} batches: suggestion {finder.suggestion:.3g}, the loss falls from" in repr(finder)
    plot = finder._repr_png_()
    assert plot is not None
    assert plot.startswith(b"\x89PNG")
