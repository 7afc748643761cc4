from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from problem import Problem, assert_same_weights

from dovetail import checkpoint as store
from dovetail.callbacks import Callback
from dovetail.compat.zae_engine import Trainer
from dovetail.errors import CheckpointError, ConfigError, UnknownNameError
from dovetail.runtime.signals import Interrupted
from dovetail.trainers.addons import AddOnBase, MultiGPUAddon, SignalHandlerAddon, StateManagerAddon
from dovetail.trainers.capabilities import DataParallel, ShardedDataParallel


def make(problem: Problem, cls: type[Any], **options: Any) -> Any:
    model = problem.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.9)
    return cls(model, "cpu", mode="train", optimizer=optimizer, scheduler=scheduler, log_bar=False, **options)


@pytest.mark.parametrize(("save_format", "name"), [("ckpt", "model.ckpt"), ("safetensors", "model.safetensors")])
def test_the_state_manager_keeps_the_newest_state_and_the_best_weights(
    problem: Problem, tmp_path: Path, save_format: str, name: str
) -> None:
    extended = Trainer.add_on(StateManagerAddon)
    trainer = make(problem, extended, save_path=tmp_path / "checkpoints", save_format=save_format)
    trainer.run(3, problem.batches, problem.batches)
    assert [path.name for path in (tmp_path / "checkpoints").glob("ck_epoch_*")] == ["ck_epoch_3_iter_36"]
    weights = store.load_model_file(tmp_path / "checkpoints" / name)
    best = trainer.weight_buffer["weight"]
    assert all(torch.equal(weights[key], value) for key, value in best.items())


def test_training_from_a_restored_state_equals_an_uninterrupted_run(problem: Problem, tmp_path: Path) -> None:
    extended = Trainer.add_on(StateManagerAddon)
    whole = make(problem, extended, save_path=tmp_path / "whole")
    whole.run(4, problem.batches, problem.batches)
    make(problem, extended, save_path=tmp_path / "cut").run(2, problem.batches, problem.batches)
    resumed = make(problem, extended, save_path=tmp_path / "cut")
    resumed.load_state()
    resumed.run(2, problem.batches, problem.batches)
    assert_same_weights(resumed.model, whole.model)
    assert resumed.history == whole.history
    assert resumed.loss_buffer == whole.loss_buffer
    assert resumed.save_state() == tmp_path / "cut" / "state"


def test_the_state_manager_keeps_the_best_weights_of_fit(problem: Problem, tmp_path: Path) -> None:
    trainer = make(problem, Trainer.add_on(StateManagerAddon), save_path=tmp_path, num_epochs=2)
    trainer.fit(problem.batches, problem.batches)
    weights = store.load_model_file(tmp_path / "model.ckpt")
    assert all(torch.equal(weights[key], value) for key, value in trainer.weight_buffer["weight"].items())


def test_a_restored_state_includes_the_best_metric_so_far(problem: Problem, tmp_path: Path) -> None:
    extended = Trainer.add_on(StateManagerAddon)
    first = make(problem, extended, save_path=tmp_path)
    first.run(1, problem.batches, problem.batches)
    again = make(problem, extended, save_path=tmp_path)
    again.load_state()
    assert again.loss_buffer == first.loss_buffer
    assert not again.check_better(2, first.loss_buffer + 1)


def test_the_state_manager_rejects_invalid_arguments_by_name(problem: Problem, tmp_path: Path) -> None:
    extended = Trainer.add_on(StateManagerAddon)
    with pytest.raises(UnknownNameError, match="did you mean 'safetensor"):
        make(problem, extended, save_path=tmp_path, save_format="safetensrs")
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        make(problem, extended, save_path=tmp_path).load_state()
    with pytest.raises(TypeError, match="save_path"):
        make(problem, extended)


def test_an_invalid_device_is_rejected_by_name(problem: Problem) -> None:
    with pytest.raises(ConfigError, match=r"device: expected a name such as 'cpu'.*got 'gpu'"):
        Trainer.add_on(MultiGPUAddon)(problem.model(), ["cpu", "gpu"])


