from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from trials import Classifier, make

from dovetail import InvalidHP, pytorch
from dovetail.core import METRICS, DistributedContext, read_metrics
from dovetail.errors import ConfigError
from dovetail.info import ATTEMPT, HPARAMS_READ, VARIABLE, TrialInfo, write_info
from dovetail.pytorch import Batch, Epoch

StepMode = pytorch.LRScheduler.StepMode


def reported(folder: Path, monkeypatch: pytest.MonkeyPatch, **fields: Any) -> None:
    """Make this process believe that a launcher has started it."""
    path = folder / "info.json"
    write_info(path, TrialInfo(**{"trial_id": 3, **fields}))
    monkeypatch.setenv(VARIABLE, str(path))


# ------------------------------------------------------------------ where settings come from


def test_hyperparameters_are_read_from_the_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reported(tmp_path, monkeypatch, hparams={"lr": 0.1}, trial_seed=11, directory=str(tmp_path / "here"))
    context = pytorch.init()
    assert context.hparams == {"lr": 0.1}
    assert (context.get_trial_id(), context.get_trial_seed()) == (3, 11)
    assert context.directory == tmp_path / "here"


def test_launcher_hyperparameters_override_the_given_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reported(tmp_path, monkeypatch, hparams={"lr": 0.1, "net": {"width": 3}, "opt": "sgd"})
    given = {"lr": 0.5, "net": {"width": 8, "depth": 2}, "opt": {"name": "adam"}, "batch": 16}
    context = pytorch.init(hparams=given)
    assert context.hparams == {"lr": 0.1, "net": {"width": 3, "depth": 2}, "opt": "sgd", "batch": 16}
    assert given["net"] == {"width": 8, "depth": 2}


