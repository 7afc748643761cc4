from __future__ import annotations

import multiprocessing
import os
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from errands import Drift, FailsAtBatch, KillsItself, LifeCycle, PressesControlC, RecordsProcess, SpeakingTrainer
from problem import Problem, make_problem
from torch import Tensor
from torch.optim import AdamW
from torch.optim.lr_scheduler import StepLR

from dovetail.callbacks import EMA, LambdaCallback
from dovetail.errors import CheckpointError, ConfigError
from dovetail.trainers import Trainer
from dovetail.trainers.composable import ComposableTrainer
from dovetail.trainers.processes import ConcurrencyLimit, RemoteJob, TrainingProcessError
from dovetail.trainers.randomness import rng_state
from dovetail.trainers.strategies import StateTrackingUpdateStrategy


def make_trainer(problem: Problem, *further: Any, **options: Any) -> SpeakingTrainer:
    torch.manual_seed(3)
    settings: dict[str, Any] = {
        "optimizer_strategy": partial(AdamW, lr=0.01),
        "lr_scheduler_strategy": partial(StepLR, step_size=1, gamma=0.5),
        "model_update_strategy": [StateTrackingUpdateStrategy(), Drift(), *further],
        "val_dataset": (problem.x, problem.y),
        "num_epochs": 2,
        "batch_size": 8,
        "verbose": False,
    }
    return SpeakingTrainer(problem.model(dropout=0.3), **(settings | options))


def plain(value: Any) -> Any:
    """What can be compared with `==`: tensors as their bytes; without the name that every run has for itself."""
    if isinstance(value, Tensor):
        return str(value.dtype), tuple(value.shape), value.contiguous().numpy().tobytes()
    if isinstance(value, dict):
        return {key: plain(it) for key, it in value.items() if key != "run_id"}
    if isinstance(value, (list, tuple)):
        return [plain(it) for it in value]
    return value.tobytes() if type(value).__module__ == "numpy" else value


@dataclass
class Twins:
    """The same training twice: in this process, and in a separate one."""

    here: SpeakingTrainer
    elsewhere: SpeakingTrainer
    module: Any
    rng: list[Any]
    torn_down_by: list[int]
    left_behind: list[str]
    seconds: float


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Twins]:
    problem, folder = make_problem(), tmp_path_factory.mktemp("processes")
    temporary = folder / "temporary"
    temporary.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(temporary))
        # How torch computes reaches the other process.
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high")
        trainers, rng, seconds = [], [], 0.0
        for name, limit in (("here", None), ("elsewhere", 2)):
            trainer = make_trainer(
                problem,
                LifeCycle(str(folder / name)),
                callbacks=[EMA(0.9)],
                max_concurrency=limit,
            )
            module = trainer.model
            seconds = trainer.train((problem.x, problem.y), range(50))
            rng.append(rng_state())
            trainer.close()
            trainers.append(trainer)
        torch.set_float32_matmul_precision(before)
        torn_down_by = [int(line) for line in (folder / "elsewhere").read_text().split()]
        yield Twins(*trainers, module, rng, torn_down_by, [it.name for it in temporary.glob("dovetail-*")], seconds)


@pytest.mark.slow
class TestAfterTrainingElsewhere:
    def test_the_state_equals_local_training_to_the_last_bit(self, twins: Twins) -> None:
        assert plain(twins.elsewhere.state_dict()) == plain(twins.here.state_dict())

    def test_the_history_includes_values_written_by_a_trainer_hook(self, twins: Twins) -> None:
        assert twins.elsewhere.history.get_metric_values("spoken") == [1.0, 2.0]

    def test_the_module_of_the_caller_is_trained(self, twins: Twins) -> None:
        assert twins.elsewhere.model is twins.module
        assert plain(twins.module.state_dict()) == plain(twins.here.model.state_dict())

    def test_the_rng_of_the_caller_continues_after_training_in_a_process(self, twins: Twins) -> None:
        assert plain(twins.rng[1]) == plain(twins.rng[0])

    def test_the_payload_of_the_update_strategy_is_returned(self, twins: Twins) -> None:
        payload = twins.elsewhere.update_payload
        assert plain(payload) == plain(twins.here.update_payload)
        assert payload["total_steps"] == 14
        assert all(bool(moved.abs().sum() > 0) for moved in payload["drift"])

    def test_shared_values_of_strategies_are_returned(self, twins: Twins) -> None:
        here = {name: it for name, it in twins.here.context.state.items() if name != "train_loader"}
        assert plain(twins.elsewhere.context.state) == plain(here)

    def test_strategies_are_torn_down_once_by_the_caller(self, twins: Twins) -> None:
        assert twins.torn_down_by == [os.getpid()]

    def test_training_in_a_process_leaves_no_file(self, twins: Twins) -> None:
        assert twins.left_behind == []

    def test_the_reported_seconds_are_the_training_time(self, twins: Twins) -> None:
        assert 0 < twins.seconds < 60


@pytest.mark.slow
def test_training_in_a_process_after_a_local_round_gives_the_same_update(problem: Problem, capfd: Any) -> None:
    def update(limit: int | None) -> Any:
        trainer = make_trainer(problem, max_concurrency=limit, verbose=True)
        trainer.train_model({"epochs": 1, "batch_size": 16}, (problem.x, problem.y))
        assert "epoch 1/1" in capfd.readouterr().out
        return trainer.obtain_model_update({"epochs": 2}, (problem.x, problem.y), range(40))

    here = update(None)
    assert plain(update(1)) == plain(here)
    assert capfd.readouterr().out == ""
    assert set(here) == {"model_update", "total_steps", "epoch_steps", "round_number", "drift"}
    assert here["round_number"] == 2