def test_a_failed_checkpoint_write_at_a_signal_leaves_no_open_run(problem: Problem, tmp_path: Path) -> None:
    class Signal(Callback):
        def on_step_end(self, context: Any, output: Any) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

    class Torn(Trainer):
        torn = 0

        def teardown(self, error: BaseException | None) -> None:
            self.torn += 1
            super().teardown(error)

    (tmp_path / "file").touch()
    trainer = make(problem, Torn.add_on(SignalHandlerAddon), signal_save_path=tmp_path / "file" / "x")
    trainer.context.callbacks.add(Signal())
    with pytest.raises(CheckpointError, match="could not be written"):
        trainer.fit(problem.batches)
    assert trainer.torn == 1


def test_add_ons_stack_in_any_order(problem: Problem, tmp_path: Path) -> None:
    models = []
    for order in ((StateManagerAddon, SignalHandlerAddon), (SignalHandlerAddon, StateManagerAddon)):
        extended = Trainer.add_on(*order)
        assert extended.__mro__[1] is order[-1]
        trainer = make(problem, extended, save_path=tmp_path / order[0].__name__, signal_save_path=tmp_path / "signal")
        trainer.run(2, problem.batches)
        models.append(trainer.model)
    assert_same_weights(*models)


def test_an_add_on_may_override_how_it_is_mounted(problem: Problem) -> None:
    class Renamed(AddOnBase):
        @classmethod
        def apply(cls, base: type[Any]) -> type[Any]:
            return type("Mine", (base,), {"is_mine": True})

    assert Trainer.add_on(Renamed).is_mine


@pytest.mark.slow
@pytest.mark.usefixtures("forking")
@pytest.mark.parametrize("layer", [DataParallel, pytest.param(ShardedDataParallel, marks=pytest.mark.torture)])
def test_only_one_of_two_processes_writes_the_best_weights(problem: Problem, tmp_path: Path, layer: type[Any]) -> None:
    marks = tmp_path / "marks"
    marks.mkdir()

    class Marked(Trainer):
        def check_better(self, epoch: int, loss: float) -> bool:
            (marks / f"asked in {self.context.process.share.rank}").touch()
            return super().check_better(epoch, loss)

        def save_model(self, path: str | Path) -> Path:
            super().save_model(Path(path).with_stem(f"model{self.context.process.share.rank}"))
            return super().save_model(path)

    extended: Any = Marked.add_on(StateManagerAddon, layer)
    trainer = extended(
        problem.model(), "cpu", save_path=tmp_path / "kept", save_format="safetensors", num_processes=2, verbose=False
    )
    trainer.run(1, problem.batches, problem.batches)
    assert sorted(path.name for path in marks.iterdir()) == ["asked in 0", "asked in 1"]
    assert {path.name for path in (tmp_path / "kept").glob("model*")} == {"model.safetensors", "model0.safetensors"}
    weights = store.load_model_file(tmp_path / "kept" / "model.safetensors")
    assert all(torch.equal(weights[key], value) for key, value in trainer.model.state_dict().items())


@pytest.mark.slow
@pytest.mark.usefixtures("forking")
@pytest.mark.parametrize(
    "order",
    [
        (SignalHandlerAddon, MultiGPUAddon),
        pytest.param((MultiGPUAddon, SignalHandlerAddon), marks=pytest.mark.torture),
    ],
)
def test_a_signal_to_one_of_two_processes_is_saved_and_logged_once(
    problem: Problem, tmp_path: Path, order: tuple[type[Any], ...]
) -> None:
    class Signal(Callback):
        def on_step_end(self, context: Any, output: Any) -> None:
            if context.process.share.rank == 1 and context.progress.batches == 2:
                os.kill(os.getpid(), signal.SIGTERM)

    extended: Any = Trainer.add_on(*order)
    places = {"signal_save_path": tmp_path / "saved", "signal_log_path": tmp_path / "signals.log"}
    trainer = extended(problem.model(), ["cpu", "cpu"], callbacks=[Signal()], verbose=False, **places)
    with pytest.raises(Interrupted) as caught:
        trainer.run(1, problem.batches)
    assert caught.value.number == signal.SIGTERM
    (line,) = (tmp_path / "signals.log").read_text(encoding="utf-8").splitlines()
    batches = store.load(tmp_path / "saved")["progress"]["batches"]
    assert trainer.context.progress.batches == batches
    assert f"SIGTERM after 0 epochs and {batches} batches" in line