@pytest.mark.parametrize(
    ("use", "reads"),
    [
        (lambda context: context.get_experiment_config(), False),
        (lambda context: context.build_trial(Empty), False),
        (lambda context: context.hparams, True),
        (lambda context: context.training.hparams, True),
        (lambda context: context.get_hparams(), True),
        (lambda context: context.get_hparam("lr"), True),
        (lambda context: context.get_global_batch_size(), True),
        (lambda context: context.info.trial.hparams, True),
    ],
)
def test_the_runner_detects_whether_a_trial_read_its_hyperparameters(
    use: Any, reads: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported(tmp_path, monkeypatch, hparams={"lr": 0.1, "global_batch_size": 8}, directory=str(tmp_path / "here"))
    monkeypatch.setenv(ATTEMPT, str(tmp_path))
    use(pytorch.init(verbose=False))
    assert (tmp_path / HPARAMS_READ).exists() is reads


class Empty(pytorch.PyTorchTrial):
    """A trial that never uses its context."""

    def __init__(self, context: Any) -> None:
        self.context = context

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        raise NotImplementedError


def test_a_given_configuration_does_not_override_the_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reported(tmp_path, monkeypatch, hparams={"lr": 0.1})
    assert pytorch.init(exp_conf={"hyperparameters": {"lr": 0.5, "width": 3}}).hparams == {"lr": 0.1, "width": 3}


def test_a_given_seed_overrides_the_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reported(tmp_path, monkeypatch, trial_seed=11)
    assert pytorch.init(seed=1).get_trial_seed() == 1


def test_hyperparameters_are_read_from_a_configuration() -> None:
    config = {"hyperparameters": {"lr": {"type": "const", "val": 0.1}, "net": {"width": 3}}, "data": {"path": "x"}}
    context = pytorch.init(exp_conf=config)
    assert context.hparams == {"lr": 0.1, "net": {"width": 3}}
    assert context.config_data == context.get_data_config() == {"path": "x"}
    assert context.get_experiment_config() == config


def test_aggregation_is_read_from_a_configuration() -> None:
    assert pytorch.init(exp_conf={"optimizations": {"aggregation_frequency": 4}}).aggregation_frequency == 4
    with pytest.raises(ConfigError, match="aggregation_frequency: expected at least 1, got 0"):
        pytorch.init(hparams={}, aggregation_frequency=0)


@pytest.mark.parametrize("section", ["reproducibility", "optimizations", "searcher"])
def test_a_section_of_the_configuration_may_be_empty(section: str) -> None:
    trial, context = make(exp_conf={section: None})
    assert context.fit(trial, max_length=Batch(1))["loss"] > 0


@pytest.mark.parametrize("section", ["reproducibility", "optimizations", "searcher"])
def test_a_section_of_the_configuration_must_be_a_mapping(section: str) -> None:
    with pytest.raises(ConfigError, match=f"{section}: expected settings by name, got 'random'"):
        trial, context = make(exp_conf={section: "random"})
        context.fit(trial, max_length=Batch(1))


def test_a_job_rejects_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reported(tmp_path, monkeypatch, kind="job", config={"data": {"trial_id": 7}})
    context = pytorch.init()
    assert context.config_data["trial_id"] == 7
    with pytest.raises(ConfigError, match="this process runs a job"):
        _ = context.training


def test_records_per_epoch_is_not_ignored_silently() -> None:
    with pytest.warns(UserWarning, match="records_per_epoch is ignored"):
        pytorch.init(exp_conf={"records_per_epoch": 100})


def test_checkpoints_are_stored_where_the_configuration_specifies(tmp_path: Path) -> None:
    config = {"checkpoint_storage": {"type": "shared_fs", "host_path": str(tmp_path), "storage_path": "mine"}}
    assert pytorch.init(exp_conf=config).directory == tmp_path / "mine" / "trial_0"
    assert pytorch.init(hparams={}).directory == Path("checkpoints/trial_0")
    assert pytorch.init(hparams={}, checkpoint_dir=None).directory is None


def test_a_restarted_trial_resumes_automatically(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    straight, straight_context = make()
    straight_context.fit(straight, max_length=Epoch(2))
    folder = tmp_path / "run"
    reported(tmp_path, monkeypatch, directory=str(folder))
    first, first_context = make("auto")
    first_context.fit(first, max_length=Batch(8))
    reported(tmp_path, monkeypatch, directory=str(folder), latest_checkpoint=str(folder / "ck_epoch_1_iter_8"))
    second, second_context = make("auto")
    second_context.fit(second, max_length=Epoch(2))
    assert len(second.seen) == 4
    for one, other in zip(second.model.parameters(), straight.model.parameters(), strict=True):
        assert torch.equal(one, other)


# ------------------------------------------------------------------ batch sizes


def test_the_per_slot_batch_size_divides_the_global_one() -> None:
    context = pytorch.init(
        hparams={"global_batch_size": 8},
        distributed=DistributedContext(rank=1, size=4, local_rank=1, local_size=4),
        checkpoint_dir=None,
    )
    assert context.get_global_batch_size() == 8
    assert context.get_per_slot_batch_size() == context.distributed.shard_batch_size(8) == 2


def test_a_global_batch_size_must_be_a_number() -> None:
    context = pytorch.init(hparams={"global_batch_size": "8"}, checkpoint_dir=None)
    with pytest.raises(ConfigError, match="global_batch_size: expected a whole number that is at least 1, got '8'"):
        context.get_global_batch_size()


# ------------------------------------------------------------------ wrapping


def test_a_schedule_of_an_unwrapped_optimizer_is_rejected() -> None:
    context = pytorch.init(hparams={}, checkpoint_dir=None)
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    with pytest.raises(ConfigError, match="call wrap_optimizer first"):
        context.wrap_lr_scheduler(StepLR(optimizer, 1), StepMode.STEP_EVERY_EPOCH)


def test_a_plateau_schedule_requires_manual_steps() -> None:
    context = pytorch.init(hparams={}, checkpoint_dir=None)
    model = context.wrap_model(nn.Linear(1, 1))
    optimizer = context.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ConfigError, match="MANUAL_STEP for ReduceLROnPlateau"):
        context.wrap_lr_scheduler(ReduceLROnPlateau(optimizer), StepMode.STEP_EVERY_EPOCH)


def test_compression_is_not_ignored_silently() -> None:
    context = pytorch.init(hparams={}, checkpoint_dir=None)
    model = context.wrap_model(nn.Linear(1, 1))
    with pytest.warns(UserWarning, match="full precision"):
        context.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), fp16_compression=True)


def test_apex_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"call context\.experimental\.use_amp\(\), or wrap_scaler with a scaler"):
        pytorch.init(hparams={}, checkpoint_dir=None).configure_apex_amp(None, None, opt_level="O1")


def test_a_scaler_that_was_not_wrapped_is_rejected() -> None:
    class Scaled(Classifier):
        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            loss = nn.functional.cross_entropy(self.model(batch[0]), batch[1])
            self.context.backward(loss)
            self.context.step_optimizer(self.optimizer, scaler=torch.amp.GradScaler("cpu"))
            return loss

    trial, context = make(trial_class=Scaled)
    with pytest.raises(ConfigError, match="expected the scaler that wrap_scaler was given, got another one"):
        context.fit(trial, max_length=Batch(1))


