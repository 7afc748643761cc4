from __future__ import annotations

import copy
import math
import tempfile
from collections.abc import Iterable, Mapping
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data as torch_data
from problem import Problem, assert_same_weights
from torch import Tensor, nn
from torch.optim.lr_scheduler import LinearLR, ReduceLROnPlateau, StepLR

from dovetail import Batches, Epochs, Trainer
from dovetail.callbacks import Callback
from dovetail.errors import ConfigError, DataError
from dovetail.trainers import AMPTrainer, TrainerDecorator
from dovetail.trainers.composable import ComposableTrainer
from dovetail.trainers.rehearsal import forecast_epoch
from dovetail.trainers.strategies import (
    AdamOptimizerStrategy,
    GradientClippingOptimizerStrategy,
    StateTrackingUpdateStrategy,
    StepLRSchedulerStrategy,
)


def trainer_of(problem: Problem, **options: Any) -> Trainer:
    settings: dict[str, Any] = {
        "optimizer": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        "train_dataset": (problem.x, problem.y),
        "val_dataset": (problem.x, problem.y),
        "batch_size": 8,
        "verbose": False,
    }
    return Trainer(problem.model(dropout=0.2), "cpu", **{**settings, **options})


def assert_equal(one: Any, other: Any, place: str = "state") -> None:
    """Compare two nested states, tensors bit by bit."""
    assert type(one) is type(other), place
    if isinstance(one, Tensor):
        assert torch.equal(one, other), place
    elif isinstance(one, Mapping):
        assert list(one) == list(other), place
        for key in one:
            assert_equal(one[key], other[key], f"{place}[{key!r}]")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), place
        for index, (left, right) in enumerate(zip(one, other, strict=True)):
            assert_equal(left, right, f"{place}[{index}]")
    elif isinstance(one, np.ndarray):
        assert np.array_equal(one, other), place
    else:
        assert one == other, place


# ------------------------------------------------------------------ explain: what it says


class Loud:
    def after_step(self, output: Mapping[str, Any]) -> None:
        super().after_step(output)  # type: ignore[misc]  # an add-on: what it is mounted on has the verb


class Quiet:
    def after_step(self, output: Mapping[str, Any]) -> None:
        super().after_step(output)  # type: ignore[misc]  # an add-on: what it is mounted on has the verb


class Decorator(TrainerDecorator):
    """A layer that passes every verb on."""


def test_a_notebook_prompt_shows_the_explain_tree(problem: Problem) -> None:
    reported = Trainer(problem.model(), verbose=False).explain()
    assert repr(reported) == str(reported)
    assert reported.count("\n") > 3


def test_explain_prints_the_whole_tree(problem: Problem, tmp_path: Path) -> None:
    trainer = Trainer.add_on(Loud)(
        problem.model(),
        "cpu",
        optimizer_strategy=AdamOptimizerStrategy(lr=0.01),
        lr_scheduler_strategy=StepLRSchedulerStrategy(step_size=1, gamma=0.5),
        train_dataset=(problem.x, problem.y),
        val_dataset=problem.batches[:4],
        batch_size=8,
        accumulation_steps=5,
        num_epochs=3,
        verbose=False,
        checkpoint_dir=tmp_path,
    )
    assert trainer.explain() == "\n".join(
        [
            "LoudTrainer",
            "├── layers, the outermost first",
            "│   ├── Loud (add-on)",
            "│   ├── Trainer",
            "│   └── SingleProcessTrainer",
            "├── model: Sequential on cpu, 103 parameters, 103 of them trainable",
            "│   └── memory: parameters 412 B, gradients 412 B, optimizer state 840 B",
            "├── overridden verbs and methods",
            "│   ├── after_step → Loud",
            "│   ├── get_optimizer → AdamOptimizerStrategy(lr=0.01)",
            "│   └── get_lr_scheduler → StepLRSchedulerStrategy(step_size=1, gamma=0.5)",
            "├── strategies",
            "│   ├── optimizer: AdamOptimizerStrategy(lr=0.01)",
            "│   └── lr_scheduler: StepLRSchedulerStrategy(step_size=1, gamma=0.5)",
            "├── callbacks, in order",
            "│   └── NonFiniteLoss",
            "└── next epoch: 1 of 3",
            "    ├── 12 batches of 8 samples",
            "    ├── 3 windows of up to 5 batches, 3 updates",
            "    ├── learning rate 0.01 → 0.005",
            "    ├── 1 validation of 4 batches, every epoch",
            f"    ├── 1 checkpoint, every epoch, the last one {tmp_path / 'ck_epoch_1_iter_12'}",
            f"    └── the best validation in {tmp_path / 'best_ck'}",
        ]
    )


