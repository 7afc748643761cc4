"""Checkpoints of a trainer: content, retention, and failed writes."""

from __future__ import annotations

import errno
import json
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.data as torch_data
from problem import Problem, assert_same_weights
from torch import nn

from dovetail import Batches, Epochs, Trainer
from dovetail import checkpoint as store
from dovetail.callbacks import EMA, Callback
from dovetail.checkpoint.strict_json import seal
from dovetail.compat import lernomatic
from dovetail.errors import CheckpointError, ConfigError, UnknownNameError
from dovetail.runtime.signals import Interrupted
from dovetail.trainers.context import TrainingContext
from dovetail.trainers.reuse import reset
from dovetail.trainers.saving import Saver


def quiet(model: nn.Module, **options: Any) -> Trainer:
    return Trainer(model, verbose=False, **options)


class Fail(Callback):
    def __init__(self, at: int) -> None:
        self.at = at

    def on_step_end(self, context: TrainingContext, output: Any) -> None:
        if context.progress.batches == self.at:
            raise ZeroDivisionError


# ---------------------------------------------------------------------- what is refused


def saved(problem: Problem, path: Path, **options: Any) -> Path:
    trainer = quiet(problem.model(), **options)
    trainer.fit(problem.batches, max_length=Epochs(1))
    return trainer.save_checkpoint(path)


def other_model(problem: Problem) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Dropout(0.0), nn.Linear(12, 3))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: quiet(other_model(p)), r"'0.weight' has shape \(10, 6\) in it and \(12, 6\) in the model"),
        (lambda p: quiet(p.model()[:1]), "it has '3.weight', which the model lacks"),
        (lambda p: quiet(nn.Sequential(*p.model(), nn.Linear(3, 3))), "it lacks '4.weight', which the model has"),
        (lambda p: quiet(p.model(dtype=torch.float64)), "'0.weight' is torch.float32 in it and torch.float64"),
        (lambda p: quiet(p.model(), optim_function="SGD"), "its optimizers are Adam, the trainer's are SGD"),
        (
            lambda p: quiet(p.model(), scheduler=partial(torch.optim.lr_scheduler.StepLR, step_size=1)),
            "its schedulers are none, the trainer's are StepLR",
        ),
        (
            lambda p: quiet(m := p.model(), optimizer=torch.optim.Adam([{"params": [w]} for w in m.parameters()])),
            r"groups of \[4\] parameters in it and of \[1, 1, 1, 1\] in the trainer",
        ),
    ],
)
def test_a_state_of_another_kind_is_rejected_with_the_first_difference(
    problem: Problem, tmp_path: Path, make: Any, message: str
) -> None:
    path = saved(problem, tmp_path / "ck")
    trainer = make(problem)
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    with pytest.raises(CheckpointError, match=message):
        trainer.load_checkpoint(path)
    assert all(torch.equal(value, before[name]) for name, value in trainer.model.state_dict().items())
    assert trainer.context.progress.batches == 0


def test_unclaimed_checkpoint_state_warns(problem: Problem, tmp_path: Path) -> None:
    path = saved(problem, tmp_path / "ck", callbacks=[EMA(0.9)])
    with pytest.warns(UserWarning, match="the state of EMA, which this trainer does not have"):
        quiet(problem.model()).load_checkpoint(path)


# ---------------------------------------------------------------------- objects with state


class Counter:
    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def test_any_object_with_a_state_dict_can_be_checkpointed(problem: Problem, tmp_path: Path) -> None:
    trainer, counter = quiet(problem.model()), Counter()
    trainer.context.run.register("mine", counter)
    counter.count = 7
    trainer.fit(problem.batches, max_length=Epochs(1))
    path = trainer.save_checkpoint(tmp_path / "ck")
    other, restored = quiet(problem.model()), Counter()
    other.context.run.register("mine", restored)
    other.load_checkpoint(path)
    assert restored.count == 7
    with pytest.raises(ConfigError, match="'mine' is registered already"):
        other.context.run.register("mine", restored)
    with pytest.raises(ConfigError, match="needs state_dict and load_state_dict"):
        other.context.run.register("list", [])  # type: ignore[arg-type]


