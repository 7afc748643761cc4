from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from problem import Problem
from torch import Tensor, nn

from dovetail import Epochs, Trainer
from dovetail import checkpoint as store
from dovetail.errors import ConfigError
from dovetail.trainers.decorators import SingleProcessAMP
from dovetail.trainers.metrics import MeanOf, Meter, WholePass, accuracy, as_metrics


def test_means_are_weighted_by_samples() -> None:
    meter = Meter()
    meter.add({"loss": torch.tensor(2.0), "acc": 0.5}, 3)
    meter.add({"loss": torch.tensor(6.0)}, 1)
    assert meter.compute() == {"loss": 3.0, "acc": 0.5}


def test_a_meter_holds_no_graph() -> None:
    meter = Meter()
    weight = torch.ones(2, requires_grad=True)
    meter.add({"loss": (weight * 2).sum()}, 1)
    assert all(not value.requires_grad for _, value, _ in meter._pending)  # type: ignore[union-attr]


@pytest.mark.parametrize("dtypes", [[torch.float32, torch.float64], [torch.bfloat16, torch.int64], [torch.bool]])
def test_values_of_any_type_are_converted_to_host_numbers(dtypes: list[torch.dtype]) -> None:
    meter = Meter()
    for dtype in dtypes:
        meter.add({"value": torch.ones((), dtype=dtype)}, 1)
    meter.add({"value": 1}, 1)
    assert meter.compute() == {"value": 1.0}


def test_outputs_that_are_not_scalars_are_skipped() -> None:
    meter = Meter()
    meter.add({"loss": torch.tensor(1.0), "output": torch.ones(3), "name": "x", "num_items": 3}, 1)
    assert set(meter.compute()) == {"loss"}


def test_a_meter_continues_from_its_state() -> None:
    one, other = Meter(), Meter()
    one.add({"loss": torch.tensor(1.0)}, 2)
    other.load_state_dict(one.state_dict())
    for meter in (one, other):
        meter.add({"loss": torch.tensor(4.0)}, 1)
    assert one.compute() == other.compute() == {"loss": 2.0}
    assert list(other.values["loss"]) == [1.0, 4.0]


def test_torchmetrics_and_functions_agree_with_the_default(problem: Problem) -> None:
    classification = pytest.importorskip("torchmetrics.classification")
    metrics = {
        "theirs": classification.MulticlassAccuracy(num_classes=3, average="micro"),
        "ours": accuracy,
        "error": lambda outputs, targets: 1 - accuracy(outputs, targets),
    }
    model = problem.model()
    found = Trainer(model, metrics=metrics, verbose=False).evaluate(problem.batches)
    default = Trainer(model, verbose=False).evaluate(problem.batches)["accuracy"]
    assert found["theirs"] == pytest.approx(default, abs=1e-6)
    assert found["ours"] == default
    assert found["error"] == pytest.approx(1 - default, abs=1e-6)


def test_torchmetrics_work_in_every_validation_of_a_run(problem: Problem) -> None:
    classification = pytest.importorskip("torchmetrics.classification")
    per_class = classification.MulticlassRecall(num_classes=3, average=None)
    trainer = Trainer(problem.model(), metrics={"recall": per_class, "accuracy": accuracy}, verbose=False)
    history = trainer.fit(problem.batches, problem.batches, max_length=Epochs(2))
    for name in ("valid_recall_0", "valid_recall_1", "valid_recall_2", "valid_accuracy"):
        assert len(history.get_metric_values(name)) == 2


def test_a_metric_collection_is_flattened_by_name(problem: Problem) -> None:
    torchmetrics = pytest.importorskip("torchmetrics")
    collection = torchmetrics.MetricCollection(
        {
            "micro": torchmetrics.classification.MulticlassAccuracy(3, average="micro"),
            "f1": torchmetrics.classification.MulticlassF1Score(3),
        }
    )
    assert {"micro", "f1"} <= set(Trainer(problem.model(), metrics=collection, verbose=False).evaluate(problem.batches))


def f1_scores() -> Any:
    torchmetrics = pytest.importorskip("torchmetrics")
    return torchmetrics.MetricCollection({"f1": torchmetrics.classification.MulticlassF1Score(3)})


def test_a_metric_collection_given_by_name_keeps_this_name(problem: Problem) -> None:
    trainer = Trainer(problem.model(), metrics={"a": f1_scores(), "b": f1_scores()}, verbose=False)
    assert trainer.evaluate(problem.batches).keys() == {"loss", "a_f1", "b_f1"}


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: [accuracy, accuracy], "accuracy"),
        (lambda: {"MetricCollection": f1_scores(), "f1": lambda outputs, targets: 0.0}, "f1"),
        (lambda: {"MetricCollection": f1_scores(), "f1": f1_scores()["f1"]}, "f1"),
        (lambda: {"loss": accuracy}, "loss"),
        (lambda: {"loss": f1_scores()["f1"]}, "loss"),
    ],
)
def test_two_metrics_with_one_name_are_an_error(problem: Problem, make: Any, name: str) -> None:
    with pytest.raises(ConfigError, match=f"metrics: two numbers are called '{name}'"):
        Trainer(problem.model(), metrics=make(), verbose=False).evaluate(problem.batches)