def test_backward_accepts_the_arguments_of_torch() -> None:
    class Twice(Classifier):
        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            losses = nn.functional.cross_entropy(self.model(batch[0]), batch[1], reduction="none")
            weights = torch.full_like(losses, 0.5 / len(losses))
            self.context.backward(losses, gradient=weights, retain_graph=True)
            self.context.backward(losses, gradient=weights)
            self.context.step_optimizer(self.optimizer)
            return losses.mean()

    once, once_context = make()
    once_context.fit(once, max_length=Batch(3))
    twice, twice_context = make(trial_class=Twice)
    twice_context.fit(twice, max_length=Batch(3))
    for one, other in zip(once.model.parameters(), twice.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-14)


def test_gradients_are_kept_if_the_trial_clears_them() -> None:
    class Keeping(Classifier):
        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            loss = nn.functional.cross_entropy(self.model(batch[0]), batch[1])
            self.context.backward(loss)
            self.context.step_optimizer(self.optimizer, auto_zero_grads=batch_idx == 1)
            self.kept.append(self.model[0].weight.grad is not None)
            return loss

        kept: list[bool]

    trial, context = make(trial_class=Keeping, change=lambda it: setattr(it, "kept", []))
    context.fit(trial, max_length=Batch(2))
    assert trial.kept == [True, False]


def test_batches_are_not_moved_if_the_trial_moves_them() -> None:
    class Moving(Classifier):
        def __init__(self, context: Any) -> None:
            super().__init__(context)
            context.experimental.disable_auto_to_device()

        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            return super().train_batch(self.context.to_device(batch), epoch_idx, batch_idx)

    trial, context = make(trial_class=Moving)
    moved: list[Any] = []
    adapter = context._trainer(trial).adapter
    adapter._move = lambda batch, device: moved.append(batch) or batch
    context.fit(trial, max_length=Batch(2))
    assert len(trial.seen) == 2
    assert moved == []


def test_a_stop_request_cannot_be_withdrawn() -> None:
    class Wavering(Classifier):
        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            self.context.set_stop_requested(False)
            self.context.set_stop_requested(True)
            self.context.set_stop_requested(False)
            return super().train_batch(batch, epoch_idx, batch_idx)

    trial, context = make(trial_class=Wavering)
    with pytest.raises(ConfigError, match="cannot be withdrawn"):
        context.fit(trial, max_length=Batch(1))


class Unwilling(Classifier):
    def __init__(self, context: pytorch.PyTorchTrialContext) -> None:
        context.set_stop_requested(True)
        super().__init__(context)


@pytest.mark.parametrize(("aggregation", "batches"), [(1, 1), (3, 3)])
def test_a_stop_requested_in_the_constructor_ends_after_the_first_update(
    aggregation: int, batches: int, tmp_path: Path
) -> None:
    trial, context = make(tmp_path, trial_class=Unwilling, aggregation_frequency=aggregation)
    assert trial.context.get_stop_requested()
    assert "accuracy" in context.fit(trial, max_length=Epoch(3))
    assert len(trial.seen) == batches
    # The request has been fulfilled.
    assert not trial.context.get_stop_requested()
    context.fit(trial, max_length=Epoch(1))
    assert len(trial.seen) == 6


def test_a_stop_requested_between_trainer_and_fit_is_kept() -> None:
    with pytorch.init(hparams={}, checkpoint_dir=None, verbose=False) as context:
        trial = Classifier(context)
        trainer = pytorch.Trainer(trial, context)
        context.set_stop_requested(True)
        trainer.fit(max_length=Epoch(3))
    assert len(trial.seen) == 1


def test_a_stop_requested_before_training_can_be_withdrawn() -> None:
    trial, context = make(trial_class=Unwilling)
    trial.context.set_stop_requested(False)
    context.fit(trial, max_length=Batch(2))
    assert len(trial.seen) == 2


def test_a_trial_may_differentiate_and_return_a_loss_with_one_element(tmp_path: Path) -> None:
    class OneElement(Classifier):
        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            loss = nn.functional.cross_entropy(self.model(batch[0]), batch[1]).reshape(1)
            self.context.backward(loss)
            self.context.step_optimizer(self.optimizer)
            return {"loss": loss}

    class Automatic(Classifier):
        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            return nn.functional.cross_entropy(self.model(batch[0]), batch[1]).reshape(1)

    rows = []
    for kind in (Classifier, OneElement, Automatic):
        trial, context = make(tmp_path / kind.__name__, trial_class=kind)
        context.fit(trial, max_length=Epoch(2))
        reports = read_metrics(tmp_path / kind.__name__ / "trial_0" / METRICS)
        rows.append([row["metrics"] for row in reports if "metrics" in row])
    assert rows[0] == rows[1] == rows[2]