class OwnPlace:
    """A loader that draws at random and knows itself where it is."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.position = 0
        self.generator_of_order = torch.Generator().manual_seed(1)
        self.order: list[int] = []

    def __len__(self) -> int:
        return 12

    def __iter__(self) -> Iterator[Any]:
        if self.position == 0:
            self.order = torch.randperm(12, generator=self.generator_of_order).tolist()
        while self.position < 12:
            index = self.order[self.position]
            self.position += 1
            yield self.problem.batches[index]
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        position = self.position % 12
        return {"position": position, "order": self.order, "generator": self.generator_of_order.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position, self.order = state["position"], state["order"]
        self.generator_of_order.set_state(state["generator"])


class OwnOrder(torch_data.Sampler[int]):
    """A sampler that draws from a generator which only its state knows."""

    def __init__(self) -> None:
        self.hidden = torch.Generator().manual_seed(2)

    def __len__(self) -> int:
        return 96

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(96, generator=self.hidden).tolist())

    def state_dict(self) -> dict[str, Any]:
        return {"hidden": self.hidden.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.hidden.set_state(state["hidden"])


@pytest.mark.parametrize("kind", ["loader", "sampler"])
@pytest.mark.parametrize("cut", [5, 17, 24])
def test_loaders_and_samplers_with_a_state_resume_exactly(
    problem: Problem, tmp_path: Path, kind: str, cut: int
) -> None:
    def data() -> Any:
        if kind == "loader":
            return OwnPlace(problem)
        return torch_data.DataLoader(torch_data.TensorDataset(problem.x, problem.y), batch_size=8, sampler=OwnOrder())

    def trainer(folder: str) -> Trainer:
        return quiet(problem.model(dropout=0.3), train_dataset=data(), seed=4, checkpoint_dir=tmp_path / folder)

    whole, cut_short, resumed = trainer("whole"), trainer("cut"), trainer("cut")
    whole.fit(max_length=Epochs(4), checkpoint_period=Batches(4))
    cut_short.context.callbacks.add(Fail(cut))
    with pytest.raises(ZeroDivisionError):
        cut_short.fit(max_length=Epochs(4), checkpoint_period=Batches(4))
    resumed.fit(max_length=Epochs(4), checkpoint_period=Batches(4), resume="auto")
    assert list(resumed.history.losses) == list(whole.history.losses)
    assert_same_weights(resumed.model, whole.model)


# ---------------------------------------------------------------------- which ones stay


def periodic(folder: Path) -> list[int]:
    return sorted(int(path.name.rsplit("_", 1)[1]) for path in folder.glob("ck_epoch_*"))


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, [12, 24, 36, 48, 60]),
        ({"keep_last": 2}, [48, 60]),
        ({"keep_every": 24}, [24, 48, 60]),
        ({"keep_last": 1, "keep_every": 24}, [24, 48, 60]),
    ],
)
def test_retention(problem: Problem, tmp_path: Path, options: dict[str, Any], kept: list[int]) -> None:
    quiet(problem.model(), checkpoint_dir=tmp_path, **options).fit(problem.batches, max_length=Epochs(5))
    assert periodic(tmp_path) == kept


def test_the_best_k_checkpoints_are_kept_by_any_metric(problem: Problem, tmp_path: Path) -> None:
    scores = iter([5.0, 1.0, 4.0, 2.0, 3.0])

    class Scored(Trainer):
        def val_epoch(self) -> dict[str, float]:
            return {"loss": 0.0, "own": next(scores)}

    trainer = Scored(
        problem.model(), checkpoint_dir=tmp_path, keep_best=2, best_metric="valid_own", best_mode="min", verbose=False
    )
    trainer.fit(problem.batches, max_length=Epochs(5))
    assert periodic(tmp_path) == [24, 48, 60]
    assert store.inspect(tmp_path / "best_ck").metrics["valid_own"] == 1.0


def test_the_best_checkpoint_holds_the_best_weights(problem: Problem, tmp_path: Path) -> None:
    trainer = quiet(problem.model(), learning_rate=0.05, checkpoint_dir=tmp_path)
    trainer.fit(problem.batches, problem.batches, max_length=Epochs(4))
    best = max(trainer.history.get_metric_values("valid_accuracy"))
    other = lernomatic.Trainer(problem.model(), verbose=False)
    other.load_model_checkpoint(tmp_path / "best_ck")
    assert other.evaluate(problem.batches)["accuracy"] == best


def test_a_run_killed_between_best_and_periodic_writes_the_missing_one(
    problem: Problem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class DieAfterBest(Callback):
        def on_checkpoint(self, context: TrainingContext, path: Path) -> None:
            if path.name == "best_ck":
                raise ZeroDivisionError

    def trainer(**options: Any) -> Trainer:
        return quiet(problem.model(), learning_rate=0.05, checkpoint_dir=tmp_path, **options)

    with pytest.raises(ZeroDivisionError):
        trainer(callbacks=[DieAfterBest]).fit(problem.batches, problem.batches, max_length=Epochs(2))
    assert periodic(tmp_path) == []
    resumed = trainer()
    resumed.fit(problem.batches, problem.batches, max_length=Epochs(2), resume="auto")
    assert periodic(tmp_path) == [12, 24]


def test_a_new_run_in_an_old_folder_has_the_newest_checkpoint(problem: Problem, tmp_path: Path) -> None:
    """The old run had more steps; the new one, not resumed, must neither lose its checkpoints nor continue from it."""

    def trainer() -> Trainer:
        return quiet(problem.model(), checkpoint_dir=tmp_path, keep_last=1)

    trainer().fit(problem.batches, max_length=Epochs(5))
    trainer().fit(problem.batches, max_length=Epochs(2))
    assert periodic(tmp_path) == [24]
    resumed = trainer()
    resumed.fit(problem.batches, max_length=Epochs(3), resume="auto")
    assert resumed.context.progress.batches == 36


def test_a_new_run_is_the_newest_even_if_the_clock_was_set_back(problem: Problem, tmp_path: Path) -> None:
    quiet(problem.model(), checkpoint_dir=tmp_path).fit(problem.batches, max_length=Epochs(3))
    for path in tmp_path.glob("*ck*/manifest.json"):
        document = json.loads(path.read_text())
        del document["sha256"]
        path.write_bytes(seal({**document, "created": "2099-01-01T00:00:00+00:00"}))
    new = quiet(problem.model(seed=8), checkpoint_dir=tmp_path)
    new.fit(problem.batches, max_length=Epochs(1))
    resumed = quiet(problem.model(), checkpoint_dir=tmp_path)
    resumed.fit(problem.batches, max_length=Epochs(1), resume="auto")
    assert_same_weights(resumed.model, new.model)


def _resumed_after(problem: Problem, folder: Path, damage: Callable[[Path], object], warning: str) -> Trainer:
    """Train for two epochs, damage the folder, resume for three, and compare with a run without damage."""
    whole = quiet(problem.model(), checkpoint_dir=folder / "whole")
    whole.fit(problem.batches, max_length=Epochs(3))
    runs = folder / "runs"
    quiet(problem.model(), checkpoint_dir=runs).fit(problem.batches, max_length=Epochs(2))
    damage(runs)
    resumed = quiet(problem.model(), checkpoint_dir=runs)
    with pytest.warns(store.CheckpointWarning) as caught:
        resumed.fit(problem.batches, max_length=Epochs(3), resume="auto")
    assert any(re.search(warning, str(each.message)) for each in caught)
    assert_same_weights(resumed.model, whole.model)
    assert (runs / "ck_history.jsonl").read_bytes() == (folder / "whole" / "ck_history.jsonl").read_bytes()
    # Nothing warns a second time.
    again = quiet(problem.model(), checkpoint_dir=runs)
    again.fit(problem.batches, max_length=Epochs(3), resume="auto")
    assert_same_weights(again.model, whole.model)
    return resumed


@pytest.mark.parametrize("line", [b"", b"\0" * 60, b"[" * 5000, b'{"dovetail_history": 2}', b"thesis", b"\xff"])
def test_a_damaged_history_is_moved_aside_by_a_resumed_run(problem: Problem, tmp_path: Path, line: bytes) -> None:
    def damage(runs: Path) -> None:
        _, *rows = (runs / "ck_history.jsonl").read_bytes().split(b"\n")
        (runs / "ck_history.jsonl").write_bytes(b"\n".join([line, *rows]))

    _resumed_after(problem, tmp_path, damage, r"ck_history\.jsonl, line 1.*; it is kept as ck_history\.jsonl\.damaged-")
    (aside,) = (tmp_path / "runs").glob("ck_history.jsonl.damaged-*")
    assert aside.read_bytes().startswith(line + b"\n")


@pytest.mark.parametrize("is_link", [False, True])
def test_a_damaged_checkpoint_with_an_extra_file_is_moved_aside(
    problem: Problem, tmp_path: Path, is_link: bool
) -> None:
    def damage(runs: Path) -> None:
        newest = store.latest(runs)
        assert newest is not None
        if is_link:
            (newest / "extra").symlink_to(tmp_path)
        else:
            (newest / "extra").write_text("precious")

    _resumed_after(problem, tmp_path, damage, r"a damaged checkpoint had this name; it is kept as")
    (aside,) = (tmp_path / "runs").glob("ck_epoch_2_*.damaged-*/extra")
    assert aside.is_symlink() == is_link
    assert len(list((tmp_path / "runs").glob("ck_epoch_*/extra"))) == 1


def test_a_checkpoint_name_that_is_a_path_is_rejected(tmp_path: Path) -> None:
    for name in ("../up", "a/b", "", ".hidden"):
        with pytest.raises(ConfigError, match="checkpoint_name"):
            Saver(tmp_path, name)


# ---------------------------------------------------------------------- when it cannot be written


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every write fails from now on, as on a full disk."""
    from dovetail.checkpoint.files import Files

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Files, "make_directory", refuse)


