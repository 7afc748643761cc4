"""Options that are read and assigned on a trainer's `options`, and the public names of a trainer."""

from __future__ import annotations

import copy
import gc
import pickle
import re
import weakref
from collections.abc import Iterable
from dataclasses import FrozenInstanceError, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from problem import Problem, assert_same_weights, weights
from torch import nn

from dovetail import Batches, Epochs, Trainer
from dovetail import checkpoint as store
from dovetail.callbacks import Callback, ProgressDisplay
from dovetail.compat import lernomatic, plato, zae_engine
from dovetail.errors import ConfigError, NonFiniteLossError, UnknownNameError
from dovetail.trainers import AMPTrainer, CompiledTrainer, TrainerDecorator, TrainerOptions, other_libraries
from dovetail.trainers.composable import ComposableTrainer
from dovetail.trainers.context import TrainingContext
from dovetail.trainers.options import OPTION_NAMES
from dovetail.trainers.reuse import fit_new_run
from dovetail.trainers.schedules import TriangularMtm
from dovetail.trainers.strategies import GradientAccumulationStepStrategy, SGDOptimizerStrategy

# Another value than the default for each option whose effect on a run can be seen.
OTHER: dict[str, Any] = {
    "num_epochs": 1,
    "learning_rate": 0.5,
    "momentum": 0.1,
    "weight_decay": 0.25,
    "loss_function": nn.CrossEntropyLoss(label_smoothing=0.5),
    "optim_function": "Adam",
    "lr_scheduler": partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5),
    "mtm_scheduler": TriangularMtm(mtm_min=0.1, mtm_max=0.3, stepsize=6),
    "gradient_clip": 0.01,
    "accumulation_steps": 3,
    "seed": 7,
    "batch_size": 16,
    "val_batch_size": 5,
    "shuffle": False,
    "drop_last": False,
    "verbose": True,
    "nonfinite": "ignore",
    "stop_when_acc": 0.01,
    "early_stop": {"num_epochs": 1, "improv": 1.0},
    "checkpoint_dir": "other",
    "checkpoint_name": "own",
    "save_every": 5,
    "save_best": True,
    "save_hist": False,
    "keep_last": 1,
    "keep_best": 1,
    "keep_every": 24,
    "best_metric": "valid_loss",
    "best_mode": "min",
    "save_in_background": True,
}


def make(problem: Problem, **options: Any) -> Trainer:
    settings: dict[str, Any] = {"num_epochs": 3, "batch_size": 10, "learning_rate": 0.1, "seed": 0, "verbose": False}
    data = {"train_dataset": (problem.x, problem.y), "val_dataset": (problem.x[:12], problem.y[:12])}
    return Trainer(problem.model(), "cpu", **{**settings, "optim_function": "SGD", **data, **options})


def rate(trainer: Trainer) -> float:
    return float(trainer.optimizer.param_groups[0]["lr"])


def evidence(trainer: Trainer, folder: Path) -> dict[str, Any]:
    """All that a run leaves behind."""
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_dir() or "hist" in path.name}
    best = next(iter(folder.rglob("best_*")), None)
    return {
        "weights": {name: value.tolist() for name, value in weights(trainer.model).items()},
        "losses": trainer.history.losses.tolist(),
        "sizes": [len(batch[0]) for batch in trainer.batches("valid")],
        "files": files,
        "best": None if best is None else store.inspect(best).summary["epoch"],
        "callbacks": [type(it).__name__ for it in trainer.context.callbacks],
    }


def run(problem: Problem, folder: Path, given: dict[str, Any], assigned: dict[str, Any]) -> dict[str, Any]:
    folder.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        trainer = make(problem, **given)
        for key, value in assigned.items():
            setattr(trainer.options, key, value)
            assert getattr(trainer.options, key) == value
        trainer.train()
        return evidence(trainer, folder)