def root_of_mean_square(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs[:, 0].square().mean().sqrt()


def test_a_metric_function_that_is_not_a_mean_over_samples_is_an_error(problem: Problem) -> None:
    trainer = Trainer(problem.model(), "cpu", metrics=[root_of_mean_square], verbose=False)
    with pytest.raises(ConfigError, match=r"root_of_mean_square is not a mean over samples.*WholePass\(function\)"):
        trainer.evaluate(problem.batches)


def test_a_metric_function_uses_the_whole_pass_or_averages_on_demand(problem: Problem) -> None:
    model = problem.model()
    metrics = {"whole": WholePass(root_of_mean_square), "mean": MeanOf(root_of_mean_square)}
    found = Trainer(model, "cpu", metrics=metrics, verbose=False).evaluate(problem.batches)
    with torch.no_grad():
        outputs = model(problem.x)
    assert found["whole"] == pytest.approx(root_of_mean_square(outputs, problem.y).item())
    each = [root_of_mean_square(rows, problem.y).item() for rows in outputs.split(8)]
    assert found["mean"] == pytest.approx(sum(each) / len(each))


def test_scikit_learn_scores_are_computed_over_the_whole_pass(problem: Problem) -> None:
    scores = pytest.importorskip("sklearn.metrics")

    def f1(outputs: Tensor, targets: Tensor) -> float:
        return float(scores.f1_score(targets, outputs.argmax(dim=1), average="macro"))

    model = problem.model()
    with pytest.raises(ConfigError, match="f1 is not a mean over samples"):
        Trainer(model, "cpu", metrics=[f1], verbose=False).evaluate(problem.batches)
    for direct in (scores.f1_score, partial(scores.roc_auc_score, multi_class="ovr")):
        with pytest.raises(ConfigError, match=r"of scikit-learn is not a mean over samples; give WholePass"):
            Trainer(model, metrics={"score": direct}, verbose=False)
    found = Trainer(model, "cpu", metrics=[WholePass(f1)], verbose=False).evaluate(problem.batches)
    with torch.no_grad():
        assert found["f1"] == pytest.approx(f1(model(problem.x), problem.y))


def test_a_whole_pass_metric_is_reset_before_each_pass(problem: Problem) -> None:
    count = WholePass(lambda outputs, targets: len(outputs))
    trainer = Trainer(problem.model(), "cpu", metrics={"count": count}, verbose=False)
    history = trainer.fit(problem.batches, problem.batches, max_length=Epochs(2))
    assert history.get_metric_values("valid_count") == [96.0, 96.0]


def test_a_mean_over_low_precision_values_is_exact(problem: Problem) -> None:
    metrics = {"mean": lambda outputs, targets: outputs.mean()}
    SingleProcessAMP(problem.model(), "cpu", precision="bf16", metrics=metrics, verbose=False).evaluate(problem.batches)


def test_numpy_numbers_are_accepted_as_metric_values(problem: Problem) -> None:
    def test_step(trainer: Any, batch: Any) -> dict[str, Any]:
        outputs = trainer.model(batch[0])
        return {"loss": outputs.mean(), "own": np.float32(0.5), "output": outputs, "target": batch[1]}

    metrics = {"count": lambda outputs, targets: np.float32(2.0)}
    found = Trainer(problem.model(), test_step=test_step, metrics=metrics, verbose=False).evaluate(problem.batches)
    assert (found["own"], found["count"]) == (0.5, 2.0)


def test_metrics_need_outputs_and_targets(problem: Problem) -> None:
    def test_step(trainer: Any, batch: Any) -> dict[str, Tensor]:
        return {"loss": torch.zeros(())}

    trainer = Trainer(problem.model(), metrics=[accuracy], test_step=test_step, verbose=False)
    with pytest.raises(ConfigError, match=r"'output' and 'target' besides its numbers, got \['loss'\]"):
        trainer.evaluate(problem.batches)


def test_a_custom_test_step_without_outputs_needs_no_metrics(problem: Problem) -> None:
    def test_step(trainer: Any, batch: Any) -> dict[str, Any]:
        return {"loss": torch.tensor(2.0), "own": len(batch[0])}

    assert Trainer(problem.model(), test_step=test_step, verbose=False).evaluate(problem.batches) == {
        "loss": 2.0,
        "own": 8.0,
    }


def test_accuracy_takes_soft_targets() -> None:
    outputs = torch.tensor([[0.9, 0.1], [0.2, 0.8]])
    assert accuracy(outputs, torch.tensor([[1.0, 0.0], [0.6, 0.4]])).item() == 0.5


def test_a_metric_that_is_not_a_number_is_rejected(problem: Problem) -> None:
    def hits(outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs.argmax(dim=1) == targets

    trainer = Trainer(problem.model(), "cpu", metrics=[hits], verbose=False)
    with pytest.raises(ConfigError, match=r"hits must return one number for a batch, got a tensor of shape \(8,\)"):
        trainer.evaluate(problem.batches)


def test_a_metric_of_named_targets_is_weighted_by_samples() -> None:
    (mean,) = as_metrics({"mean": lambda outputs, targets: targets["y"].mean()}).values()
    for values in ([1.0, 1.0, 1.0], [5.0]):
        mean.update(None, {"y": torch.tensor(values), "id": torch.zeros(len(values))})
    assert mean.compute() == 2.0


def test_an_empty_meter_has_no_means() -> None:
    assert Meter().compute() == {}
    meter = Meter()
    meter.add({"loss": torch.tensor(1.0)}, 0)
    assert math.isnan(meter.compute()["loss"])


def test_metrics_are_registered_by_name() -> None:
    assert list(as_metrics(accuracy)) == ["accuracy"]
    assert as_metrics(None) == {}


# ---------------------------------------------------------------------- the default metric


def regression(**options: Any) -> tuple[Trainer, tuple[Tensor, Tensor]]:
    x = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
    y = x.sum(dim=1, keepdim=True) + 2.0

    def step(trainer: Any, batch: Any) -> dict[str, Tensor]:
        outputs = trainer.model(batch[0])
        return {"loss": nn.functional.mse_loss(outputs, batch[1]), "output": outputs, "target": batch[1]}

    steps = {"train_step": step, "test_step": step, **options}
    optimizer = partial(torch.optim.SGD, lr=0.1)
    return Trainer(nn.Linear(3, 1), optimizer=optimizer, verbose=False, seed=0, **steps), (x, y)


def test_a_regression_with_custom_steps_selects_the_best_by_its_loss(tmp_path: Path) -> None:
    trainer, data = regression(checkpoint_dir=tmp_path)
    history = trainer.fit(data, data, max_length=Epochs(4))
    assert history.get_metric_names() == {"train_loss", "train_lr", "valid_loss"}
    assert trainer.evaluate(data).keys() == {"loss"}
    assert store.inspect(tmp_path / "best_ck").summary["epoch"] == 4


def test_custom_steps_of_a_classifier_report_an_accuracy(problem: Problem) -> None:
    def test_step(trainer: Any, batch: Any) -> dict[str, Tensor]:
        outputs = trainer.model(batch[0])
        return {"loss": nn.functional.cross_entropy(outputs, batch[1]), "output": outputs, "target": batch[1]}

    model = problem.model()
    own = Trainer(model, test_step=test_step, verbose=False).evaluate(problem.batches)
    assert own == Trainer(model, verbose=False).evaluate(problem.batches)


def test_integer_targets_beyond_the_outputs_are_not_classes() -> None:
    def test_step(trainer: Any, batch: Any) -> dict[str, Any]:
        mean, spread = trainer.model(batch[0]).unbind(dim=1)
        loss = nn.functional.gaussian_nll_loss(mean, batch[1].float(), spread.exp())
        return {"loss": loss, "output": torch.stack([mean, spread], dim=1), "target": batch[1]}

    trainer = Trainer(nn.Linear(3, 2), test_step=test_step, verbose=False)
    assert trainer.evaluate((torch.randn(8, 3), torch.arange(8))).keys() == {"loss"}


def test_an_accuracy_that_test_step_returns_is_kept(problem: Problem) -> None:
    def test_step(trainer: Any, batch: Any) -> dict[str, Any]:
        outputs = trainer.model(batch[0])
        return {"loss": outputs.mean(), "accuracy": 0.25, "output": outputs, "target": batch[1]}

    assert Trainer(problem.model(), test_step=test_step, verbose=False).evaluate(problem.batches)["accuracy"] == 0.25


@pytest.mark.parametrize("layered", [Trainer, SingleProcessAMP])
def test_a_default_loss_that_does_not_fit_validation_is_an_error(layered: Any) -> None:
    def train_step(trainer: Any, batch: Any) -> dict[str, Tensor]:
        return {"loss": nn.functional.mse_loss(trainer.model(batch[0]).float(), batch[1])}

    x = torch.randn(16, 3)
    for outputs, message in ((1, r"learns nothing from one output .* shape \(16, 1\)"), (2, "that add up to 1")):
        trainer = layered(nn.Linear(3, outputs), "cpu", train_step=train_step, verbose=False)
        with pytest.raises(ConfigError, match=message):
            trainer.fit((x, x[:, :outputs]), (x, x[:, :outputs]), max_length=Epochs(1))


@pytest.mark.parametrize("layered", [Trainer, SingleProcessAMP])
@pytest.mark.parametrize("targets", [torch.ones(16, 2), torch.tensor([[2.0, -1.0]] * 16)])
def test_a_default_loss_that_does_not_fit_training_is_an_error(layered: Any, targets: Tensor) -> None:
    trainer = layered(nn.Linear(3, 2), "cpu", verbose=False)
    with pytest.raises(ConfigError, match="needs class numbers or probabilities that add up to 1"):
        trainer.fit((torch.randn(16, 3), targets), max_length=Epochs(1))
    assert "accuracy" in trainer.evaluate((torch.randn(16, 3), torch.tensor([[0.3, 0.7]] * 16)))