@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.usefixtures("full_disk")
def test_a_failed_checkpoint_write_ends_training(problem: Problem, tmp_path: Path, in_background: bool) -> None:
    trainer = quiet(
        problem.model(), checkpoint_dir=tmp_path, save_hist=False, save_in_background=in_background, save_every=3
    )
    with pytest.raises(CheckpointError, match="No space left"):
        trainer.fit(problem.batches, max_length=Epochs(3))
    assert trainer.context.progress.batches < 12


@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.usefixtures("full_disk")
def test_a_failed_checkpoint_write_only_warns_if_requested(
    problem: Problem, tmp_path: Path, in_background: bool
) -> None:
    reported: list[Path] = []

    class Receiver(Callback):
        def on_checkpoint(self, context: TrainingContext, path: Path) -> None:
            reported.append(path)

    trainer = quiet(
        problem.model(), checkpoint_dir=tmp_path, save_hist=False, on_save_error="warn", callbacks=[Receiver],
        save_in_background=in_background,
    )  # fmt: skip
    with pytest.warns(store.CheckpointWarning, match="No space left"):
        trainer.fit(problem.batches, max_length=Epochs(2))
    assert trainer.context.progress.epoch == 2
    assert reported == []


@pytest.mark.parametrize("in_background", [False, True])
def test_a_failed_checkpoint_is_not_recorded_as_written(problem: Problem, tmp_path: Path, in_background: bool) -> None:
    trainer = quiet(
        problem.model(), checkpoint_dir=tmp_path / "here", save_hist=False, save_in_background=in_background
    )
    (tmp_path / "here").write_text("in the way", encoding="ascii")
    with pytest.raises(CheckpointError):
        trainer.fit(problem.batches, max_length=Epochs(1))
    (tmp_path / "here").unlink()
    with pytest.warns(UserWarning, match="nothing to train"):
        trainer.fit(max_length=Epochs(1))
    assert [path.name for path in (tmp_path / "here").iterdir()] == ["ck_epoch_1_iter_12"]