@pytest.fixture(scope="module")
def usual(problem: Problem, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run(problem, tmp_path_factory.mktemp("usual") / "run", {}, {})


@pytest.mark.parametrize("name", OTHER)
def test_an_assigned_option_equals_a_constructor_option(
    problem: Problem, tmp_path: Path, usual: dict[str, Any], name: str
) -> None:
    option = {name: OTHER[name]}
    beside = {"best_mode": {"best_metric": "valid_accuracy"}, "save_best": {"save_every": 0}}.get(name, {})
    found = run(problem, tmp_path / "assigned", beside, option)
    assert found == run(problem, tmp_path / "given", {**beside, **option}, {})
    assert found != (run(problem, tmp_path / "without", beside, {}) if beside else usual)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("save_every", -2, "save_every: expected a whole number that is at least -1, got -2"),
        ("num_epochs", 1.5, "num_epochs: expected a whole number that is at least 0, got 1.5"),
        ("nonfinite", "explode", "nonfinite: expected 'raise', 'stop', 'warn' or 'ignore', got 'explode'"),
        ("learning_rate", "fast", "learning_rate: expected a number that is at least 0.0, got 'fast'"),
        ("max_concurrency", 0, "max_concurrency: expected None or a whole number that is at least 1, got 0"),
        ("device_id", 5, "device: 'cuda:5' is not available here"),
    ],
)
def test_an_invalid_value_is_rejected_and_changes_nothing(
    problem: Problem, name: str, value: Any, message: str
) -> None:
    trainer = make(problem)
    before = getattr(trainer.options, name)
    with pytest.raises(ConfigError, match=message):
        setattr(trainer.options, name, value)
    assert getattr(trainer.options, name) == before
    with pytest.raises(UnknownNameError, match="did you mean 'save_every'"):
        trainer.options.save_evry = 1


def test_assigned_checkpoint_options_take_effect_between_runs(problem: Problem, tmp_path: Path) -> None:
    def names() -> list[str]:
        return sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.glob("*/*"))

    trainer = make(problem, checkpoint_dir=tmp_path / "a")
    trainer.fit(max_length=Epochs(1))
    assert names() == ["a/best_ck", "a/ck_epoch_1_iter_9", "a/ck_history.jsonl", "a/ck_run.jsonl"]
    trainer.options.save_every = 0
    trainer.fit(max_length=Epochs(2))
    assert names() == ["a/best_ck", "a/ck_epoch_1_iter_9", "a/ck_history.jsonl", "a/ck_run.jsonl"]
    options = trainer.options
    options.checkpoint_dir, options.save_every, options.save_hist = tmp_path / "b", -1, False
    trainer.fit(max_length=Epochs(3))
    assert names()[4:] == ["b/best_ck", "b/ck_epoch_3_iter_27"]


@pytest.mark.parametrize("resumes", [False, True])
def test_values_of_two_metrics_are_not_compared_for_the_best(problem: Problem, tmp_path: Path, resumes: bool) -> None:
    trainer = make(problem, checkpoint_dir=tmp_path, best_metric="valid_accuracy")
    trainer.fit(max_length=Epochs(1))
    assert trainer.context.run.saver.best == max(trainer.history.get_metric_values("valid_accuracy"))
    if resumes:
        trainer = make(problem, checkpoint_dir=tmp_path)
    trainer.options.best_metric, trainer.options.best_mode = "valid_loss", "max"
    trainer.fit(max_length=Epochs(3), resume="auto" if resumes else None)
    assert trainer.context.run.saver.best == max(trainer.history.get_metric_values("valid_loss")[1:])


def test_assigning_another_option_keeps_the_best_metric(problem: Problem, tmp_path: Path) -> None:
    trainer = make(problem, checkpoint_dir=tmp_path)
    trainer.fit(max_length=Epochs(1))
    best = trainer.context.run.saver.best
    trainer.options.keep_last = 1
    assert trainer.context.run.saver.best == best is not None


@pytest.mark.parametrize("wrapped", [False, True])
def test_assignments_reach_the_inner_trainer_through_decorators(
    problem: Problem, tmp_path: Path, wrapped: bool
) -> None:
    inner = make(problem)
    trainer: Any = AMPTrainer(inner, precision="fp32") if wrapped else inner
    trainer.options.checkpoint_dir, trainer.options.num_epochs = tmp_path, 1
    trainer.fit()
    assert (tmp_path / "best_ck").is_dir()
    assert inner.options is trainer.options
    assert inner.options.checkpoint_dir == tmp_path