@pytest.mark.slow
def test_an_error_in_the_process_has_its_traceback_and_changes_nothing(problem: Problem) -> None:
    error = CheckpointError("no such luck")
    trainer = make_trainer(problem, loss_strategy=FailsAtBatch(3, error), max_concurrency=1)
    before = plain(trainer.model.state_dict())
    with pytest.raises(CheckpointError, match="no such luck") as caught:
        trainer.train((problem.x, problem.y))
    assert str(caught.value) == "no such luck"
    notes = "\n".join(caught.value.__notes__)
    assert 'errands.py", line' in notes
    assert "in compute_loss" in notes
    assert plain(trainer.model.state_dict()) == before
    assert trainer.context.progress.batches == 0


@pytest.mark.slow
def test_a_killed_process_is_reported_with_its_signal(problem: Problem) -> None:
    trainer = make_trainer(problem, callbacks=[KillsItself], max_concurrency=1)
    with pytest.raises(TrainingProcessError, match="ended by SIGKILL"):
        trainer.train((problem.x, problem.y))


@pytest.mark.slow
def test_ctrl_c_ends_the_training_process_after_its_update(problem: Problem, tmp_path: Path) -> None:
    ending = tmp_path / "ending"
    endless = {"num_epochs": 10**9, "val_dataset": None}
    trainer = make_trainer(problem, callbacks=[PressesControlC(str(ending))], max_concurrency=1, **endless)
    with pytest.raises(KeyboardInterrupt):
        trainer.train((problem.x, problem.y))
    assert multiprocessing.active_children() == []
    assert ending.read_text() == "Interrupted(143)"


# ------------------------------------------------------------------ without a process


def test_a_run_continued_in_a_process_equals_one_continued_locally(problem: Problem, tmp_path: Path) -> None:
    def started(name: str) -> SpeakingTrainer:
        trainer = make_trainer(problem, checkpoint_dir=tmp_path / name, train_dataset=(problem.x, problem.y))
        trainer.train()
        trainer.options.num_epochs = 4
        return trainer

    here = started("here")
    here.train()
    elsewhere = started("elsewhere")
    job = RemoteJob(elsewhere, None, None)
    job.take(RemoteJob.unpack(job.pack()).run())
    assert plain(elsewhere.state_dict()) == plain(here.state_dict())
    assert elsewhere.context.progress.epoch == 4


def test_a_copy_in_another_process_shares_no_memory(problem: Problem) -> None:
    trainer = make_trainer(problem)
    job = RemoteJob(trainer, (problem.x, problem.y), None)
    before = plain(trainer.model.state_dict())
    RemoteJob.unpack(job.pack()).run()
    assert plain(trainer.model.state_dict()) == before
    assert not any(it.is_shared() for it in trainer.model.parameters())


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"loss_strategy": lambda outputs, labels: outputs.sum()}, r"loss_strategy \(CallableLossStrategy\) cannot"),
        ({"callbacks": [LambdaCallback(on_train_end=lambda context: None)]}, r"the callback \(LambdaCallback\) cannot"),
        ({"val_dataset": (it for it in ())}, r"the valid data \(generator\) cannot"),
    ],
)
def test_an_object_that_cannot_be_sent_is_named(problem: Problem, settings: dict[str, Any], sentence: str) -> None:
    trainer = make_trainer(problem, **settings, max_concurrency=1)
    with pytest.raises(ConfigError, match=sentence):
        trainer.train((problem.x, problem.y))


@pytest.mark.slow
def test_a_basic_trainer_in_a_process_gives_the_same_bits(problem: Problem) -> None:
    states, generators = [], []
    for limit in (None, 1):
        torch.manual_seed(3)
        trainer = Trainer(
            problem.model(dropout=0.3),
            "cpu",
            optim_function="Adam",
            learning_rate=0.01,
            lr_scheduler=partial(StepLR, step_size=1, gamma=0.5),
            val_dataset=(problem.x, problem.y),
            num_epochs=2,
            batch_size=8,
            save_every=0,
            verbose=False,
            callbacks=[RecordsProcess],
            max_concurrency=limit,
        )
        module = trainer.model
        assert trainer.train((problem.x, problem.y), range(50)) > 0
        assert trainer.model is module
        assert (trainer.context.state["pid"] == os.getpid()) == (limit is None)
        trainer.options.num_epochs = 3
        trainer.train()
        assert trainer.context.progress.epoch == 3
        states.append(plain(trainer.state_dict()))
        generators.append(plain(rng_state()))
    assert states[0] == states[1]
    assert generators[0] == generators[1]


def test_no_more_processes_run_at_once_than_the_limit() -> None:
    limiter, most = ConcurrencyLimit(), []
    meeting = threading.Barrier(2)

    def work() -> None:
        with limiter.enter(limit=2):
            most.append(limiter.num_active)
            # Passes only while two are inside.
            meeting.wait(timeout=120)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(most) == 6
    assert max(most) == 2
    assert limiter.num_active == 0


def test_a_slot_of_the_limit_is_released_after_an_error() -> None:
    limiter = ConcurrencyLimit()
    with pytest.raises(ValueError, match="failed"), limiter.enter(limit=1):
        raise ValueError("failed")
    assert limiter.num_active == 0


@pytest.mark.parametrize("limit", [0, -1, True, 1.5])
def test_an_invalid_process_limit_is_rejected(problem: Problem, limit: Any) -> None:
    with pytest.raises(ConfigError, match="max_concurrency: expected None or a whole number that is at least 1"):
        ComposableTrainer(problem.model(), max_concurrency=limit)
