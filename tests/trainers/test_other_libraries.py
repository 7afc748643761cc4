"""Error messages for names and habits of other libraries."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from dovetail.errors import CheckpointError, ConfigError, DataError, UnknownNameError
from dovetail.trainers import Trainer, other_libraries
from dovetail.trainers.catalog import losses
from dovetail.trainers.composable import ComposableTrainer
from dovetail.trainers.options import TrainerOptions
from dovetail.trainers.precision import Precision
from dovetail.trainers.reuse import equip
from dovetail.trainers.single_process import SingleProcessTrainer
from dovetail.trainers.strategies import (
    GradientAccumulationStepStrategy,
    GradientClippingStepStrategy,
    MultipleForwardPassStepStrategy,
    StepLRSchedulerStrategy,
)
from dovetail.trainers.strategies.adapters import as_criterion
from dovetail.units import Epochs

X = torch.linspace(-1, 1, 64 * 4).reshape(64, 4)
Y = (X.sum(1) > 0).long()
quiet = partial(Trainer, verbose=False)
fit_once = {"max_length": Epochs(1)}


# ------------------------------------------------------------------ words


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("lr", "did you mean 'learning_rate'?"),
        ("loss", "did you mean 'criterion'?"),
        ("max_grad_norm", "did you mean 'gradient_clip'?"),
        ("pin_memory", "give fit a DataLoader that has it"),
        ("precision", "wrap the trainer, AMPTrainer("),
        ("check_val_every_n_epoch", "give fit a period, validation_period=Epochs(n)"),
        ("warmup_steps", "did you mean 'warmup'?"),
    ],
)
def test_a_keyword_of_another_library_suggests_ours(name: str, answer: str) -> None:
    with pytest.raises(UnknownNameError) as caught:
        Trainer(nn.Linear(4, 2), **{name: 1})
    assert answer in str(caught.value)


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("epochs", "max_length=Epochs(…)"),
        ("validation_data", "did you mean 'val_data'?"),
        ("ckpt_path", "did you mean 'resume'?"),
        ("y", "give a pair, fit((x, y))"),
        ("limit_train_batches", "it is an option of the trainer, Trainer(…, limit_train_batches=…)"),
        ("max_lenght", "did you mean 'max_length'?"),
    ],
)
def test_an_unknown_keyword_of_fit_suggests_ours(name: str, answer: str) -> None:
    with pytest.raises(UnknownNameError) as caught:
        quiet(nn.Linear(4, 2)).fit((X, Y), **{name: 1})  # type: ignore[arg-type]  # nothing may be given so
    assert answer in str(caught.value)


def test_a_method_of_a_lightning_module_is_answered() -> None:
    with pytest.raises(ConfigError, match=r"Mine.training_step: it is never called here: override train_step"):
        type("Mine", (Trainer,), {"__module__": "mine", "training_step": lambda self, batch, index: None})
    with pytest.raises(AttributeError, match=r"write self.context.backward\(loss\)"):
        quiet(nn.Linear(4, 2)).manual_backward(0)


def test_the_names_of_other_libraries_do_not_collide_with_ours() -> None:
    ours = {*TrainerOptions.__dataclass_fields__, *SingleProcessTrainer.__init__.__annotations__}
    assert not ours & other_libraries.OPTIONS.keys()
    assert not set(losses.names()) & other_libraries.LOSSES.keys()
    assert set(other_libraries.LOSSES.values()) <= set(losses.names())
    assert {it for it in other_libraries.OPTIONS.values() if " " not in it} <= ours


def test_a_keras_loss_name_suggests_the_torch_loss() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'CrossEntropyLoss'"):
        as_criterion("sparse_categorical_crossentropy")


def test_a_lightning_precision_suggests_ours() -> None:
    with pytest.raises(ConfigError, match="got 'bf16-mixed'; did you mean 'bf16'"):
        Precision("bf16-mixed")  # type: ignore[arg-type]  # a user's mistake


def test_a_lightning_interval_suggests_ours() -> None:
    with pytest.raises(ConfigError, match="got 'step'; did you mean 'update'"):
        StepLRSchedulerStrategy(interval="step")  # type: ignore[arg-type]  # a user's mistake


def test_resume_last_suggests_auto(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="resume='auto' continues from the newest one"):
        quiet(nn.Linear(4, 2)).fit((X, Y), resume="last")


def test_a_checkpoint_may_be_named_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    trainer = quiet(nn.Linear(4, 2))
    trainer.fit((X, Y), **fit_once)
    trainer.save_checkpoint("last")
    other = quiet(nn.Linear(4, 2))
    other.fit((X, Y), resume="last", max_length=Epochs(2))
    assert other.context.progress.epoch == 2


# ------------------------------------------------------------------ data


@pytest.mark.parametrize("targets", [Y, Y.numpy()])
def test_fit_with_inputs_and_targets_as_two_arguments_suggests_a_pair(targets: Any) -> None:
    with pytest.raises(DataError, match=r"give inputs and targets as a pair, fit\(\(x, y\)\)"):
        quiet(nn.Linear(4, 2)).fit(X, targets)


def test_evaluate_with_inputs_and_targets_as_two_arguments_suggests_a_pair() -> None:
    with pytest.raises(ConfigError, match=r"are a pair, evaluate\(\(x, y\)\)"):
        quiet(nn.Linear(4, 2)).evaluate(X, Y)  # type: ignore[arg-type]  # a user's mistake


def test_a_custom_step_may_have_one_target_for_a_batch() -> None:
    def step(trainer: Any, batch: Any) -> dict[str, Tensor]:
        inputs, scale = batch
        return {"loss": trainer.model(inputs).square().mean() * scale}

    history = quiet(nn.Linear(4, 2), train_step=step).fit([(X, 2.0), (X, 3.0)], **fit_once)
    assert len(history.losses) == 2


class Samples:
    """A dataset that is not a torch `Dataset`, such as the datasets of Hugging Face."""

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return X[index], Y[index]


def test_any_indexable_object_trains_as_a_dataset() -> None:
    losses_of = []
    for data in (Samples(), (X, Y)):
        torch.manual_seed(0)
        trainer = quiet(nn.Linear(4, 2), batch_size=16, seed=1, num_workers=0)
        losses_of.append(list(trainer.fit(data, data, **fit_once).losses))
    assert losses_of[0] == losses_of[1]
    assert len(losses_of[0]) == 4


# ------------------------------------------------------------------ pieces


@pytest.mark.parametrize("kind", [Trainer, ComposableTrainer])
def test_a_model_with_one_output_is_rejected_by_the_default_loss(kind: Any) -> None:
    with pytest.raises(ConfigError, match=r"cross entropy, learns nothing from one output .* shape \(64, 1\)"):
        kind(nn.Linear(4, 1), verbose=False).fit((X, X[:, :1]), **fit_once)


def test_a_model_with_one_output_works_with_a_chosen_loss() -> None:
    history = quiet(nn.Linear(4, 1), criterion="CrossEntropyLoss").fit((X, X[:, :1]), **fit_once)
    assert list(history.losses) == [0.0]


def test_an_optimizer_of_another_model_is_rejected() -> None:
    with pytest.raises(ConfigError, match="none of its parameters is one of the model's"):
        Trainer(nn.Linear(4, 2), optimizer=SGD(nn.Linear(4, 2).parameters(), lr=0.1))


def test_an_optimizer_may_hold_only_parameters_of_the_loss() -> None:
    centres = nn.BCEWithLogitsLoss(weight=None)
    centres.register_parameter("scale", nn.Parameter(torch.ones(1)))
    Trainer(nn.Linear(4, 2), criterion=centres, optimizer=SGD(centres.parameters(), lr=0.1))


def test_one_of_several_optimizers_may_hold_other_parameters() -> None:
    model, critic = nn.Linear(4, 2), nn.Linear(2, 1)
    Trainer(model, optimizer=[SGD(critic.parameters(), lr=0.1), SGD(model.parameters(), lr=0.1)])


def step_of_mine(trainer: Any, batch: Any) -> dict[str, Tensor]:
    inputs, targets = batch
    return {"loss": nn.functional.cross_entropy(trainer.model(inputs), targets)}


@pytest.mark.parametrize(
    "strategy",
    [
        GradientAccumulationStepStrategy(2, base_strategy=MultipleForwardPassStepStrategy(2)),
        GradientAccumulationStepStrategy(2, create_graph=True),
        lambda *step: torch.zeros(()),
    ],
)
def test_a_strategy_whose_step_would_be_ignored_is_rejected(strategy: Any) -> None:
    with pytest.raises(ConfigError, match=r"train_step: .* decides this; give one or the other"):
        Trainer(nn.Linear(4, 2), train_step=step_of_mine, training_step_strategy=strategy)


def test_an_ignored_step_strategy_is_also_rejected_in_equip() -> None:
    trainer = Trainer(nn.Linear(4, 2), train_step=step_of_mine)
    with pytest.raises(ConfigError, match=r"train_step: .* decides this"):
        equip(trainer, training_step=MultipleForwardPassStepStrategy(2))


def test_accumulation_and_clipping_strategies_work_with_any_step() -> None:
    strategies = [GradientAccumulationStepStrategy(2), GradientClippingStepStrategy(max_norm=1e-9)]
    trainer = ComposableTrainer(
        nn.Linear(4, 2), train_step=step_of_mine, training_step_strategy=strategies, batch_size=16, verbose=False
    )
    before = trainer.model.weight.detach().clone()
    trainer.fit((X, Y), **fit_once)
    assert trainer.context.progress.updates == 2
    assert torch.allclose(trainer.model.weight, before, atol=1e-6)


class Lightning(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])


def test_a_module_without_forward_raises_an_error_with_a_remedy() -> None:
    with pytest.raises(NotImplementedError) as caught:
        quiet(Lightning()).fit((X, Y), **fit_once)
    assert any("docs/migration/lightning.md" in note for note in caught.value.__notes__)