def test_a_running_trainer_accepts_only_options_that_can_take_effect(problem: Problem) -> None:
    class Assigns(Callback):
        def on_step_end(self, context: TrainingContext, output: Any) -> None:
            options = trainer.options
            options.learning_rate, options.gradient_clip, options.batch_size = 0.25, 1.0, 12
            for name, value in (("checkpoint_dir", "x"), ("num_epochs", 9), ("shuffle", False), ("print_every", 1)):
                with pytest.raises(ConfigError, match=f"{name}: the trainer is running; assign this option before or"):
                    setattr(options, name, value)

    trainer = make(problem, callbacks=[Assigns()])
    trainer.fit(max_length=Batches(1))
    options = trainer.options
    assert (options.learning_rate, options.gradient_clip, options.num_epochs) == (0.25, 1.0, 3)
    assert rate(trainer) == 0.25


def test_the_data_order_cannot_be_changed_within_an_epoch(problem: Problem) -> None:
    trainer = make(problem)
    trainer.fit(max_length=Batches(2))
    for name, value in (("seed", 5), ("shuffle", False), ("batch_size", 4), ("drop_last", False)):
        with pytest.raises(ConfigError, match=f"{name}: the trainer has read 2 batches of an epoch"):
            setattr(trainer.options, name, value)


def test_assigned_rates_reach_optimizers_that_are_built_later(problem: Problem) -> None:
    trainer = make(
        problem, optim_function=partial(torch.optim.SGD, lr=0.1, momentum=0.9), lr_scheduler=OTHER["lr_scheduler"]
    )
    options = trainer.options
    options.learning_rate, options.momentum, options.weight_decay = 0.2, 0.5, 0.125
    fit_new_run(trainer, (problem.x, problem.y), config={"epochs": 1})
    (group,) = trainer.optimizer.param_groups
    assert (group["lr"], group["momentum"], group["weight_decay"]) == (0.1, 0.5, 0.125)
    fit_new_run(trainer, (problem.x, problem.y), config={"epochs": 1, "lr": 0.4})
    assert rate(trainer) == 0.2


def test_a_new_schedule_keeps_the_state_of_the_optimizer(problem: Problem) -> None:
    trainer = make(problem, optim_function="Adam")
    trainer.fit(max_length=Epochs(1))
    optimizer = trainer.optimizer
    trainer.options.lr_scheduler = OTHER["lr_scheduler"]
    trainer.fit(max_length=Epochs(2))
    assert trainer.optimizer is optimizer
    assert rate(trainer) == 0.05
    trainer.options.lr_scheduler = None
    trainer.fit(max_length=Epochs(3))
    assert rate(trainer) == 0.05


def test_an_option_decided_by_a_strategy_cannot_be_assigned(problem: Problem) -> None:
    trainer = ComposableTrainer(
        problem.model(),
        optimizer_strategy=SGDOptimizerStrategy(lr=0.1),
        training_step_strategy=GradientAccumulationStepStrategy(4),
        verbose=False,
    )
    for name, value in (("optim_function", "Adam"), ("accumulation_steps", 2), ("shuffle", False)):
        with pytest.raises(ConfigError, match=f"{name}: .* decides this; give one or the other"):
            setattr(trainer.options, name, value)
    assert trainer.options.shuffle is True


def test_an_assigned_progress_display_is_used_from_the_next_run(problem: Problem) -> None:
    trainer = make(problem)
    for verbose, log_bar in ((True, True), (True, False), (False, True), (True, True)):
        trainer.options.verbose, trainer.options.log_bar = verbose, log_bar
        shown = [it for it in trainer.context.callbacks if isinstance(it, ProgressDisplay)]
        assert len(shown) == (verbose and log_bar)
    trainer.context.callbacks.remove(*shown)
    trainer.options.nonfinite = "warn"
    assert not any(isinstance(it, ProgressDisplay) for it in trainer.context.callbacks)


def test_a_loss_of_nan_follows_the_assigned_option(problem: Problem) -> None:
    def step(trainer: Any, batch: Any) -> dict[str, Any]:
        return {"loss": trainer.model(batch[0]).sum() * float("nan")}

    trainer = make(problem, train_step=step, val_dataset=None, nonfinite="ignore")
    trainer.fit(max_length=Epochs(1))
    trainer.options.nonfinite = "raise"
    with pytest.raises(NonFiniteLossError):
        trainer.fit(max_length=Epochs(2))


