from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import Optimizer

from dovetail.callbacks import Callback, LambdaCallback
from dovetail.errors import ConfigError
from dovetail.tracking import (
    CometLogger,
    FolderLogger,
    Histogram,
    Logger,
    MLflowLogger,
    NeptuneLogger,
    TensorBoardLogger,
    Tracker,
    TrackioLogger,
    WandBLogger,
)
from dovetail.trainers.basic import Trainer
from dovetail.trainers.context import TrainingContext
from dovetail.trainers.reuse import reset
from dovetail.units import Batches, Epochs


def test_the_logged_metrics_equal_the_history(make: Callable[..., Any], memory: type[Any]) -> None:
    logger = memory()
    history = make(Tracker(logger)).fit(max_length=Epochs(3))
    for name in ("train_loss", "valid_loss", "valid_accuracy"):
        assert logger.series(name) == list(zip([5, 10, 15], history.get_metric_values(name), strict=True))
    assert logger.series("epoch") == [(5, 1), (10, 2), (15, 3)]


def test_running_means_and_rates_are_logged_at_every_report(make: Callable[..., Any], memory: type[Any]) -> None:
    logger = memory()
    history = make(Tracker(logger)).fit(max_length=Epochs(1))
    first, second, last = logger.series("running_loss")
    assert [step for step, _ in (first, second, last)] == [2, 4, 5]
    assert first[1] == pytest.approx(sum(history.losses[:2]) / 2)
    assert logger.series("lr/group0") == [(2, 0.1), (4, 0.1), (5, 0.1)]


def test_validations_inside_an_epoch_are_logged_at_their_step(make: Callable[..., Any], memory: type[Any]) -> None:
    logger = memory()
    make(Tracker(logger)).fit(max_length=Epochs(1), validation_period=Batches(2))
    assert [step for step, _ in logger.series("valid_loss")] == [2, 4, 5]


def test_no_metric_has_two_values_at_one_step(make: Callable[..., Any], memory: type[Any]) -> None:
    logger = memory()
    make(Tracker(logger, histograms_every=2)).fit(max_length=Epochs(2), validation_period=Batches(5))
    seen = [(step, name) for step, values in logger.rows for name in values]
    assert len(seen) == len(set(seen))


def test_steps_never_decrease(make: Callable[..., Any], memory: type[Any]) -> None:
    logger = memory()
    make(Tracker(logger, histograms_every=1)).fit(max_length=Epochs(2), validation_period=Batches(2))
    steps = [step for step, _ in logger.rows]
    assert steps == sorted(steps)


def test_hyperparameters_of_the_trainer_and_the_user_are_logged(make: Callable[..., Any], memory: type[Any]) -> None:
    logger = memory()
    make(Tracker(logger, hyperparameters={"note": "first", "token": "hunter2"})).fit(max_length=Epochs(1))
    found = logger.runs[0].hyperparameters
    assert (found["note"], found["token"], found["batch_size"], found["optimizer.lr"]) == ("first", "***", 8, 0.1)


def test_histograms_are_computed_only_on_request(make: Callable[..., Any], memory: type[Any]) -> None:
    logger = memory()
    make(Tracker(logger)).fit(max_length=Epochs(1))
    assert not any(isinstance(value, Histogram) for _, values in logger.rows for value in values.values())


def test_histograms_show_weights_and_the_gradients_of_their_update(make: Callable[..., Any], memory: type[Any]) -> None:
    logger = memory()
    gradients, weights = [], []

    def first_weight(context: TrainingContext) -> Any:
        model: Any = context.model
        return model[0].weight

    class Watch(Callback):
        def on_gradients(self, context: TrainingContext, optimizer: Optimizer) -> None:
            gradients.append(first_weight(context).grad.clone())

        def on_update(self, context: TrainingContext) -> None:
            weights.append(first_weight(context).detach().clone())

    make(Tracker(logger, histograms_every=2), Watch()).fit(max_length=Epochs(1))
    for name, tensors in (("gradients/0.weight", gradients), ("weights/0.weight", weights)):
        (step, first), (_, second) = logger.series(name)
        assert step == 2
        assert first.as_dict() == Histogram(tensors[1]).as_dict()
        assert second.as_dict() == Histogram(tensors[3]).as_dict()


