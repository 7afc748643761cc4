from __future__ import annotations

import copy
import gc
import weakref
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from problem import assert_same_weights
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR, StepLR
from torch.utils.data import DataLoader as TorchLoader
from trials import NUM_TRAINED, Classifier, make, make_data

from dovetail import Epochs, Records, checkpoint, pytorch
from dovetail.core.train import read_metrics
from dovetail.errors import CheckpointError, ConfigError, DataError
from dovetail.pytorch import Batch, Epoch, PyTorchCallback, Trainer
from dovetail.pytorch.hyperparameters import MissingHyperparameterError

StepMode = pytorch.LRScheduler.StepMode
BATCHES = -(-NUM_TRAINED // 8)


def by_hand(epochs: int, order: list[list[int]] | None = None) -> nn.Module:
    """The classifier, trained by a hand-written loop."""
    trial, _ = make()
    x, y = make_data(NUM_TRAINED).tensors
    model: nn.Module = trial.model
    optimizer = trial.optimizer
    for epoch in range(epochs):
        rows = torch.arange(NUM_TRAINED) if order is None else torch.tensor(order[epoch])
        for part in rows.split(8):  # type: ignore[no-untyped-call]
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[part]), y[part]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return model


# ------------------------------------------------------------------ training


def test_a_trial_trains_as_a_hand_written_loop() -> None:
    trial, context = make(hparams={"shuffle": False})
    context.fit(trial, max_length=Epoch(3))
    assert_same_weights(trial.model, by_hand(3))


def test_our_spelling_and_that_of_the_seed_document_agree() -> None:
    trial, context = make()
    metrics = Trainer(trial, context).fit(max_length=Epoch(2))
    other, other_context = make()
    assert other_context.train(other, max_length=Epochs(2)) == metrics
    assert_same_weights(trial.model, other.model)


def test_a_trial_that_calls_no_optimizer_is_optimized_by_the_loop() -> None:
    class Lazy(Classifier):
        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            return nn.functional.cross_entropy(self.model(batch[0]), batch[1])

    trial, context = make(trial_class=Lazy, hparams={"shuffle": False})
    context.fit(trial, max_length=Epoch(3))
    assert_same_weights(trial.model, by_hand(3))


def test_data_given_to_fit_replaces_that_of_the_trial() -> None:
    trial, context = make()
    data = list(zip(*(each.split(8) for each in make_data(NUM_TRAINED).tensors), strict=True))  # type: ignore[no-untyped-call]
    context.fit(trial, data, data, max_length=Epoch(3))
    assert_same_weights(trial.model, by_hand(3))


def test_a_plain_torch_loader_works_and_ends() -> None:
    trial, context = make()
    context.fit(trial, TorchLoader(make_data(NUM_TRAINED), 8), max_length=Epoch(3))
    assert_same_weights(trial.model, by_hand(3))


def test_fit_returns_the_metrics_of_the_last_validation_weighted_by_samples() -> None:
    trial, context = make()
    metrics = context.fit(trial, max_length=Epoch(2))
    x, y = make_data(21, seed=8).tensors
    with torch.no_grad():
        scores = trial.model.eval()(x)
    expected = {
        "loss": nn.functional.cross_entropy(scores, y).item(),
        "accuracy": (scores.argmax(dim=1) == y).double().mean().item(),
    }
    assert metrics == pytest.approx(expected, abs=1e-12)


def test_train_batch_sees_epoch_and_absolute_batch_indices() -> None:
    trial, context = make()
    context.fit(trial, max_length=Batch(8))
    assert [each[:2] for each in trial.seen] == [(0, 0), (0, 1), (0, 2), (0, 3), (0, 4), (0, 5), (1, 6), (1, 7)]


@pytest.mark.parametrize(
    ("length", "batches"), [(Epoch(2), 2 * BATCHES), (Batch(7), 7), (Records(20), 3), ({"batches": 4}, 4)]
)
def test_max_length_works_in_every_unit(length: Any, batches: int) -> None:
    trial, context = make()
    context.fit(trial, max_length=length)
    assert len(trial.seen) == batches


def test_max_length_is_read_from_the_configuration_by_default() -> None:
    trial, context = make(exp_conf={"searcher": {"max_length": {"batches": 5}}})
    context.fit(trial)
    assert len(trial.seen) == 5


def test_a_second_fit_continues() -> None:
    trial, context = make()
    context.fit(trial, max_length=Epoch(1))
    context.fit(trial, max_length=Epoch(3))
    straight, straight_context = make()
    straight_context.fit(straight, max_length=Epoch(3))
    assert_same_weights(trial.model, straight.model)


def test_every_epoch_has_a_different_order_that_depends_only_on_the_seed() -> None:
    def seen(seed: int, noise: int) -> list[list[float]]:
        class Watching(Classifier):
            def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
                rows.append(batch[0][:, 0].tolist())
                return super().train_batch(batch, epoch_idx, batch_idx)

        rows: list[list[float]] = []
        trial, context = make(trial_class=Watching, seed=seed)
        torch.rand(noise)
        context.fit(trial, max_length=Epoch(2))
        return rows

    first = seen(1, 0)
    assert first == seen(1, 5)
    assert first != seen(2, 0)
    assert first[:BATCHES] != first[BATCHES:]
    assert sorted(chain(*first[:BATCHES])) == sorted(chain(*first[BATCHES:]))


def test_two_trials_of_one_context_are_separate() -> None:
    context = pytorch.init(hparams={"shuffle": False}, checkpoint_dir=None, verbose=False)
    one, other = context.build_trial(Classifier), context.build_trial(Classifier)
    context.fit(one, max_length=Epoch(1))
    context.fit(other, max_length=Epoch(3))
    assert_same_weights(one.model, by_hand(1))
    assert_same_weights(other.model, by_hand(3))


def test_a_context_does_not_keep_an_unreferenced_trial_alive() -> None:
    trial, context = make()
    context.fit(trial, max_length=Batch(1))
    gone = weakref.ref(trial)
    del trial
    gc.collect()
    assert gone() is None


# ------------------------------------------------------------------ updates