def test_an_attribute_one_letter_off_an_option_is_reported(problem: Problem) -> None:
    trainer: Any = make(problem)
    trainer.checkpont_dir = "x"
    trainer.mine = "y"
    with pytest.warns(UserWarning, match="'checkpont_dir' is not an option .* did you mean 'checkpoint_dir'") as caught:
        trainer.fit(max_length=Epochs(1))
    assert len(caught) == 1


def test_an_lbfgs_with_accumulation_is_rejected_in_every_run(problem: Problem) -> None:
    trainer = make(problem, optim_function=partial(torch.optim.LBFGS, lr=0.1), accumulation_steps=2)
    for _ in range(2):
        with pytest.raises(ConfigError, match="cannot accumulate gradients"):
            trainer.fit(max_length=Epochs(1))
    trainer.options.accumulation_steps = 1
    trainer.fit(max_length=Epochs(1))


@pytest.mark.parametrize(("name", "value"), [("weight_decay", 0.5), ("gradient_clip", 0.01), ("momentum", 0.9)])
def test_a_compiled_step_follows_assignments(problem: Problem, name: str, value: Any) -> None:
    compiled, eager = make(problem), make(problem)
    for trainer in (CompiledTrainer(compiled, backend="eager"), eager):
        trainer.fit(max_length=Epochs(1))
        setattr(trainer.options, name, value)
        trainer.fit(max_length=Epochs(2))
    for (key, ours), theirs in zip(compiled.model.state_dict().items(), eager.model.state_dict().values(), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-6), key
    fresh = make(problem)
    fresh.fit(max_length=Epochs(2))
    with pytest.raises(AssertionError):
        assert_same_weights(fresh.model, eager.model)


# ------------------------------------------------------------------ the object


def test_options_compare_by_value_and_belong_to_their_trainer(problem: Problem) -> None:
    trainer = make(problem, train_dataset=None, val_dataset=None)
    alone = TrainerOptions(**{name: getattr(trainer.options, name) for name in OPTION_NAMES})
    assert trainer.options == alone
    assert repr(trainer.options) == repr(alone)
    trainer.options.batch_size = 12
    assert trainer.options != alone
    assert replace(trainer.options, batch_size=10) == alone
    for constant in (alone, copy.copy(trainer.options), pickle.loads(pickle.dumps(trainer.options))):
        with pytest.raises(FrozenInstanceError, match="batch_size: these options belong to no trainer"):
            constant.batch_size = 3
    assert trainer.options.batch_size == 12


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_copied_trainer_has_separate_options(problem: Problem, copied: Any, wrapped: bool) -> None:
    trainer: Any = make(problem)
    made = (
        copied(AMPTrainer(trainer, precision="fp32")).trainer
        if wrapped and copied is not copy.copy
        else copied(trainer)
    )
    made.options.batch_size = 16
    assert (trainer.options.batch_size, made.options.batch_size) == (10, 16)
    assert (trainer.context is made.context) == (copied is copy.copy)
    assert made.context.config["batch_size"] == 16


@pytest.mark.parametrize("wrapped", [False, True])
def test_the_options_object_cannot_be_replaced(problem: Problem, wrapped: bool) -> None:
    trainer: Any = AMPTrainer(make(problem)) if wrapped else make(problem)
    with pytest.raises(AttributeError, match="options: assign them one by one"):
        trainer.options = replace(trainer.options, batch_size=3)
    assert trainer.options.batch_size == 10


def test_options_do_not_keep_a_trainer_alive(problem: Problem) -> None:
    trainer = make(problem)
    options, reference = trainer.options, weakref.ref(trainer)
    del trainer
    gc.collect()
    assert reference() is None
    with pytest.raises(FrozenInstanceError, match="belong to no trainer"):
        options.batch_size = 3
    assert options.batch_size == 10


def test_a_dry_run_does_not_change_options(problem: Problem) -> None:
    class Assigns(Trainer):
        def train_step(self, batch: Any) -> Any:
            self.options.gradient_clip = 5.0
            return super().train_step(batch)

    trainer = Assigns(problem.model(), verbose=False, nonfinite="ignore")
    trainer.fit(problem.batches, problem.batches, dry_run=True)
    assert trainer.options.gradient_clip == 0.0


# ------------------------------------------------------------------ no attributes


