"""Metrics by name: values, tasks, and names that are checked before training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchmetrics
from sklearn import metrics as sk
from torch import Tensor, nn

from dovetail import Epochs
from dovetail.callbacks import Callback, EarlyStopping
from dovetail.errors import ConfigError, DataError, UnknownNameError
from dovetail.trainers import Trainer
from dovetail.trainers.named_metrics import METRICS, NamedMetric


class Identity(nn.Module):
    """Returns its inputs, so that a test chooses the outputs of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(1))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + 0 * self.unused


def evaluated(names: Any, outputs: Tensor, targets: Tensor, loss: Any = "CrossEntropyLoss") -> dict[str, float]:
    # The last of the batches is shorter than the others.
    trainer = Trainer(Identity(), "cpu", metrics=names, loss_function=loss, batch_size=16, verbose=False)
    return dict(trainer.evaluate((outputs, targets)))


def test_metrics_of_several_classes_equal_scikit_learn() -> None:
    generator = torch.Generator().manual_seed(0)
    outputs, targets = torch.randn(50, 7, generator=generator), torch.randint(7, (50,), generator=generator)
    labels, scores = outputs.argmax(dim=1), outputs.softmax(dim=1)

    found = evaluated(["accuracy", "f1", "precision", "recall", "auroc", "mcc", "top5_accuracy"], outputs, targets)

    expected = {
        "accuracy": sk.accuracy_score(targets, labels),
        "f1": sk.f1_score(targets, labels, average="macro"),
        "precision": sk.precision_score(targets, labels, average="macro"),
        "recall": sk.recall_score(targets, labels, average="macro"),
        "auroc": sk.roc_auc_score(targets, scores, multi_class="ovr", average="macro"),
        "mcc": sk.matthews_corrcoef(targets, labels),
        "top5_accuracy": sk.top_k_accuracy_score(targets, scores, k=5),
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("loss", ["BCEWithLogitsLoss", "BCELoss"])
@pytest.mark.parametrize("column", [True, False])
def test_binary_metrics_equal_scikit_learn_for_logits_and_probabilities(loss: str, column: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    # All of them from 0 to 1: torchmetrics alone would take such logits for probabilities.
    outputs = torch.rand(50, generator=generator)
    if loss == "BCEWithLogitsLoss":
        outputs = outputs - 0.3
    targets = (torch.rand(50, generator=generator) < 0.4).float()
    labels = outputs > (0.5 if loss == "BCELoss" else 0.0)
    given = (outputs[:, None], targets[:, None]) if column else (outputs, targets)

    found = evaluated(["accuracy", "f1", "auroc", "average_precision"], *given, loss)

    expected = {
        "accuracy": sk.accuracy_score(targets, labels),
        "f1": sk.f1_score(targets, labels),
        "auroc": sk.roc_auc_score(targets, outputs),
        "average_precision": sk.average_precision_score(targets, outputs),
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected, abs=1e-6)


def test_multilabel_metrics_equal_scikit_learn() -> None:
    generator = torch.Generator().manual_seed(2)
    outputs, targets = torch.randn(50, 3, generator=generator), torch.randint(2, (50, 3), generator=generator)
    found = evaluated({"macro": "f1"}, outputs, targets.float(), "BCEWithLogitsLoss")
    assert found["macro"] == pytest.approx(sk.f1_score(targets, outputs > 0, average="macro"), abs=1e-6)


def test_regression_metrics_equal_scikit_learn() -> None:
    generator = torch.Generator().manual_seed(3)
    outputs, targets = torch.randn(50, 1, generator=generator), torch.randn(50, 1, generator=generator)
    found = evaluated(["mae", "mse", "rmse", "r2"], outputs, targets, "MSELoss")
    expected = {
        "mae": sk.mean_absolute_error(targets, outputs),
        "mse": sk.mean_squared_error(targets, outputs),
        "rmse": sk.root_mean_squared_error(targets, outputs),
        "r2": sk.r2_score(targets, outputs),
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected, abs=1e-5)


def test_targets_that_the_loss_ignores_do_not_count() -> None:
    outputs, targets = torch.eye(3).repeat(4, 1), torch.arange(12) % 3
    targets[:3] = -100
    assert evaluated("accuracy", outputs, targets)["accuracy"] == 1.0


TASKS: dict[str, tuple[tuple[int, ...], dict[str, int], Callable[[Tensor], Tensor]]] = {
    "multiclass": ((7,), {"num_classes": 7}, lambda outputs: outputs.softmax(dim=1)),
    "sequences": ((7, 4), {"num_classes": 7}, lambda outputs: outputs.softmax(dim=1)),
    "binary": ((), {}, torch.sigmoid),
    "multilabel": ((3,), {"num_labels": 3}, torch.sigmoid),
}


# Only classes have a rank.
PAIRS = [
    (task, name)
    for task, (_, arguments, _) in TASKS.items()
    for name, kind in METRICS.items()
    if not kind.is_regression and ("num_classes" in arguments or name != "top5_accuracy")
]


@pytest.mark.parametrize(("task", "name"), PAIRS)
def test_the_counts_of_batches_equal_those_of_torchmetrics(task: str, name: str) -> None:
    """With targets that are ignored, also all of a batch, and batches of different lengths."""
    shape, arguments, normalize = TASKS[task]
    prefix = "Multiclass" if "num_classes" in arguments else task.capitalize()
    given = {**arguments, **(METRICS[name].arguments or {}), "ignore_index": -100}
    if prefix == "Binary":
        given.pop("average", None)
    elif METRICS[name].averaged:
        given["average"] = "macro"
    expected = getattr(torchmetrics.classification, f"{prefix}{METRICS[name].name}")(**given)
    metric = NamedMetric(name)
    generator = torch.Generator().manual_seed(4)
    for length in (60, 5, 1, 6):
        outputs = torch.randn(length, *shape, generator=generator)
        size = outputs.argmax(dim=1).shape if prefix == "Multiclass" else outputs.shape
        targets = torch.randint(7 if prefix == "Multiclass" else 2, size, generator=generator)
        targets[torch.rand(size, generator=generator) < 0.2] = -100
        if length == 6:
            targets.fill_(-100)
        metric.update(outputs, targets)
        expected.update(normalize(outputs), targets)
    assert torch.equal(metric.compute(), expected.compute())
    # The second pass does not see the first one.
    metric.reset()
    expected.reset()
    outputs = torch.randn(60, *shape, generator=generator)
    targets = outputs.argmax(dim=1) if prefix == "Multiclass" else (outputs > 0).long()
    metric.update(outputs, targets)
    expected.update(normalize(outputs), targets)
    assert torch.equal(metric.compute(), expected.compute())


@pytest.mark.parametrize("name", ["f1", "mcc", "auroc", "r2"])
def test_processes_have_the_value_of_all_their_batches(name: str) -> None:
    """The third process has no batch. It knows the classes in the second pass only."""
    generator = torch.Generator().manual_seed(5)
    outputs, targets = torch.randn(80, 3, generator=generator), torch.randint(3, (80,), generator=generator)
    if METRICS[name].is_regression:
        outputs, targets = outputs[:, 0], outputs[:, 1]
    whole, *processes = (NamedMetric(name) for _ in range(4))
    for number_of_pass in range(2):
        whole.reset()
        whole.update(outputs, targets)
        for metric in processes:
            metric.reset()
        for number in range(0, 80, 10):
            processes[number // 10 % 2].update(outputs[number : number + 10], targets[number : number + 10])
        sent: list[Any] = []
        for metric in processes:
            metric.gather(lambda parts: sent.__iadd__(parts) and parts)  # noqa: B023 - the list of this turn
        assert len(sent) == 2 + number_of_pass
        for metric in processes:
            metric.gather(lambda parts: sent)  # noqa: B023 - the list of this turn
            assert metric.compute() == pytest.approx(whole.compute())


@pytest.mark.parametrize(
    ("name", "outputs", "targets", "message"),
    [
        ("f1", torch.randn(4, 3), torch.tensor([0, 1, 3, -1]), "'f1' needs .* from 0 to 2, .*; 2 targets are other"),
        (
            "mcc",
            torch.randn(4, 3),
            torch.tensor([0, 1, 3, -100]),
            "'mcc' needs .* from 0 to 2, .*; 1 targets",
        ),
        ("f1", torch.randn(4), torch.tensor([0, 1, 2, -100]), "'f1' needs targets that are 0 or 1, .*; 1 targets are"),
    ],
)
def test_targets_that_are_no_classes_raise(name: str, outputs: Tensor, targets: Tensor, message: str) -> None:
    metric = NamedMetric(name)
    metric.update(outputs[:2], targets[:2])
    metric.update(outputs[2:], targets[2:])
    with pytest.raises(DataError, match=message):
        metric.compute()


def test_every_metric_has_a_value_for_its_task() -> None:
    for name, kind in METRICS.items():
        outputs, targets = torch.randn(8, 6), torch.arange(8) % 6
        metric = NamedMetric(name)
        if kind.is_regression:
            metric.update(outputs[:, 0], outputs[:, 1])
        else:
            metric.update(outputs, targets)
        assert torch.isfinite(metric.compute()), name


@pytest.mark.parametrize(
    ("name", "outputs", "targets", "message"),
    [
        (
            "f1",
            torch.randn(4, 3),
            torch.randn(4),
            r"needs scores \(N, C\) with class numbers.*got outputs of shape",
        ),
        ("mse", torch.randn(4, 3), torch.randn(4), "'mse' needs outputs and targets of one shape"),
        ("top5_accuracy", torch.randn(4, 3), torch.arange(4) % 3, "more than 5 classes"),
        ("f1", {"logits": torch.randn(4, 3)}, torch.arange(4) % 3, "outputs and targets that are tensors, got dict"),
    ],
)
def test_a_metric_that_does_not_fit_raises(name: str, outputs: Any, targets: Tensor, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        NamedMetric(name).update(outputs, targets)


def test_an_unknown_metric_suggests_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="'auroc'"):
        Trainer(nn.Linear(2, 2), "cpu", metrics=["auroce"])


DATA = torch.randn(8, 2), torch.arange(8) % 2


def test_early_stopping_on_an_unknown_metric_fails_before_the_first_epoch() -> None:
    batches: list[Any] = []

    class Count(Callback):
        def on_step_end(self, context: Any, output: Any) -> None:
            batches.append(output)

    callbacks = [Count(), EarlyStopping("valid_f1_score")]
    trainer = Trainer(nn.Linear(2, 2), "cpu", metrics=["accuracy", "f1"], callbacks=callbacks, verbose=False)
    with pytest.raises(UnknownNameError, match="'valid_f1'"):
        trainer.fit(DATA, DATA, max_length=Epochs(2))
    assert batches == []


def test_early_stopping_accepts_numbers_that_only_a_pass_can_name() -> None:
    class Own(Trainer):
        def test_step(self, batch: Any) -> dict[str, Tensor]:
            return {"loss": torch.tensor(1.0), "score": torch.tensor(2.0)}

    trainer = Own(nn.Linear(2, 2), "cpu", callbacks=[EarlyStopping("valid_score")], verbose=False)
    trainer.fit(DATA, DATA, max_length=Epochs(1))
    assert trainer.history.get_latest_metric("valid_score") == 2.0