def test_clipping_sees_averaged_gradients_of_its_optimizer_only() -> None:
    norms: list[float] = []

    def clip(parameters: Any) -> None:
        norms.append(float(nn.utils.clip_grad_norm_(parameters, 0.05)))

    trial, context = make(
        hparams={"shuffle": False}, aggregation_frequency=2, change=lambda it: setattr(it, "clip", clip)
    )
    before = copy.deepcopy(trial.model)
    context.fit(trial, max_length=Batch(2))
    x, y = make_data(NUM_TRAINED).tensors
    nn.functional.cross_entropy(before(x[:16]), y[:16]).backward()  # type: ignore[no-untyped-call]
    gradients = [parameter.grad for parameter in before.parameters()]
    norm = float(torch.linalg.vector_norm(torch.cat([it.flatten() for it in gradients if it is not None])))
    assert norms == pytest.approx([norm], rel=1e-12)
    for parameter, start in zip(trial.model.parameters(), before.parameters(), strict=True):
        assert start.grad is not None
        torch.testing.assert_close(start - parameter, 0.1 * start.grad * 0.05 / (norm + 1e-6), rtol=1e-9, atol=1e-12)


def test_aggregated_batches_equal_one_large_batch() -> None:
    small, small_context = make(hparams={"shuffle": False, "batch_size": 4}, aggregation_frequency=2)
    small_context.fit(small, max_length=Epoch(3))
    for parameter, expected in zip(small.model.parameters(), by_hand(3).parameters(), strict=True):
        torch.testing.assert_close(parameter, expected, rtol=0, atol=1e-12)


def test_gradients_are_summed_if_the_trial_requests_sums() -> None:
    class Summing(Classifier):
        def __init__(self, context: Any) -> None:
            super().__init__(context)
            context.wrap_optimizer(self.optimizer, average_aggregated_gradients=False)

    summed, summed_context = make(
        trial_class=Summing, hparams={"shuffle": False, "batch_size": 4}, aggregation_frequency=2
    )
    start = copy.deepcopy(summed.model)
    averaged, averaged_context = make(hparams={"shuffle": False, "batch_size": 4}, aggregation_frequency=2)
    summed_context.fit(summed, max_length=Batch(2))
    averaged_context.fit(averaged, max_length=Batch(2))
    for one, two, zero in zip(*(it.parameters() for it in (averaged.model, summed.model, start)), strict=True):
        torch.testing.assert_close(two - zero, 2 * (one - zero), rtol=1e-12, atol=1e-15)


def rates_with(mode: Any, frequency: int = 1, aggregation: int = 4) -> list[int]:
    """Train 2 epochs of 6 batches, and return how often the rate was halved before each batch."""

    class Scheduled(Classifier):
        def __init__(self, context: Any) -> None:
            super().__init__(context)
            self.schedule = context.wrap_lr_scheduler(ExponentialLR(self.optimizer, 0.5), mode, frequency)
            self.rates: list[float] = []

        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            self.rates.append(self.optimizer.param_groups[0]["lr"])
            return super().train_batch(batch, epoch_idx, batch_idx)

    trial, context = make(trial_class=Scheduled, aggregation_frequency=aggregation)
    context.fit(trial, max_length=Epoch(2))
    rates = [*trial.rates, trial.optimizer.param_groups[0]["lr"]]
    return [round(-torch.tensor(rate / 0.1).log2().item()) for rate in rates]


@pytest.mark.parametrize(
    ("mode", "frequency", "expected"),
    [
        # Updates come after batches 4 and 6 of each epoch: the last, shorter window is closed.
        (StepMode.STEP_EVERY_OPTIMIZER_STEP, 1, [0, 0, 0, 0, 1, 1, 2, 2, 2, 2, 3, 3, 4]),
        (StepMode.STEP_EVERY_OPTIMIZER_STEP, 2, [0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 2]),
        # Batches are caught up at updates, never between them.
        (StepMode.STEP_EVERY_BATCH, 1, [0, 0, 0, 0, 4, 4, 6, 6, 6, 6, 10, 10, 12]),
        (StepMode.STEP_EVERY_BATCH, 3, [0, 0, 0, 0, 1, 1, 2, 2, 2, 2, 3, 3, 4]),
        (StepMode.STEP_EVERY_EPOCH, 1, [0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 2]),
        (StepMode.STEP_EVERY_EPOCH, 2, [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1]),
        (StepMode.MANUAL_STEP, 1, [0] * 13),
    ],
)
def test_schedules_step_correctly_with_aggregation(mode: Any, frequency: int, expected: list[int]) -> None:
    assert rates_with(mode, frequency) == expected


def test_schedules_step_correctly_without_aggregation() -> None:
    assert rates_with(StepMode.STEP_EVERY_OPTIMIZER_STEP, 2, 1) == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6]
    assert rates_with(StepMode.STEP_EVERY_BATCH, 5, 1) == [0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 2]


def test_a_manual_schedule_is_stepped_by_the_trial() -> None:
    class Manual(Classifier):
        def __init__(self, context: Any) -> None:
            super().__init__(context)
            self.schedule = context.wrap_lr_scheduler(StepLR(self.optimizer, 1, 0.5), StepMode.MANUAL_STEP)

        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            output = super().train_batch(batch, epoch_idx, batch_idx)
            if batch_idx == 2:
                self.schedule.step()
            return output

    trial, context = make(trial_class=Manual)
    context.fit(trial, max_length=Batch(5))
    assert trial.optimizer.param_groups[0]["lr"] == 0.05


# ------------------------------------------------------------------ precision


def test_amp_in_one_line_equals_the_precision_layer() -> None:
    from dovetail.trainers import AMPTrainer

    class Mixed(Classifier):
        def __init__(self, context: Any) -> None:
            super().__init__(context)
            self.model.float()
            context.experimental.use_amp("bf16")

        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            return super().train_batch((batch[0].float(), batch[1]), epoch_idx, batch_idx)

        def evaluate_batch(self, batch: Any) -> Any:
            scores = self.model(batch[0].float())
            return {"is_half": float(scores.dtype is torch.bfloat16)}

    trial, context = make(trial_class=Mixed)
    assert context.fit(trial, max_length=Epoch(2)) == {"is_half": 1.0}

    other, other_context = make(trial_class=Mixed)
    adapter = pytorch.TrialTrainer(other, other_context)
    AMPTrainer(adapter, precision="bf16").fit(max_length=Epoch(2))
    assert_same_weights(trial.model, other.model)