@pytest.mark.parametrize(
    "optimizer",
    [
        partial(torch.optim.SGD, lr=0.1),
        partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        torch.optim.AdamW,
        partial(torch.optim.Adam, amsgrad=True),
        partial(torch.optim.NAdam, lr=0.1),
        partial(torch.optim.RMSprop, centered=True),
    ],
)
def test_the_memory_of_an_optimizer_is_known_before_its_first_step(problem: Problem, optimizer: Any) -> None:
    trainer = trainer_of(problem, optimizer=optimizer)
    trainer.model[0].unused = nn.Parameter(torch.zeros(5, dtype=torch.float64))
    trainer.model[3].bias.requires_grad_(False)
    before = forecast_epoch(trainer).optimizer_bytes
    trainer.fit(max_length=Batches(1))
    parameter = trainer.model[0].unused
    parameter.grad = torch.zeros_like(parameter)
    # No forward uses this parameter, so it has no state yet.
    trainer.context.optimizers[0].step()
    states = [value for state in trainer.context.optimizers[0].state.values() for value in state.values()]
    assert before == sum(it.numel() * it.element_size() for it in states if isinstance(it, Tensor))
    assert forecast_epoch(trainer).optimizer_bytes == before


def test_the_memory_of_a_factored_optimizer_is_unknown_before_its_first_step(problem: Problem) -> None:
    trainer = trainer_of(problem, optimizer=torch.optim.Adafactor)
    assert "optimizer state unknown before the first update" in trainer.explain()
    trainer.fit(max_length=Batches(1))
    assert "optimizer state unknown" not in trainer.explain()


def test_explain_of_an_empty_trainer_lists_what_is_missing() -> None:
    text = Trainer(verbose=False).explain()
    assert "no model yet: give the trainer one" in text
    assert "no training data yet: pass it to fit" in text


def test_explain_counts_data_without_a_model(problem: Problem) -> None:
    text = Trainer(train_dataset=problem.batches, verbose=False).explain()
    assert "12 batches of 8 samples" in text
    assert "learning rate unknown without an optimizer" in text