def test_a_new_run_of_the_same_trainer_saves_its_last_and_best_checkpoint(problem: Problem, tmp_path: Path) -> None:
    ends: list[list[str]] = []
    for data in (problem.batches, None):
        trainer = quiet(problem.model(), checkpoint_dir=tmp_path, optimizer=partial(torch.optim.SGD, lr=0.1))
        for _ in range(2):
            reset(trainer)
            trainer.model.load_state_dict(problem.model().state_dict())
            trainer.fit(problem.batches, data, max_length=Epochs(1), checkpoint_period=Epochs(9))
            ends.append(sorted(path.name for path in tmp_path.iterdir()))
            for path in filter(Path.is_dir, tmp_path.iterdir()):
                shutil.rmtree(path)
    assert ends[0] == ends[1] == ["best_ck", "ck_epoch_1_iter_12", "ck_history.jsonl", "ck_run.jsonl"]
    assert ends[2] == ends[3] == ["ck_epoch_1_iter_12", "ck_history.jsonl", "ck_run.jsonl"]


def test_background_writing_gives_the_same_checkpoints(problem: Problem, tmp_path: Path) -> None:
    paths: dict[bool, list[str]] = {False: [], True: []}
    for in_background in (False, True):

        class Receiver(Callback):
            def on_checkpoint(
                self, context: TrainingContext, path: Path, received: list[str] = paths[in_background]
            ) -> None:
                assert path.exists()
                received.append(path.name)

        trainer = quiet(
            problem.model(dropout=0.2), seed=1, checkpoint_dir=tmp_path / str(in_background), keep_last=2,
            save_in_background=in_background, callbacks=[Receiver],
        )  # fmt: skip
        trainer.fit(problem.batches, problem.batches, max_length=Epochs(4))
    assert paths[False] == paths[True]
    for name in ("best_ck", "ck_epoch_4_iter_48", "ck_epoch_3_iter_36"):
        one, other = (store.load(tmp_path / str(kind) / name) for kind in (False, True))
        assert all(torch.equal(value, other["model"][key]) for key, value in one["model"].items())
        assert one["history"] == other["history"]
    assert periodic(tmp_path / "True") == [36, 48]