def test_the_other_processes_receive_the_reason_of_the_exit() -> None:
    class Listening(DistributedContext):
        reason: BaseException | None = None

        def close(self, error: BaseException | None = None) -> None:
            self.reason = error
            super().close(error)

    peers = Listening()
    with pytest.raises(ArithmeticError) as caught, pytorch.init(hparams={}, distributed=peers, checkpoint_dir=None):
        raise ArithmeticError("no luck")
    assert peers.reason is caught.value


# ------------------------------------------------------------------ what is written


def test_reports_are_written_line_by_line(tmp_path: Path) -> None:
    trial, context = make(tmp_path)
    metrics = context.fit(trial, max_length=Epoch(1), reporting_period=Batch(4))
    rows = read_metrics(tmp_path / "trial_0" / "metrics.jsonl")
    assert [(row["group"], row["steps_completed"]) if "group" in row else row["progress"] for row in rows] == [
        *(("training", 4), 4 / 6),
        *(("training", 6), 1.0),
        ("validation", 6),
    ]
    assert rows[-1]["metrics"] == {**metrics, "epochs": 1}


@pytest.mark.parametrize(("max_length", "expected"), [(Epoch(2), [1 / 3, 2 / 3, 1]), (Batch(10), [0.4, 0.8, 1])])
def test_progress_is_a_fraction_of_the_length(tmp_path: Path, max_length: Any, expected: list[float]) -> None:
    trial, context = make(tmp_path)
    context.fit(trial, max_length=max_length, reporting_period=Batch(4))
    rows = read_metrics(tmp_path / "trial_0" / "metrics.jsonl")
    assert [row["progress"] for row in rows if "progress" in row] == pytest.approx(expected)


def test_tensorboard_has_the_reports_and_the_scalars_of_the_trial(tmp_path: Path) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")

    class Writing(Classifier):
        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            self.context.get_tensorboard_writer().add_scalar("mine", batch_idx, batch_idx)
            return super().train_batch(batch, epoch_idx, batch_idx)

    trial, context = make(tmp_path, trial_class=Writing)
    metrics = context.fit(trial, max_length=Epoch(1))
    found = events.EventAccumulator(str(trial.made_with.get_tensorboard_path()))
    found.Reload()
    assert [event.value for event in found.Scalars("mine")] == [0, 1, 2, 3, 4, 5]
    assert found.Scalars("validation/loss")[-1].value == pytest.approx(metrics["loss"])
    assert found.Scalars("training/loss")[-1].step == 6


def test_without_storage_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    trial, context = make()
    context.fit(trial, max_length=Epoch(1))
    assert list(tmp_path.iterdir()) == []


def test_a_profile_is_written_on_request(tmp_path: Path) -> None:
    trial, context = make(tmp_path)
    context.fit(trial, max_length=Epoch(1), profiling_enabled=True)
    assert (tmp_path / "trial_0" / "profile" / "trace_1.json").exists()


@pytest.mark.parametrize(("given", "profiles"), [(None, True), (False, False)])
def test_the_configuration_may_enable_a_profile(tmp_path: Path, given: bool | None, profiles: bool) -> None:
    trial, context = make(tmp_path, exp_conf={"profiling": {"enabled": True}})
    context.fit(trial, max_length=Epoch(1), profiling_enabled=given)
    assert (tmp_path / "trial_0" / "profile").exists() is profiles


def test_a_profiler_of_the_trial_steps_with_every_batch(tmp_path: Path) -> None:
    steps: list[int] = []

    class Profiled(Classifier):
        def __init__(self, context: Any) -> None:
            super().__init__(context)
            context.set_profiler(
                schedule=lambda step: steps.append(step) or torch.profiler.ProfilerAction.NONE,
                activities=[torch.profiler.ProfilerActivity.CPU],
            )

    trial, context = make(tmp_path, trial_class=Profiled)
    context.fit(trial, max_length=Batch(4))
    assert max(steps) == 4


def test_hyperparameters_rejected_by_a_trial_are_recorded(tmp_path: Path) -> None:
    class Refusing(Classifier):
        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            raise InvalidHP("too wide")

    trial, context = make(tmp_path, trial_class=Refusing)
    with pytest.raises(InvalidHP, match="too wide"):
        context.fit(trial, max_length=Batch(1))
    assert read_metrics(tmp_path / "trial_0" / "metrics.jsonl")[-1]["exited"] == "INVALID_HP"