def test_gradients_of_a_skipped_step_are_not_logged(make: Callable[..., Any], memory: type[Any]) -> None:
    logger = memory()

    class Skipping(Trainer):
        def optimizer_step(self, optimizer: Optimizer) -> bool:
            return super().optimizer_step(optimizer) if self.context.progress.batches != 1 else False

    make(Tracker(logger, histograms_every=1), kind=Skipping).fit(max_length=Epochs(1))
    assert [step for step, _ in logger.series("gradients/0.weight")] == [1, 3, 4, 5]


def test_a_user_figure_is_logged_at_the_current_step(make: Callable[..., Any], memory: type[Any], figure: Any) -> None:
    logger = memory()
    tracker = Tracker(logger)
    draw = LambdaCallback(on_validation_end=lambda context, metrics: tracker.log_figure("valid/confusion", figure))
    make(tracker, draw).fit(max_length=Epochs(2))
    assert logger.series("valid/confusion") == [(5, figure), (10, figure)]


def test_user_values_are_logged(make: Callable[..., Any], memory: type[Any]) -> None:
    logger = memory()
    tracker = Tracker(logger)
    mine: dict[str, Any] = {"mine": torch.tensor(3.0)}
    count = LambdaCallback(on_epoch_end=lambda context, metrics: tracker.log(mine, step=99))
    make(tracker, count).fit(max_length=Epochs(1))
    assert logger.series("mine") == [(99, torch.tensor(3.0))]


def test_logging_outside_training_is_an_error(make: Callable[..., Any], memory: type[Any]) -> None:
    tracker = Tracker(memory())
    with pytest.raises(ConfigError, match="no run is open"):
        tracker.log({"x": 1.0})
    make(tracker).fit(max_length=Epochs(1))
    with pytest.raises(ConfigError, match="no run is open"):
        tracker.log({"x": 1.0})


def test_a_completed_run_has_the_status_finished(make: Callable[..., Any], memory: type[Any]) -> None:
    logger = memory()
    make(Tracker(logger)).fit(max_length=Epochs(1))
    assert logger.statuses == ["finished"]


@pytest.mark.parametrize("error", [ArithmeticError("no"), KeyboardInterrupt()])
def test_an_interrupted_run_has_the_status_failed(make: Callable[..., Any], memory: type[Any], error: Any) -> None:
    def fail(context: TrainingContext, metrics: Any) -> None:
        raise error

    logger = memory()
    with pytest.raises(type(error)):
        make(Tracker(logger), LambdaCallback(on_epoch_end=fail)).fit(max_length=Epochs(1))
    assert logger.statuses == ["failed"]


@pytest.mark.parametrize(("method", "calls"), [("start", ["start"]), ("log", ["start", "log", "finish"])])
def test_a_failing_logger_warns_once_and_is_disabled(
    make: Callable[..., Any], memory: type[Any], method: Any, calls: Any
) -> None:
    broken, working, straight = memory(fails_in=method), memory(), make()
    trainer = make(Tracker(broken, working))
    with pytest.warns(UserWarning, match="is disabled") as reported:
        trainer.fit(max_length=Epochs(2))
    assert [str(warning.message) for warning in reported] == [
        f"Memory is disabled for the rest of this run, and training continues: {method} failed with ConnectionError: "
        "no route to host"
    ]
    assert broken.calls == calls
    assert [step for step, _ in working.series("train_loss")] == [5, 10]
    straight.fit(max_length=Epochs(2))
    assert trainer.history == straight.history


def test_a_logger_that_cannot_finish_warns_once(make: Callable[..., Any], memory: type[Any]) -> None:
    with pytest.warns(UserWarning, match="finish failed with ConnectionError: no route to host$") as reported:
        make(Tracker(memory(fails_in="finish"))).fit(max_length=Epochs(1))
    assert len(reported) == 1


def test_a_warning_contains_no_password(make: Callable[..., Any]) -> None:
    class Refused(Logger):
        def start(self, run: Any) -> None:
            raise PermissionError("cannot log in at https://me:hunter2@example.org/api")

        def log(self, values: Any, step: Any) -> None: ...

        def finish(self, status: Any) -> None: ...

    with pytest.warns(UserWarning, match=r"cannot log in at https://\*\*\*@example\.org/api$"):
        make(Tracker(Refused())).fit(max_length=Epochs(1))


def test_a_failed_logger_is_tried_again_in_the_next_run(make: Callable[..., Any], memory: type[Any]) -> None:
    logger = memory(fails_in="log")
    trainer = make(Tracker(logger))
    with pytest.warns(UserWarning, match="is disabled"):
        trainer.fit(max_length=Epochs(1))
    logger.fails_in = ""
    trainer.fit(max_length=Epochs(2))
    assert [step for step, _ in logger.series("train_loss")] == [10]