# ---------------------------------------------------------------------- changes that are fine


def test_batch_workers_device_and_length_may_change_on_resume(problem: Problem, tmp_path: Path) -> None:
    def trainer(**options: Any) -> Trainer:
        dataset = torch_data.TensorDataset(problem.x, problem.y)
        return quiet(
            problem.model(), train_dataset=dataset, batch_size=8, seed=2, checkpoint_dir=tmp_path / "cut", **options
        )

    whole = quiet(problem.model(), train_dataset=(problem.x, problem.y), batch_size=8, seed=2)
    whole.fit(max_length=Epochs(3))
    trainer(num_workers=0).fit(max_length=Epochs(1))
    resumed = trainer(num_workers=2, device_map="cpu", num_epochs=3)
    resumed.fit(resume="auto")
    assert_same_weights(resumed.model, whole.model)


def test_an_interrupted_run_exits_with_the_code_of_its_signal() -> None:
    for number, code in ((2, 130), (15, 143)):
        error = Interrupted(number)
        assert error.code == code
        assert isinstance(error, KeyboardInterrupt)
        assert isinstance(error, SystemExit)


def test_a_usual_run_emits_no_warning(problem: Problem, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quiet(problem.model(), checkpoint_dir=tmp_path, keep_last=1).fit(problem.batches, problem.batches)


def test_an_unknown_best_metric_suggests_the_nearest(problem: Problem, tmp_path: Path) -> None:
    trainer = quiet(problem.model(), checkpoint_dir=tmp_path, best_metric="val_loss")
    with pytest.raises(UnknownNameError, match="unknown metric for best_metric 'val_loss': did you mean 'valid_loss'"):
        trainer.fit(problem.batches, problem.batches, max_length=Epochs(1))
