from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from problem import Problem
from torch import Tensor

from dovetail import Epochs, Trainer
from dovetail.errors import ConfigError
from dovetail.trainers.metrics import Meter, accuracy, as_metrics


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
def test_values_of_any_type_come_to_the_host(dtypes: list[torch.dtype]) -> None:
    meter = Meter()
    for dtype in dtypes:
        meter.add({"value": torch.ones((), dtype=dtype)}, 1)
    meter.add({"value": 1}, 1)
    assert meter.compute() == {"value": 1.0}


def test_what_is_no_scalar_is_passed_over() -> None:
    meter = Meter()
    meter.add({"loss": torch.tensor(1.0), "output": torch.ones(3), "name": "x", "num_items": 3}, 1)
    assert set(meter.compute()) == {"loss"}


def test_a_meter_goes_on_from_its_state() -> None:
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


def test_a_collection_is_flattened_by_name(problem: Problem) -> None:
    torchmetrics = pytest.importorskip("torchmetrics")
    collection = torchmetrics.MetricCollection(
        {
            "micro": torchmetrics.classification.MulticlassAccuracy(3, average="micro"),
            "f1": torchmetrics.classification.MulticlassF1Score(3),
        }
    )
    assert {"micro", "f1"} <= set(Trainer(problem.model(), metrics=collection, verbose=False).evaluate(problem.batches))


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


def test_a_metric_that_is_no_number_is_refused(problem: Problem) -> None:
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


def test_metrics_have_names() -> None:
    assert list(as_metrics(accuracy)) == ["accuracy"]
    assert as_metrics(None) == {}