def test_a_further_fit_continues_the_same_run(make: Callable[..., Any], memory: type[Any]) -> None:
    logger = memory()
    trainer = make(Tracker(logger))
    trainer.fit(max_length=Epochs(1))
    trainer.fit(max_length=Epochs(3))
    first, second = logger.runs
    assert (first.id, first.step) == (second.id, 0)
    assert second.step == 5


def test_a_resumed_run_keeps_its_run_id(make: Callable[..., Any], memory: type[Any]) -> None:
    states, before, after = [], memory(), memory()
    keep = LambdaCallback(
        on_epoch_end=lambda context, _: states.append(copy.deepcopy(context.run.trainer.state_dict()))
    )
    make(Tracker(before), keep).fit(max_length=Epochs(2))
    resumed = make(Tracker(after))
    resumed.load_state_dict(states[0])
    resumed.fit(max_length=Epochs(2))
    assert after.runs[0].id == before.runs[0].id
    assert after.runs[0].step == 5
    assert after.series("train_loss") == before.series("train_loss")[1:]


def test_a_reset_trainer_starts_a_new_run(make: Callable[..., Any], memory: type[Any]) -> None:
    logger = memory()
    trainer = make(Tracker(logger))
    trainer.fit(max_length=Epochs(1))
    reset(trainer)
    trainer.fit(max_length=Epochs(1))
    assert logger.runs[0].id != logger.runs[1].id
    assert logger.runs[1].step == 0


def test_an_evaluation_logs_nothing(make: Callable[..., Any], memory: type[Any]) -> None:
    logger = memory()
    trainer = make(Tracker(logger))
    trainer.fit(max_length=Epochs(1))
    number = len(logger.calls)
    trainer.evaluate(trainer.options.val_dataset)
    assert len(logger.calls) == number


def test_tracking_does_not_change_training(make: Callable[..., Any], memory: type[Any]) -> None:
    tracked, alone = make(Tracker(memory(), histograms_every=1)), make()
    tracked.fit(max_length=Epochs(2))
    alone.fit(max_length=Epochs(2))
    assert tracked.history == alone.history


def test_a_tracker_with_all_loggers_can_be_sent_to_another_process(tmp_path: Path) -> None:
    loggers = (
        FolderLogger(tmp_path),
        TensorBoardLogger(tmp_path),
        WandBLogger("p"),
        NeptuneLogger("p"),
        MLflowLogger("p"),
        TrackioLogger("p"),
        CometLogger("p"),
    )
    copied = pickle.loads(pickle.dumps(Tracker(*loggers, histograms_every=3)))
    assert [type(logger) for logger in copied.loggers] == [type(logger) for logger in loggers]
    assert copied.histograms_every == 3


def test_a_tracker_that_has_run_can_be_sent_to_another_process(make: Callable[..., Any], tmp_path: Path) -> None:
    logger = FolderLogger(tmp_path)
    tracker = Tracker(logger)
    make(tracker).fit(max_length=Epochs(1))
    assert pickle.loads(pickle.dumps(tracker)).loggers[0].path == logger.path


def test_the_tracker_rejects_invalid_arguments_by_name() -> None:
    with pytest.raises(ConfigError, match=r"expected loggers such as .*, got 'runs'"):
        Tracker("runs")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="histograms_every: expected a number of updates"):
        Tracker(histograms_every=-1)


def test_only_the_main_rank_writes(make: Callable[..., Any], memory: type[Any]) -> None:
    logger = memory()
    trainer = make(Tracker(logger, histograms_every=1))
    trainer.context.callbacks.mute(is_main=False)
    trainer.fit(max_length=Epochs(1))
    assert logger.calls == []


def test_a_user_callback_may_log_on_every_rank() -> None:
    fake = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    dist = torch.distributed
    dist.init_process_group("fake", rank=1, world_size=2, store=fake.FakeStore())
    try:
        Tracker().log({"x": 1.0})
        with pytest.raises(ConfigError, match="expected a number"):
            Tracker().log({"x": "one"})  # type: ignore[dict-item]
    finally:
        dist.destroy_process_group()


def test_a_tracker_without_loggers_warns(make: Callable[..., Any]) -> None:
    with pytest.warns(UserWarning, match="Tracker has no loggers, so nothing is logged"):
        make(Tracker()).fit(max_length=Epochs(1))