@pytest.mark.parametrize("name", sorted(OPTION_NAMES))
@pytest.mark.parametrize("wrapped", [False, True])
def test_an_option_cannot_be_read_as_a_trainer_attribute(problem: Problem, name: str, wrapped: bool) -> None:
    trainer: Any = AMPTrainer(make(problem)) if wrapped else make(problem)
    expected = f"{name}: this is an option, not an attribute of the trainer; write trainer.options.{name}"
    with pytest.raises(AttributeError, match=expected):
        setattr(trainer, name, 1)
    with pytest.raises(AttributeError, match=expected):
        getattr(trainer, name)
    assert not hasattr(trainer, name)


@pytest.mark.parametrize("base", [Trainer, ComposableTrainer, AMPTrainer])
def test_a_subclass_may_not_assign_an_option_before_the_constructor(problem: Problem, base: type[Any]) -> None:
    class Early(base):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.seed = 3
            super().__init__(*args, **kwargs)

    with pytest.raises(AttributeError, match=r"seed: .* pass it as a keyword to super\(\).__init__\(\)"):
        Early(make(problem) if base is AMPTrainer else problem.model())


@pytest.mark.parametrize("base", [Trainer, lernomatic.Trainer])
def test_a_class_body_may_not_set_an_option(base: type[Any]) -> None:
    with pytest.raises(ConfigError, match=r"Wide.batch_size: this is an option; pass it as a keyword"):
        type("Wide", (base,), {"batch_size": 512, "__module__": "mine"})


def test_a_layer_may_declare_an_attribute_with_the_name_of_an_option(problem: Problem) -> None:
    class Seeded(TrainerDecorator):
        seed: int

        def __init__(self, trainer: Trainer, seed: int) -> None:
            super().__init__(trainer)
            self.seed = seed

    trainer = Seeded(make(problem), 5)
    assert (trainer.seed, trainer.options.seed) == (5, 0)


# ------------------------------------------------------------------ public names


def public(names: Iterable[str]) -> set[str]:
    return {name for name in names if not name.startswith("_")}


def test_the_main_class_has_at_most_45_public_names() -> None:
    names = public(dir(Trainer))
    assert len(names) <= 45, sorted(names)
    assert public(vars(Trainer(nn.Linear(2, 2)))) - names == {"context", "criterion", "options", "strategies"}


def test_the_callbacks_of_a_trainer_are_in_its_context(problem: Problem) -> None:
    trainer = make(problem)
    for layer in (trainer, AMPTrainer(trainer)):
        with pytest.raises(AttributeError, match=r"no attribute 'callbacks': write trainer\.context\.callbacks$"):
            _ = layer.callbacks
        with pytest.raises(AttributeError, match="callbacks"):
            layer.callbacks = []


@pytest.mark.parametrize(
    ("kind", "library"),
    [
        (lernomatic.Trainer, "lernomatic"),
        (zae_engine.Trainer, "zae_engine"),
        (plato.Trainer, "plato"),
        (ComposableTrainer, "plato"),
    ],
)
def test_the_error_for_a_name_of_another_library_gives_our_name(kind: type[Any], library: str) -> None:
    trainer = Trainer(nn.Linear(2, 2))
    own = public(dir(kind)) - public(dir(trainer)) - OPTION_NAMES
    assert own
    for name in own:
        with pytest.raises(AttributeError, match=f"no attribute {name!r}: (it is a name of dovetail.compat|write)"):
            getattr(trainer, name)
    assert {name for name, answer in other_libraries.ATTRIBUTES.items() if f"compat.{library}." in answer} <= {
        *public(dir(kind)),
        *public(dir(ComposableTrainer)),
    }


@pytest.mark.parametrize("name", sorted(other_libraries.HOOKS))
def test_a_hook_that_only_another_class_calls_is_rejected(name: str) -> None:
    message = f"Mine.{name}: it is never called here: {other_libraries.HOOKS[name]}"
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        type("Mine", (Trainer,), {name: lambda self, *args: None, "__module__": "mine"})


def test_an_error_inside_a_property_is_not_hidden(problem: Problem) -> None:
    class Fails(Trainer):
        def get_optimizer(self, model: Any) -> Any:
            return model.no_such_layer

    trainer = Fails(problem.model(), verbose=False)
    for layer in (trainer, AMPTrainer(trainer)):
        with pytest.raises(AttributeError, match="no_such_layer"):
            _ = layer.optimizer