def test_a_scaler_of_the_trial_unscales_before_clipping_and_skips_overflows() -> None:
    class Scaling(Classifier):
        def __init__(self, context: Any) -> None:
            super().__init__(context)
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
            self.scaler = context.wrap_scaler(scaler)
            self.norms: list[float] = []

        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            x, y = batch
            loss = nn.functional.cross_entropy(self.model(x), y)
            bad = torch.tensor(torch.inf if batch_idx == 2 else 1.0)
            self.context.backward(self.scaler.scale(loss) * bad)
            self.context.step_optimizer(self.optimizer, clip_grads=self.note, scaler=self.scaler)
            self.scaler.update()
            return loss

        def note(self, parameters: Any) -> None:
            self.norms.append(max(float(it.grad.abs().max()) for it in parameters))

    trial, context = make(trial_class=Scaling)
    context.fit(trial, max_length=Batch(4))
    training = context._trainer(trial).adapter.context
    assert training.progress.updates == 3
    assert trial.scaler.get_scale() == 2.0**9
    assert max(norm for norm in trial.norms if norm != torch.inf) < 1


def test_two_loss_scalers_are_rejected() -> None:
    class Twice(Classifier):
        def __init__(self, context: Any) -> None:
            super().__init__(context)
            context.experimental.use_amp()
            context.wrap_scaler(torch.amp.GradScaler("cpu"))

    with pytest.raises(ConfigError, match="use one of the two"):
        make(trial_class=Twice)


# ------------------------------------------------------------------ pause and resume


class Rich(Classifier):
    """Everything that has state: dropout, shuffling, momentum, two schedules, a callback."""

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        context.wrap_lr_scheduler(ExponentialLR(self.optimizer, 0.9), StepMode.STEP_EVERY_BATCH, 2)
        context.wrap_lr_scheduler(StepLR(self.optimizer, 1, 0.7), StepMode.STEP_EVERY_EPOCH)
        self.callbacks = {"count": Counting()}


class Counting(PyTorchCallback):
    def __init__(self) -> None:
        self.reports: list[dict[str, float]] = []

    def on_training_workload_end(self, avg_metrics: Any, batch_metrics: Any) -> None:
        self.reports.append({**avg_metrics, "batches": len(batch_metrics)})

    def state_dict(self) -> dict[str, Any]:
        return {"reports": self.reports}

    def load_state_dict(self, state_dict: Any) -> None:
        self.reports = list(state_dict["reports"])


@pytest.mark.parametrize("aggregation", [1, 4])
@pytest.mark.parametrize("pause", [1, 3, 4, 6, 11, 12])
def test_a_paused_and_resumed_trial_equals_an_uninterrupted_one(tmp_path: Path, pause: int, aggregation: int) -> None:
    hparams = {"dropout": 0.5}
    settings: dict[str, Any] = {"aggregation_frequency": aggregation, "trial_class": Rich, "hparams": hparams}
    straight, straight_context = make(tmp_path / "a", **settings)
    metrics = straight_context.fit(straight, max_length=Epoch(3), reporting_period=Batch(4))

    first, first_context = make(tmp_path / "b", **settings)
    first_context.fit(first, max_length=Batch(pause), reporting_period=Batch(4))
    saved = checkpoint.latest(tmp_path / "b" / "trial_0")
    assert saved is not None
    torch.rand(17)
    second, second_context = make(tmp_path / "b", **settings)
    resumed = second_context.fit(second, max_length=Epoch(3), latest_checkpoint=saved, reporting_period=Batch(4))
    if aggregation == 1 or pause in (4, 6, 12):
        # Else the pause has closed a window early, which the undisturbed run did not.
        assert_same_weights(second.model, straight.model)
        assert resumed == metrics
        assert second.optimizer.param_groups[0]["lr"] == straight.optimizer.param_groups[0]["lr"]
    assert [each[:2] for each in first.seen + second.seen] == [each[:2] for each in straight.seen]
    assert second.made_with.get_initial_batch() == pause


def test_a_stop_request_writes_a_checkpoint_for_resuming(tmp_path: Path) -> None:
    class Stopping(Classifier):
        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            if batch_idx == 8 and not self.context.get_hparams().get("on"):
                self.context.set_stop_requested(True)
                assert self.context.get_stop_requested()
            return super().train_batch(batch, epoch_idx, batch_idx)

    straight, straight_context = make(None)
    straight_context.fit(straight, max_length=Epoch(3))
    trial, context = make(tmp_path, trial_class=Stopping)
    context.fit(trial, max_length=Epoch(3))
    assert len(trial.seen) == 9
    again, again_context = make(tmp_path, trial_class=Stopping, hparams={"on": True})
    again_context.fit(again, max_length=Epoch(3), latest_checkpoint="auto")
    assert_same_weights(again.model, straight.model)


# ------------------------------------------------------------------ checkpoints


def names_in(folder: Path) -> list[str]:
    return sorted(info.path.name for info in checkpoint.list_checkpoints(folder / "trial_0"))


def test_policies(tmp_path: Path) -> None:
    values = iter([5.0, 3.0, 4.0] * 3)

    class Planned(Classifier):
        def evaluate_batch(self, batch: Any) -> Any:
            return {"loss": next(values)}

        def build_validation_data_loader(self) -> Any:
            return [next(iter(super().build_validation_data_loader()))]

    for policy in ("best", "all", "none"):
        trial, context = make(tmp_path / policy, trial_class=Planned)
        context.fit(trial, max_length=Epoch(3), validation_period=Epoch(1), checkpoint_policy=policy)
    assert names_in(tmp_path / "none") == ["ck_epoch_3_iter_18"]
    assert names_in(tmp_path / "all") == ["ck_epoch_1_iter_6", "ck_epoch_2_iter_12", "ck_epoch_3_iter_18"]
    assert names_in(tmp_path / "best") == ["best_ck", "ck_epoch_3_iter_18"]
    assert checkpoint.load(tmp_path / "best" / "trial_0" / "best_ck")["progress"]["epoch"] == 2


def test_best_uses_the_metric_of_the_searcher(tmp_path: Path) -> None:
    values = iter([0.2, 0.9, 0.5])

    class Planned(Classifier):
        def evaluate_batch(self, batch: Any) -> Any:
            return {"loss": 0.0, "score": next(values)}

        def build_validation_data_loader(self) -> Any:
            return [next(iter(super().build_validation_data_loader()))]

    config = {"searcher": {"name": "single", "metric": "score", "smaller_is_better": False}}
    trial, context = make(tmp_path, trial_class=Planned, exp_conf=config)
    context.fit(trial, max_length=Epoch(3), validation_period=Epoch(1))
    assert checkpoint.load(tmp_path / "trial_0" / "best_ck")["progress"]["epoch"] == 2