def test_explain_shows_an_unknown_number_of_batches_for_a_stream(problem: Problem) -> None:
    class Stream(torch_data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            raise AssertionError("explaining reads no data")

    text = trainer_of(problem, train_dataset=Stream(), num_workers=0).explain()
    assert "an unknown number of batches of 8 samples" in text
    assert "an unknown number of updates" in text


def test_explain_lists_layers_from_the_outside_in(problem: Problem) -> None:
    inner = Trainer.add_on(Loud, Quiet)(problem.model(), train_dataset=problem.batches, verbose=False)
    text = Decorator(inner).explain()
    names = ["Decorator", "Quiet (add-on)", "Loud (add-on)", "Trainer (decorated)", "SingleProcessTrainer (decorated)"]
    positions = [text.index(f"── {name}") for name in names]
    assert positions == sorted(positions)
    assert "after_step → Quiet → Loud\n" in text
    assert "12 batches" in text


def test_an_overridden_method_hides_its_strategy_in_explain(problem: Problem) -> None:
    class Mine(Trainer):
        def get_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
            return torch.optim.SGD(model.parameters(), lr=0.25)

    text = Mine(problem.model(), optimizer_strategy=AdamOptimizerStrategy(), train_dataset=problem.batches).explain()
    assert "get_optimizer → Mine\n" in text
    assert "learning rate 0.25\n" in text


def test_explain_names_a_function_that_replaces_a_verb(problem: Problem) -> None:
    def my_step(trainer: Trainer, batch: Any) -> dict[str, Tensor]:
        return {"loss": trainer.model(batch[0]).sum()}

    assert (
        "train_step → test_explain_names_a_function_that_replaces_a_verb.<locals>.my_step"
        in trainer_of(problem, train_step=my_step).explain()
    )


def test_explain_lists_callbacks_in_call_order(problem: Problem) -> None:
    class First(Callback):
        pass

    class Second(Callback):
        def __repr__(self) -> str:
            return "Second(every=3)"

    text = trainer_of(problem, callbacks=[First, Second]).explain()
    assert "├── First\n│   ├── Second(every=3)\n│   └── NonFiniteLoss\n" in text


def test_explain_shows_the_rest_of_a_running_epoch(problem: Problem) -> None:
    trainer = trainer_of(problem, accumulation_steps=5)
    trainer.fit(max_length=Batches(5))
    text = trainer.explain()
    assert "next epoch: 1 of 10, from batch 6 on" in text
    assert "7 batches of 8 samples" in text
    assert "2 windows of up to 5 batches, 2 updates" in text


def test_explain_reports_a_finished_trainer(problem: Problem) -> None:
    trainer = trainer_of(problem, num_epochs=1)
    trainer.fit()
    lines = trainer.explain().splitlines()
    place = lines.index("└── nothing to train: Epochs(1) is reached; one more epoch would be")
    assert lines[place + 1 : place + 3] == ["    ├── 12 batches of 8 samples", "    ├── 12 updates"]


@pytest.mark.parametrize("gives_objects", [True, False])
@pytest.mark.parametrize("on_batch", [True, False])
def test_the_final_rate_of_explain_equals_the_rate_of_training(
    problem: Problem, gives_objects: bool, on_batch: bool
) -> None:
    model = problem.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = partial(LinearLR, start_factor=0.5, total_iters=40)
    trainer = Trainer(
        model,
        optimizer=optimizer,
        scheduler=schedule(optimizer) if gives_objects else schedule,
        scheduler_step_on_batch=on_batch,
        train_dataset=problem.batches,
        accumulation_steps=5,
        verbose=False,
    )
    for epoch in range(1, 4):
        ahead = forecast_epoch(trainer)
        trainer.fit(max_length=Epochs(epoch))
        assert ahead.end_rate == trainer.context.optimizers[0].param_groups[0]["lr"]
    assert trainer.context.optimizers[0].param_groups[0]["lr"] == pytest.approx(
        0.1 * (0.5 + 0.5 * (36 if on_batch else 3) / 40)
    )


def test_explain_reports_a_rate_that_depends_on_a_metric(problem: Problem) -> None:
    assert "learning rate 0.1, and follows a metric" in trainer_of(problem, lr_scheduler=ReduceLROnPlateau).explain()


def test_explain_does_not_call_a_scheduler_step_of_the_user(problem: Problem) -> None:
    class Mine(Trainer):
        def scheduler_step(self, interval: str, metrics: Mapping[str, float] | None = None) -> None:
            raise AssertionError("explaining calls no verb of the user's")

    assert "moved by Mine.scheduler_step" in Mine(problem.model(), train_dataset=problem.batches).explain()


@pytest.mark.parametrize("period", [Batches(4), Batches(5), Epochs(1), Epochs(2), Batches({3, 12})])
def test_explain_counts_the_validations_and_checkpoints_of_training(
    problem: Problem, tmp_path: Path, period: Any
) -> None:
    class Count(Callback):
        def __init__(self) -> None:
            self.validations = 0
            self.checkpoints: list[Path] = []
            self.in_first_epoch: Any = None

        def on_validation_end(self, context: Any, metrics: Mapping[str, float]) -> None:
            self.validations += 1

        def on_checkpoint(self, context: Any, path: Path) -> None:
            if not path.name.startswith("best_"):
                self.checkpoints.append(path)

        def on_epoch_start(self, context: Any) -> None:
            if context.progress.epoch == 1:
                self.in_first_epoch = self.validations, tuple(self.checkpoints)

    count = Count()
    # Two epochs, because training validates and saves once more at its very end.
    trainer = trainer_of(problem, callbacks=[count], checkpoint_dir=tmp_path, num_epochs=2, accumulation_steps=3)
    ahead = forecast_epoch(trainer, validation_period=period, checkpoint_period=period)
    trainer.fit(validation_period=period, checkpoint_period=period)
    assert (ahead.validations, ahead.checkpoints) == count.in_first_epoch


# ------------------------------------------------------------------ explain: what it leaves alone


@pytest.mark.parametrize("epochs", [0, 1])
def test_explain_changes_no_state(problem: Problem, tmp_path: Path, epochs: int) -> None:
    trainer = trainer_of(problem, lr_scheduler=partial(StepLR, step_size=1), checkpoint_dir=tmp_path / "ck")
    if epochs:
        trainer.fit(max_length=Epochs(epochs))
    before, attributes = copy.deepcopy(trainer.state_dict()), dict(vars(trainer))
    files = sorted(tmp_path.rglob("*"))
    trainer.explain()
    assert_equal(trainer.state_dict(), before)
    assert vars(trainer) == attributes
    assert sorted(tmp_path.rglob("*")) == files


def test_explain_restores_the_rng_after_a_method_that_draws(problem: Problem) -> None:
    class Random(Trainer):
        def get_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
            return torch.optim.SGD(model.parameters(), lr=float(torch.rand(1)))

    trainer = Random(problem.model(), train_dataset=problem.batches, verbose=False)
    before = torch.get_rng_state()
    trainer.explain()
    assert torch.equal(torch.get_rng_state(), before)


def test_training_after_explain_equals_training_without(problem: Problem) -> None:
    def train(explains: bool) -> Trainer:
        torch.manual_seed(5)
        model = problem.model(dropout=0.2)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        trainer = Trainer(
            model,
            optimizer=optimizer,
            lr_scheduler=partial(LinearLR, start_factor=0.1, total_iters=20),
            scheduler_step_on_batch=True,
            train_dataset=torch_data.DataLoader(
                torch_data.TensorDataset(problem.x, problem.y), batch_size=8, shuffle=True
            ),
            verbose=False,
        )
        for epoch in (1, 2):
            if explains:
                trainer.explain()
            trainer.fit(max_length=Epochs(epoch))
        return trainer

    explained, plain = train(True), train(False)
    assert_same_weights(explained.model, plain.model)
    assert explained.history == plain.history
    assert explained.context.optimizers[0].param_groups[0]["lr"] == plain.context.optimizers[0].param_groups[0]["lr"]


# ------------------------------------------------------------------ dry run


@pytest.mark.parametrize("epochs", [0, 1])
def test_a_dry_run_restores_everything(problem: Problem, tmp_path: Path, epochs: int) -> None:
    class Seen(Callback):
        calls = 0

        def on_step_end(self, context: Any, output: Mapping[str, Any]) -> None:
            self.calls += 1

    seen = Seen()
    trainer = trainer_of(
        problem, callbacks=[seen], lr_scheduler=partial(StepLR, step_size=1), checkpoint_dir=tmp_path, seed=3
    )
    _ = trainer.optimizer
    if epochs:
        trainer.fit(max_length=Epochs(epochs))
    before, attributes, calls = copy.deepcopy(trainer.state_dict()), dict(vars(trainer)), seen.calls
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    gradients = [parameter.grad for parameter in trainer.model.parameters()]
    trainer.model[2].eval()
    trainer.fit(dry_run=True)
    assert_equal(trainer.state_dict(), before)
    assert vars(trainer) == attributes
    assert seen.calls == calls
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == files
    assert all(it.grad is grad for it, grad in zip(trainer.model.parameters(), gradients, strict=True))
    assert [module.training for module in trainer.model] == [True, True, False, True]


def test_a_dry_run_restores_modes_and_buffers_that_checkpoints_lack(problem: Problem) -> None:
    class Counting(nn.Linear):
        calls: Tensor

        def __init__(self) -> None:
            super().__init__(6, 3)
            self.register_buffer("calls", torch.zeros(1), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x)

    model = Counting().eval()
    Trainer(model, verbose=False).fit(problem.batches, problem.batches, dry_run=True)
    assert model.calls.item() == 0
    assert not model.training


@pytest.mark.parametrize("own_generator", [True, False])
def test_training_after_a_dry_run_equals_training_without(problem: Problem, own_generator: bool) -> None:
    def loader() -> Iterable[Any]:
        generator = torch.Generator().manual_seed(1) if own_generator else None
        dataset = torch_data.TensorDataset(problem.x, problem.y)
        return torch_data.DataLoader(dataset, batch_size=8, shuffle=True, generator=generator)

    def train(tries: bool) -> tuple[ComposableTrainer, dict[str, Any]]:
        torch.manual_seed(5)
        counting = StateTrackingUpdateStrategy()
        trainer = ComposableTrainer(
            problem.model(dropout=0.2),
            optimizer_strategy=GradientClippingOptimizerStrategy(AdamOptimizerStrategy(lr=0.01), max_norm=0.1),
            lr_scheduler_strategy=StepLRSchedulerStrategy(step_size=2, interval="update"),
            model_update_strategy=counting,
            accumulation_steps=5,
            verbose=False,
        )
        train_data, val_data = loader(), loader()
        # The middle of an epoch, too, is a place for a dry run.
        for length in (Epochs(1), Batches(17), Epochs(2)):
            if tries:
                trainer.fit(train_data, val_data, dry_run=True)
            trainer.fit(train_data, val_data, max_length=length)
        return trainer, counting.get_update_payload(trainer.context)

    (tried, tried_counts), (plain, plain_counts) = train(True), train(False)
    assert_same_weights(tried.model, plain.model)
    assert tried.history == plain.history
    assert tried_counts == plain_counts


def test_a_dry_run_of_a_decorated_trainer_passes_through_its_layers(problem: Problem) -> None:
    trainer = trainer_of(problem)
    _ = trainer.optimizer
    before = copy.deepcopy(trainer.state_dict())
    assert len(Decorator(trainer).fit(dry_run=True).losses) == 1
    assert_equal(trainer.state_dict(), before)


def test_data_given_to_a_dry_run_is_not_kept(problem: Problem) -> None:
    trainer = trainer_of(problem, train_dataset=None, val_dataset=None)
    trainer.fit(problem.batches, problem.batches, dry_run=True)
    assert trainer.context.run.data == {"train": None, "valid": None, "test": None}


def test_a_dry_run_has_the_history_of_one_window_and_one_validation_batch(problem: Problem) -> None:
    model = problem.model()
    trainer = Trainer(model, accumulation_steps=5, shuffle=False, verbose=False)
    expected = [nn.functional.cross_entropy(model(x), y).item() for x, y in problem.batches[:5]]
    history = trainer.fit(problem.batches, problem.batches, dry_run=True)
    assert list(history.losses) == pytest.approx(expected)
    assert [row["stage"] for row in history] == ["valid"]
    assert history is not trainer.history


def test_a_dry_run_window_longer_than_the_epoch_ends_with_it(problem: Problem) -> None:
    trainer = trainer_of(problem, accumulation_steps=50)
    assert len(trainer.fit(dry_run=True).losses) == 12


def test_a_dry_run_validates_one_batch_and_writes_no_user_checkpoint(
    problem: Problem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    folders: list[Any] = []

    class Watching(Trainer):
        def test_step(self, batch: Any) -> Mapping[str, Any]:
            sizes.append(len(batch[0]))
            return super().test_step(batch)

        def state_dict(self) -> dict[str, Any]:
            folders.append(self.context.run.saver and self.context.run.saver.directory)
            return super().state_dict()

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    trainer = Watching(problem.model(), checkpoint_dir=tmp_path / "ck", verbose=False)
    trainer.fit(problem.batches, problem.batches, dry_run=True)
    assert sizes == [8]
    # The first is the state to go back to.
    assert len(folders) == 2
    assert folders[1].parent == tmp_path
    assert list(tmp_path.iterdir()) == []


def test_the_dry_run_report_holds_the_measured_values(problem: Problem, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = trainer_of(problem, verbose=True)
    loss = trainer.fit(dry_run=True).losses[0]
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "dry run: 1 training, 1 validation batch; state restored"
    assert lines[1] == f"  loss        {loss:.6g}"
    assert [line.split()[0] for line in lines[2:5]] == ["step", "validation", "checkpoint"]
    assert lines[5] == "  parameters  103, 103 of them trainable"
    assert lines[6].startswith("  one epoch   about ")
    assert len(lines) == 7


def test_a_dry_run_names_a_parameter_without_gradient(problem: Problem, capsys: pytest.CaptureFixture[str]) -> None:
    class Forgetful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.forgotten = nn.Linear(6, 3), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Any:
            return self.used(x)

    Trainer(Forgetful()).fit(problem.batches, problem.batches, dry_run=True)
    assert capsys.readouterr().out.endswith("  problem     no gradient reached forgotten.weight, forgotten.bias\n")


def test_a_dry_run_sees_gradients_that_a_manual_step_clears(problem: Problem, recwarn: pytest.WarningsRecorder) -> None:
    def by_hand(trainer: Trainer, batch: Any) -> dict[str, Tensor]:
        loss = nn.functional.cross_entropy(trainer.model(batch[0]), batch[1])
        trainer.context.backward(loss)
        trainer.context.step()
        return {"loss": loss}

    trainer_of(problem, train_step=by_hand).fit(dry_run=True)
    assert list(recwarn) == []


def test_a_quiet_trainer_warns_about_dry_run_findings(problem: Problem, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.warns(UserWarning, match="dry run: there is no validation data"):
        trainer_of(problem, val_dataset=None).fit(dry_run=True)
    assert capsys.readouterr().out == ""


def test_a_dry_run_finds_a_loss_that_is_not_finite(problem: Problem) -> None:
    data = [(x * math.inf, y) for x, y in problem.batches]
    with pytest.warns(UserWarning, match="the loss is not finite"):
        trainer_of(problem, train_dataset=data).fit(dry_run=True)


def test_a_dry_run_finds_evaluation_mode_and_missing_targets(problem: Problem) -> None:
    def step(trainer: Trainer, batch: Any) -> dict[str, Tensor]:
        trainer.model.eval()
        return {"loss": trainer.model(batch).square().mean()}

    trainer = trainer_of(problem, train_dataset=[x for x, _ in problem.batches], train_step=step)
    with pytest.warns(UserWarning, match="dry run: ") as found:
        trainer.fit(dry_run=True)
    assert [str(each.message) for each in found] == [
        "dry run: the step left the model in evaluation mode",
        "dry run: the training batch has no targets",
    ]
    assert trainer.model.training


def test_a_failed_dry_run_adds_a_note_and_changes_nothing(problem: Problem) -> None:
    def fail(trainer: Trainer, batch: Any) -> dict[str, Tensor]:
        torch.rand(1)
        if trainer.context.progress.batch == 1:
            raise RuntimeError("no")
        return {"loss": trainer.model(batch[0]).sum()}

    trainer = trainer_of(problem, train_step=fail, accumulation_steps=3)
    _ = trainer.optimizer
    before = copy.deepcopy(trainer.state_dict())
    with pytest.raises(RuntimeError, match="no") as caught:
        trainer.fit(dry_run=True)
    assert caught.value.__notes__ == ["while training: epoch 1, batch 2"]
    assert_equal(trainer.state_dict(), before)


def test_explain_and_dry_run_reject_invalid_arguments_by_name(problem: Problem) -> None:
    with pytest.raises(ConfigError, match="the trainer has no model"):
        Trainer().fit(problem.batches, dry_run=True)
    with pytest.raises(ConfigError, match="cannot be combined with resume"):
        trainer_of(problem).fit(dry_run=True, resume="auto")
    with pytest.raises(DataError, match="the train data is a list_iterator, which can be read only once"):
        trainer_of(problem).fit(iter(problem.batches), dry_run=True)


def test_the_repr_of_a_trainer_shows_its_model_and_layers(problem: Problem) -> None:
    trainer = Trainer(problem.model(), "cpu", verbose=False)
    trainer.fit(problem.batches, max_length=Epochs(1))
    shown = "Trainer(model=Sequential, device=cpu, 1 epoch done)"
    assert repr(trainer) == shown
    layered = AMPTrainer(trainer)
    assert repr(layered) == f"AMPTrainer({shown})"
    shown = layered._repr_html_()
    assert shown.startswith("<pre style=")
    assert shown.endswith(f">{escape(layered.explain())}</pre>")