def test_best_without_a_known_metric_raises_an_error(tmp_path: Path) -> None:
    class Odd(Classifier):
        def evaluate_batch(self, batch: Any) -> Any:
            return {"f1": 0.5}

    trial, context = make(tmp_path, trial_class=Odd)
    with pytest.warns(UserWarning, match="needs searcher.metric"):
        context.fit(trial, max_length=Epoch(1))
    assert names_in(tmp_path) == ["ck_epoch_1_iter_6"]


def test_a_missing_searcher_metric_is_an_error() -> None:
    trial, context = make(exp_conf={"searcher": {"metric": "f1"}})
    with pytest.raises(ConfigError, match=r"no number called 'f1' \(it has: loss, accuracy\)"):
        context.fit(trial, max_length=Epoch(1))


def test_periods(tmp_path: Path) -> None:
    trial, context = make(tmp_path)
    context.fit(
        trial,
        max_length=Epoch(2),
        min_validation_period=Batch(5),
        min_checkpoint_period=Batch(4),
        checkpoint_policy="none",
    )
    assert names_in(tmp_path) == ["ck_epoch_0_iter_4", "ck_epoch_1_iter_8", "ck_epoch_2_iter_12"]
    rows = context._trainer(trial).adapter.history
    assert len(rows.get_metric_values("valid_loss")) == 3


def test_a_checkpoint_holds_everything_listed_by_determined(tmp_path: Path) -> None:
    trial, context = make(tmp_path, trial_class=Rich, hparams={"dropout": 0.1}, exp_conf={"name": "it"})
    context.fit(trial, max_length=Epoch(1))
    state = checkpoint.load(tmp_path / "trial_0" / "ck_epoch_1_iter_6")
    assert set(state["model"]) == set(trial.model.state_dict())
    assert len(state["optimizers"]) == 1
    assert len(state["schedulers"]) == 2
    assert {"python", "numpy", "torch"} <= set(state["rng"])
    assert state["progress"] == {"epoch": 1, "batch": 0, "batches": 6, "records": 44, "tokens": 0, "updates": 6}
    own = state["trial"]
    assert own["hparams"] == {"dropout": 0.1}
    assert own["experiment_config"] == {"name": "it"}
    assert own["trial_class"].endswith(":Rich")
    assert own["trial_id"] == 0
    assert own["callbacks"]["count"]["reports"]
    assert "class Rich(Classifier)" in own["code"]["test_trainer.py"]


def test_state_added_by_callbacks_is_restored(tmp_path: Path) -> None:
    class Keeping(PyTorchCallback):
        loaded: Any = None

        def on_checkpoint_save_start(self, checkpoint: dict[str, Any]) -> None:
            assert len(checkpoint["models_state_dict"]) == len(checkpoint["optimizers_state_dict"]) == 1
            checkpoint["mine"] = {"numbers": [1, 2]}

        def on_checkpoint_load_start(self, checkpoint: dict[str, Any]) -> None:
            self.loaded = checkpoint["mine"]

    trial, context = make(tmp_path, change=lambda it: it.callbacks.update(keep=Keeping()))
    context.fit(trial, max_length=Epoch(1))
    keeping = Keeping()
    again, again_context = make(tmp_path, change=lambda it: it.callbacks.update(keep=keeping))
    again_context.fit(again, max_length=Epoch(2), latest_checkpoint="auto")
    assert keeping.loaded == {"numbers": [1, 2]}


def test_files_added_to_a_checkpoint_by_a_callback_are_harmless(tmp_path: Path) -> None:
    class Adding(PyTorchCallback):
        def on_checkpoint_write_end(self, checkpoint_dir: str) -> None:
            Path(checkpoint_dir, "mine.txt").write_text("kept")

    trial, context = make(tmp_path, change=lambda it: it.callbacks.update(add=Adding()))
    context.fit(trial, max_length=Epoch(1))
    saved = checkpoint.latest(tmp_path / "trial_0")
    assert saved is not None
    assert (saved / "user" / "mine.txt").read_text() == "kept"
    again, again_context = make(tmp_path)
    again_context.fit(again, max_length=Epoch(2), latest_checkpoint=saved)
    assert len(again.seen) == BATCHES


# ------------------------------------------------------------------ hooks


class Recording(PyTorchCallback):
    """Writes down every call of every hook."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def on_trial_startup(self, first_batch_idx: int, checkpoint_uuid: str | None) -> None:
        self.log.append(f"startup {first_batch_idx} {checkpoint_uuid and Path(checkpoint_uuid).name}")

    def on_checkpoint_load_start(self, checkpoint: Any) -> None:
        self.log.append("load")

    def on_training_start(self) -> None:
        self.log.append("training")

    def on_training_epoch_start(self, epoch_idx: int) -> None:
        self.log.append(f"epoch {epoch_idx}")

    def on_training_epoch_end(self, epoch_idx: int) -> None:
        self.log.append(f"end of epoch {epoch_idx}")

    def on_training_workload_end(self, avg_metrics: Any, batch_metrics: Any) -> None:
        self.log.append(f"workload of {len(batch_metrics)}")

    def on_validation_start(self) -> None:
        self.log.append("validation")

    def on_validation_epoch_start(self) -> None:
        self.log.append("validation epoch")

    def on_validation_epoch_end(self, outputs: Any) -> None:
        self.log.append(f"{len(outputs)} outputs")

    def on_validation_end(self, metrics: Any) -> None:
        self.log.append("validated " + " ".join(metrics))

    def on_checkpoint_save_start(self, checkpoint: Any) -> None:
        self.log.append("saving")

    def on_checkpoint_write_end(self, checkpoint_dir: str) -> None:
        self.log.append(f"wrote {Path(checkpoint_dir).parent.name}")

    def on_checkpoint_upload_end(self, uuid: str) -> None:
        self.log.append(f"uploaded {Path(uuid).name}")

    def on_trial_shutdown(self) -> None:
        self.log.append("shutdown")


def test_trial_callback_hooks_are_called_in_order(tmp_path: Path) -> None:
    log: list[str] = []

    class Logged(Classifier):
        def __init__(self, context: Any) -> None:
            super().__init__(context)
            self.callbacks = {"log": Recording(log)}

        def build_training_data_loader(self) -> Any:
            log.append("data")
            return super().build_training_data_loader()

        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            log.append(f"batch {batch_idx}")
            return super().train_batch(batch, epoch_idx, batch_idx)

    trial, context = make(tmp_path, trial_class=Logged, hparams={"batch_size": 22})
    context.fit(
        trial, max_length=Epoch(1), reporting_period=Batch(1), validation_period=Epoch(1), checkpoint_policy="none"
    )
    assert log == [
        "startup 0 None",
        "data",
        "training",
        "epoch 0",
        "batch 0",
        "workload of 1",
        "batch 1",
        "workload of 1",
        "end of epoch 0",
        "validation",
        "validation epoch",
        "1 outputs",
        "validated loss accuracy",
        "saving",
        "wrote ck_epoch_1_iter_2",
        "uploaded ck_epoch_1_iter_2",
        "shutdown",
    ]
    log.clear()
    again, again_context = make(tmp_path, trial_class=Logged, hparams={"batch_size": 22})
    again_context.fit(again, max_length=Batch(3), latest_checkpoint="auto", checkpoint_policy="none")
    assert log == [
        "startup 2 ck_epoch_1_iter_2",
        "data",
        "load",
        "training",
        "epoch 1",
        "batch 2",
        "workload of 1",
        "validation",
        "validation epoch",
        "1 outputs",
        "validated loss accuracy",
        "saving",
        "wrote ck_epoch_1_iter_3",
        "uploaded ck_epoch_1_iter_3",
        "shutdown",
    ]


class Collecting(PyTorchCallback):
    """Keeps what is said about checkpoints."""

    def __init__(self) -> None:
        self.uploaded: list[str] = []
        self.written: list[str] = []
        self.resumed: list[str | None] = []

    def on_trial_startup(self, first_batch_idx: int, checkpoint_uuid: str | None) -> None:
        self.resumed.append(checkpoint_uuid)

    def on_checkpoint_write_end(self, checkpoint_dir: str) -> None:
        self.written.append(Path(checkpoint_dir).parent.name)

    def on_checkpoint_upload_end(self, uuid: str) -> None:
        self.uploaded.append(uuid)


def test_each_checkpoint_is_reported_once_with_an_id_that_fit_accepts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    periods = {"max_length": Epoch(3), "validation_period": Epoch(1), "checkpoint_period": Epoch(1)}
    first = Collecting()
    straight, context = make("here", change=lambda it: it.callbacks.update(log=first))
    context.fit(straight, **periods)
    names = ["ck_epoch_1_iter_6", "ck_epoch_2_iter_12", "ck_epoch_3_iter_18"]
    assert first.uploaded == [str(tmp_path / "here" / "trial_0" / name) for name in names]
    # Files of a callback go into the best checkpoint, too.
    assert [name for name in first.written if name != "best_ck"] == names
    assert "best_ck" in first.written

    monkeypatch.chdir("/")
    second = Collecting()
    again, again_context = make(tmp_path / "there", change=lambda it: it.callbacks.update(log=second))
    again_context.fit(again, **periods, latest_checkpoint=first.uploaded[0])
    assert second.resumed == [first.uploaded[0]]
    assert_same_weights(again.model, straight.model)


def test_a_best_checkpoint_written_alone_is_reported(tmp_path: Path) -> None:
    collecting = Collecting()
    trial, context = make(tmp_path, change=lambda it: it.callbacks.update(log=collecting))
    context.fit(trial, max_length=Batch(6), validation_period=Batch(3))
    assert [Path(uuid).name for uuid in collecting.uploaded] == ["best_ck", "ck_epoch_1_iter_6"]
    # The first of them has been replaced.
    assert checkpoint.inspect(collecting.uploaded[0]).step in (3, 6)


def test_a_hook_with_the_old_signature_is_called_with_a_warning() -> None:
    class Legacy(PyTorchCallback):
        calls = 0

        def on_training_epoch_start(self) -> None:  # type: ignore[override]  # as it was
            self.calls += 1

    legacy = Legacy()
    trial, context = make(change=lambda it: it.callbacks.update(log=legacy))
    with pytest.warns(FutureWarning, match=r"Legacy\.on_training_epoch_start\(\) .*: add epoch_idx") as caught:
        context.fit(trial, max_length=Epoch(3))
    assert (legacy.calls, len(caught)) == (3, 1)


def test_a_failing_trial_is_shut_down_and_keeps_its_error() -> None:
    log: list[str] = []

    class Failing(Classifier):
        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            raise ZeroDivisionError("mine")

    trial, context = make(trial_class=Failing, change=lambda it: it.callbacks.update(log=Recording(log)))
    with pytest.raises(ZeroDivisionError, match="mine"):
        context.fit(trial, max_length=Epoch(1))
    assert log[-1] == "shutdown"


def test_workload_metrics_average_over_samples_since_the_last_report() -> None:
    counting = Counting()

    class Numbers(Classifier):
        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            super().train_batch(batch, epoch_idx, batch_idx)
            return {"number": float(batch_idx)}

    trial, context = make(trial_class=Numbers, change=lambda it: it.callbacks.update(count=counting))
    context.fit(trial, max_length=Epoch(1), reporting_period=Batch(4))
    # Batches 4 and 5 hold 8 and 4 samples.
    assert counting.reports == [
        {"number": 1.5, "batches": 4},
        {"number": pytest.approx((4 * 8 + 5 * 4) / 12), "batches": 2},
    ]


def test_validation_can_run_before_the_first_batch() -> None:
    log: list[str] = []
    trial, context = make(change=lambda it: it.callbacks.update(log=Recording(log)))
    context.fit(trial, max_length=Batch(1), step_zero_validation=True)
    assert log.index("validation") < log.index("epoch 0")
    assert log.count("validation") == 2


def test_test_mode_runs_one_batch_of_each_stage(tmp_path: Path) -> None:
    log: list[str] = []
    trial, context = make(tmp_path, change=lambda it: it.callbacks.update(log=Recording(log)))
    context.fit(trial, max_length=Epoch(100), test_mode=True, checkpoint_policy="none")
    assert len(trial.seen) == 1
    assert "1 outputs" in log
    assert names_in(tmp_path) == ["ck_epoch_0_iter_1"]


# ------------------------------------------------------------------ evaluation


def test_evaluation_reducers_have_known_answers() -> None:
    class Reduced(Classifier):
        def evaluate_batch(self, batch: Any, batch_idx: int) -> Any:  # type: ignore[override]
            return {name: float(batch_idx) for name in ("avg", "sum", "max", "min")}

        def evaluation_reducer(self) -> Any:
            return {name: pytorch.Reducer(name) for name in ("avg", "sum", "max", "min")}

    config = {"searcher": {"metric": "avg"}}
    trial, context = make(trial_class=Reduced, exp_conf=config)
    metrics = context.fit(trial, max_length=Batch(1))
    # Batches of 8, 8 and 5 samples.
    assert metrics == {"avg": pytest.approx((8 + 2 * 5) / 21), "sum": 3.0, "max": 2.0, "min": 0.0}


def test_the_full_dataset_can_be_evaluated() -> None:
    class Full(Classifier):
        evaluate_batch = pytorch.PyTorchTrial.evaluate_batch  # type: ignore[assignment]

        def evaluate_full_dataset(self, data_loader: Any) -> Any:
            assert not self.model.training
            assert not torch.is_grad_enabled()
            return {"samples": sum(len(y) for _, y in data_loader)}

    trial, context = make(trial_class=Full, exp_conf={"searcher": {"metric": "samples"}})
    assert context.fit(trial, max_length=Batch(1)) == {"samples": 21}
    assert trial.model.training


def test_two_evaluation_methods_are_rejected() -> None:
    class Both(Classifier):
        def evaluate_full_dataset(self, data_loader: Any) -> Any:
            return {}

    trial, context = make(trial_class=Both)
    with pytest.raises(ConfigError, match="both evaluate_batch and evaluate_full_dataset"):
        context.fit(trial, max_length=Batch(1))


def test_validation_data_without_an_evaluation_is_an_error() -> None:
    class Neither(Classifier):
        evaluate_batch = pytorch.PyTorchTrial.evaluate_batch  # type: ignore[assignment]

    trial, context = make(trial_class=Neither)
    with pytest.raises(ConfigError, match="neither evaluate_batch nor"):
        context.fit(trial, max_length=Batch(1))


def test_empty_validation_data_is_an_error() -> None:
    trial, context = make()
    with pytest.warns(UserWarning, match="empty"), pytest.raises(DataError, match="at least one batch with samples"):
        context.fit(trial, val_data=[], max_length=Batch(1))


def test_a_method_that_is_never_called_is_named() -> None:
    class Misspelled(Classifier):
        build_validation_data_loader = pytorch.PyTorchTrial.build_validation_data_loader

        def build_validation_dataloader(self) -> Any:
            raise AssertionError("this is never called")

        def evaluate_everything(self) -> None:
            """A helper, whose name is like no other."""

    trial, context = make(trial_class=Misspelled)
    message = "Misspelled.build_validation_dataloader is never called: did you mean build_validation_data_loader"
    with pytest.warns(UserWarning, match=message) as said:
        context.fit(trial, max_length=Batch(1))
    assert len(said) == 1


def test_a_reducer_with_a_full_dataset_evaluation_is_named() -> None:
    class Full(Classifier):
        evaluate_batch = pytorch.PyTorchTrial.evaluate_batch  # type: ignore[assignment]

        def evaluate_full_dataset(self, data_loader: Any) -> Any:
            return {"loss": 1.0}

        def evaluation_reducer(self) -> Any:
            return pytorch.Reducer.SUM

    trial, context = make(trial_class=Full)
    with pytest.warns(UserWarning, match="Full.evaluation_reducer is never called"):
        context.fit(trial, max_length=Batch(1))


@pytest.mark.parametrize("options", [{"validation_period": Batch(1)}, {"step_zero_validation": True}])
def test_a_validation_option_without_effect_is_named(options: dict[str, Any]) -> None:
    class Unvalidated(Classifier):
        build_validation_data_loader = pytorch.PyTorchTrial.build_validation_data_loader

    trial, context = make(trial_class=Unvalidated)
    with pytest.warns(UserWarning, match=f"{next(iter(options))} has no effect: Unvalidated has no validation data"):
        assert context.fit(trial, max_length=Batch(2), **options) == {}


@pytest.mark.parametrize(
    ("hook", "nearest"), [("on_checkpoint_end", "on_checkpoint_write_end"), ("on_validaton_end", "on_validation_end")]
)
def test_a_hook_that_is_never_called_is_an_error(hook: str, nearest: str) -> None:
    trial, context = make()
    callback: Any = type("Mine", (PyTorchCallback,), {hook: lambda self, *given: None})()
    trial.callbacks = {"mine": callback}
    with pytest.raises(ConfigError, match=f"hook of Mine, a PyTorchCallback, '{hook}': did you mean '{nearest}'"):
        context.fit(trial, max_length=Batch(1))


def test_training_stopped_at_the_end_of_an_epoch_is_reported(tmp_path: Path) -> None:
    trial, context = make(tmp_path)

    class Stopper(PyTorchCallback):
        def on_training_epoch_end(self, epoch_idx: int) -> None:
            trial.context.set_stop_requested(True)

    counting = Counting()
    trial.callbacks = {"stop": Stopper(), "count": counting}
    context.fit(trial, max_length=Epoch(5))
    assert [report["batches"] for report in counting.reports] == [6]


def test_custom_reducers_work_in_training_and_validation() -> None:
    counting = Counting()

    class Counted(Classifier):
        def __init__(self, context: Any) -> None:
            super().__init__(context)
            self.sizes = context.wrap_reducer(sum, name="samples")
            self.callbacks = {"count": counting}

        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            self.sizes.update(len(batch[1]))
            return super().train_batch(batch, epoch_idx, batch_idx)

        def evaluate_batch(self, batch: Any) -> Any:
            self.sizes.update(len(batch[1]))
            return super().evaluate_batch(batch)

    trial, context = make(trial_class=Counted)
    assert context.fit(trial, max_length=Epoch(1), reporting_period=Batch(4))["samples"] == 21
    assert [report["samples"] for report in counting.reports] == [32, 12]


class Staged(Classifier):
    """Counts the batches of each stage with one reducer that has the default settings."""

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self.count = context.wrap_reducer(_by_stage)

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        self.count.update("train")
        return super().train_batch(batch, epoch_idx, batch_idx)

    def evaluate_batch(self, batch: Any) -> Any:
        self.count.update("valid")
        return super().evaluate_batch(batch)


def _by_stage(values: list[str]) -> dict[str, int]:
    return {"n_train": values.count("train"), "n_valid": values.count("valid")}


def _counts(folder: Path, group: str) -> list[tuple[int, int, int]]:
    rows = [row for row in read_metrics(folder / "trial_0" / "metrics.jsonl") if row.get("group") == group]
    return [(row["steps_completed"], row["metrics"]["n_train"], row["metrics"]["n_valid"]) for row in rows]


def test_a_reducer_counts_only_the_batches_of_its_stage(tmp_path: Path) -> None:
    trial, context = make(tmp_path, trial_class=Staged)
    settings = {"reporting_period": Batch(3), "validation_period": Batch(3), "step_zero_validation": True}
    context.fit(trial, max_length=Batch(9), **settings)
    assert _counts(tmp_path, "training") == [(3, 3, 0), (6, 3, 0), (9, 3, 0)]
    assert _counts(tmp_path, "validation") == [(0, 0, 3), (3, 0, 3), (6, 0, 3), (9, 0, 3)]


def test_a_validation_between_two_reports_does_not_reset_training_reducers(tmp_path: Path) -> None:
    # Batches that share an update are validated after it: the report at batch 3 comes before the validation at 4.
    trial, context = make(tmp_path, trial_class=Staged, aggregation_frequency=4)
    context.fit(trial, max_length=Batch(6), reporting_period=Batch(3), validation_period=Batch(3))
    assert _counts(tmp_path, "training") == [(3, 3, 0), (6, 3, 0)]
    assert [counts[1:] for counts in _counts(tmp_path, "validation")] == [(0, 3), (0, 3)]


def test_the_reducers_of_a_resumed_run_equal_those_of_one_run(tmp_path: Path) -> None:
    settings = {"reporting_period": Batch(4), "validation_period": Batch(4), "checkpoint_period": Batch(4)}
    whole, context = make(tmp_path / "whole", trial_class=Staged)
    context.fit(whole, max_length=Batch(8), **settings)
    for length in (4, 8):
        resumed, context = make(tmp_path / "resumed", trial_class=Staged)
        context.fit(resumed, max_length=Batch(length), latest_checkpoint="auto", **settings)
    for group in ("training", "validation"):
        assert _counts(tmp_path / "resumed", group) == _counts(tmp_path / "whole", group)


def test_a_reducer_may_add_in_place_to_a_validation_tensor() -> None:
    class Confusion(pytorch.MetricReducer):
        matrix: Any = None

        def reset(self) -> None:
            if self.matrix is not None:
                self.matrix.zero_()

        def update(self, counts: torch.Tensor) -> None:
            if self.matrix is None:
                self.matrix = counts
            else:
                self.matrix += counts

        def per_slot_reduce(self) -> Any:
            return self.matrix.sum().item()

        def cross_slot_reduce(self, per_slot_metrics: list[Any]) -> Any:
            return sum(per_slot_metrics)

    class Confused(Classifier):
        def __init__(self, context: Any) -> None:
            super().__init__(context)
            self.confusion = context.wrap_reducer(Confusion(), name="counted", for_training=False)

        def evaluate_batch(self, batch: Any) -> Any:
            x, y = batch
            hits = nn.functional.one_hot(self.model(x).argmax(dim=1), 3).T @ nn.functional.one_hot(y, 3)
            self.confusion.update(hits)
            return super().evaluate_batch(batch)

    trial, context = make(trial_class=Confused)
    assert context.fit(trial, max_length=Epoch(2), validation_period=Epoch(1))["counted"] == 21


def test_a_trial_may_train_with_hidden_state_kept_from_validation() -> None:
    class Remembering(Classifier):
        def __init__(self, context: Any) -> None:
            super().__init__(context)
            self.hidden = torch.zeros(1, 6, dtype=torch.float64)

        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            # The gradient of the weights needs the hidden state, so autograd saves it.
            return super().train_batch((batch[0] + self.hidden, batch[1]), epoch_idx, batch_idx)

        def evaluate_batch(self, batch: Any) -> Any:
            self.hidden = self.model(batch[0]).mean(dim=0, keepdim=True).repeat(1, 2)
            return super().evaluate_batch(batch)

    trial, context = make(trial_class=Remembering)
    context.fit(trial, max_length=Batch(6), validation_period=Batch(3))
    assert not trial.hidden.is_inference()


@pytest.mark.parametrize("value", [np.float32(0.5), np.int64(2), np.array(0.5), torch.tensor([0.5]), np.array([0.5])])
def test_a_training_metric_may_be_any_kind_of_number(value: Any, tmp_path: Path) -> None:
    counting = Counting()

    class Measured(Classifier):
        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            return {**super().train_batch(batch, epoch_idx, batch_idx), "measured": value}

        def evaluate_batch(self, batch: Any) -> Any:
            return {**super().evaluate_batch(batch), "measured": value}

    trial, context = make(tmp_path, trial_class=Measured)
    trial.callbacks = {"count": counting}
    metrics = context.fit(trial, max_length=Epoch(1), reporting_period=Batch(4))
    assert [report["measured"] for report in counting.reports] == [value.item()] * 2
    assert metrics["measured"] == value.item()


def test_the_metrics_of_the_full_dataset_may_be_any_kind_of_number(tmp_path: Path) -> None:
    class Full(Classifier):
        evaluate_batch = pytorch.PyTorchTrial.evaluate_batch  # type: ignore[assignment]

        def evaluate_full_dataset(self, data_loader: Any) -> Any:
            return {"share": np.float32(0.5), "samples": torch.tensor([21])}

    trial, context = make(tmp_path, trial_class=Full, exp_conf={"searcher": {"metric": "share"}})
    assert context.fit(trial, max_length=Batch(1)) == {"share": 0.5, "samples": 21}
    rows = read_metrics(tmp_path / "trial_0" / "metrics.jsonl")
    (reported,) = (row["metrics"] for row in rows if row.get("group") == "validation")
    assert reported == {"share": 0.5, "samples": 21, "epochs": 0}


def test_a_training_metric_that_is_not_a_number_is_named_once() -> None:
    class Talkative(Classifier):
        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            return {**super().train_batch(batch, epoch_idx, batch_idx), "outputs": batch[0]}

    trial, context = make(trial_class=Talkative)
    with pytest.warns(UserWarning, match="'outputs' is not reported: expected a number, got a tensor of shape") as said:
        context.fit(trial, max_length=Batch(3))
    assert len(said) == 1


# ------------------------------------------------------------------ prediction and loading


def test_predictions_are_in_order() -> None:
    trial, context = make()
    data = make_data(21, seed=8)
    predictions = context.predict(trial, pytorch.DataLoader(data, batch_size=4))
    with torch.no_grad():
        torch.testing.assert_close(predictions, trial.model(data.tensors[0]))


def test_prediction_without_predict_batch_evaluates() -> None:
    class NoPredict(Classifier):
        predict_batch = pytorch.PyTorchTrial.predict_batch

    trial, context = make(trial_class=NoPredict)
    losses = context.predict(trial, pytorch.DataLoader(make_data(21, seed=8), batch_size=8))["loss"]
    assert losses.shape == (3,)


def test_a_trial_is_loaded_from_its_best_checkpoint(tmp_path: Path) -> None:
    trial, context = make(tmp_path, hparams={"dropout": 0.25})
    context.fit(trial, max_length=Epoch(2), validation_period=Epoch(1))
    data = make_data(21, seed=8).tensors[0]

    fresh = pytorch.init(checkpoint_dir=tmp_path, verbose=False)
    by_id = fresh.load_checkpoint_trial(Classifier, trial_id=0)
    assert by_id.context.hparams == {"dropout": 0.25}
    by_path = pytorch.load_trial_from_checkpoint_path(tmp_path / "trial_0" / "best_ck", Classifier)
    best = checkpoint.load(tmp_path / "trial_0" / "best_ck")["model"]
    for loaded in (by_id, by_path):
        assert all(torch.equal(value, best[name]) for name, value in loaded.model.state_dict().items())
    assert torch.equal(fresh.predict(by_id, [data]), context.predict(by_path, [data]))


def test_the_hyperparameters_of_a_loaded_trial_do_not_leak(tmp_path: Path) -> None:
    for dropout in (0.25, 0.5):
        trial, context = make(tmp_path / str(dropout), hparams={"dropout": dropout})
        context.fit(trial, max_length=Batch(1))
    fresh = pytorch.init(checkpoint_dir=None, verbose=False)
    paths = [tmp_path / str(dropout) / "trial_0" / "best_ck" for dropout in (0.25, 0.5)]
    loaded = [fresh.load_checkpoint_trial(Classifier, path=path) for path in paths]
    assert [trial.model[2].p for trial in loaded] == [0.25, 0.5]
    assert fresh.hparams == {}


def test_loading_without_a_class_names_the_stored_class(tmp_path: Path) -> None:
    trial, context = make(tmp_path)
    context.fit(trial, max_length=Batch(1))
    with pytest.raises(ConfigError, match="trials:Classifier"):
        pytorch.load_trial_from_checkpoint_path(tmp_path / "trial_0" / "best_ck")


def test_loading_an_unknown_trial_names_the_searched_path(tmp_path: Path) -> None:
    context = pytorch.init(hparams={}, checkpoint_dir=tmp_path)
    with pytest.raises(CheckpointError, match="trial 7 has no checkpoints"):
        context.load_checkpoint_trial(Classifier, trial_id=7)
    with pytest.raises(ConfigError, match="either a trial_id or a path"):
        context.load_checkpoint_trial(Classifier)


# ------------------------------------------------------------------ mistakes


def test_a_missing_hyperparameter_raises_with_a_remedy() -> None:
    context = pytorch.init(hparams={"learning_rate": 0.1}, checkpoint_dir=None)
    with pytest.raises(MissingHyperparameterError, match=r"did you mean 'learning_rate'\?.*--hparam learning_rat="):
        context.get_hparam("learning_rat")
    with pytest.raises(KeyError):
        context.hparams["width"]


def test_the_training_length_is_required() -> None:
    trial, context = make()
    with pytest.raises(ConfigError, match="max_length: the length of the training is missing"):
        context.fit(trial)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda context: None, "has no model"),
        (lambda context: context.wrap_model(nn.Linear(1, 1)), "has no optimizer"),
    ],
)
def test_a_trial_without_a_required_method_is_rejected(build: Any, message: str) -> None:
    class Bare(Classifier):
        def __init__(self, context: Any) -> None:
            self.context = context
            self.callbacks = {}
            build(context)

    trial, context = make(trial_class=Bare)
    with pytest.raises(ConfigError, match=message):
        context.fit(trial, max_length=Batch(1))


def test_an_optimizer_of_an_unwrapped_model_is_rejected() -> None:
    context = pytorch.init(hparams={}, checkpoint_dir=None)
    with pytest.raises(ConfigError, match="call wrap_model first"):
        context.wrap_optimizer(torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1))


def test_a_period_given_by_both_names_is_rejected() -> None:
    trial, context = make()
    with pytest.raises(ConfigError, match="are the same"):
        context.fit(trial, max_length=Epoch(1), validation_period=Epoch(1), min_validation_period=Epoch(1))


def test_the_context_routes_calls_only_while_it_trains() -> None:
    trial, _ = make()
    with pytest.raises(ConfigError, match="backward: only available while a trial trains"):
        trial.made_with.backward(torch.ones(()))


def test_init_seeds_all_generators() -> None:
    pytorch.init(hparams={}, checkpoint_dir=None)
    first = torch.rand(3)
    pytorch.init(hparams={}, checkpoint_dir=None)
    assert torch.equal(torch.rand(3), first)
    pytorch.init(hparams={}, exp_conf={"reproducibility": {"experiment_seed": 5}}, checkpoint_dir=None)
    assert not torch.equal(torch.rand(3), first)


def test_the_training_state_is_available_through_context_methods() -> None:
    class Asking(Classifier):
        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            asked.append(
                (
                    self.context.current_train_epoch() == epoch_idx,
                    self.context.current_train_batch() == batch_idx,
                    self.context.is_epoch_start() == (batch_idx % BATCHES == 0),
                    self.context.is_epoch_end() == (batch_idx % BATCHES == BATCHES - 1),
                )
            )
            return super().train_batch(batch, epoch_idx, batch_idx)

    asked: list[tuple[bool, ...]] = []
    trial, context = make(trial_class=Asking)
    context.fit(trial, max_length=Epoch(2))
    assert asked == [(True,) * 4] * 2 * BATCHES
