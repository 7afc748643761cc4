"""Weights of samples and of classes against the formulas in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss
from torch.utils.data import Subset, TensorDataset

from dovetail import Epochs
from dovetail.errors import ConfigError, DataError
from dovetail.trainers import AMPTrainer, CompiledTrainer, Trainer

GENERATOR = torch.Generator().manual_seed(5)
X = torch.randn(50, 4, generator=GENERATOR, dtype=torch.float64)
Y = torch.randint(0, 3, (50,), generator=GENERATOR)
Z = torch.randn(50, 3, generator=GENERATOR, dtype=torch.float64)
W = torch.rand(50, generator=GENERATOR, dtype=torch.float64)
CLASSES = torch.tensor([1.0, 3.0, 0.5], dtype=torch.float64)
BALANCED = 50 / (3 * torch.bincount(Y).double())
IGNORED = torch.where(torch.arange(50) % 7 == 0, -100, Y)


def make_model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Linear(4, 3).double()


def by_hand(loss: Callable[[Tensor], Tensor]) -> tuple[Tensor, list[float]]:
    """Return the weights and losses of two updates with all samples."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        value = loss(model(X))
        value.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(value.item())
    return model.weight.detach(), losses  # type: ignore[operator]


def make_trainer(model: nn.Module, **settings: Any) -> Trainer:
    options = {"shuffle": False, "drop_last": False, "verbose": False, "num_workers": 0, **settings}
    return Trainer(model, "cpu", optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.5), **options)


CASES: list[Any] = [
    pytest.param(
        (X, Y, W),
        {"sample_weight": True},
        lambda outputs: (W * cross_entropy(outputs, Y, reduction="none")).sum() / W.sum(),
        id="samples",
    ),
    pytest.param((X, Y), {"class_weight": CLASSES}, lambda outputs: cross_entropy(outputs, Y, CLASSES), id="classes"),
    pytest.param((X, Y), {"class_weight": {1: 3.0, 2: 0.5}}, lambda out: cross_entropy(out, Y, CLASSES), id="mapping"),
    pytest.param((X, Y), {"class_weight": "balanced"}, lambda out: cross_entropy(out, Y, BALANCED), id="balanced"),
    pytest.param(
        Subset(TensorDataset(torch.cat([X, X]), torch.cat([Y, 2 - Y])), range(50)),
        {"class_weight": "balanced"},
        lambda outputs: cross_entropy(outputs, Y, BALANCED),
        id="balanced subset",
    ),
    pytest.param(
        (X, IGNORED),
        {"class_weight": [1, 3, 0.5], "criterion": nn.CrossEntropyLoss(label_smoothing=0.1)},
        lambda outputs: cross_entropy(outputs, IGNORED, CLASSES, label_smoothing=0.1),
        id="classes, smoothed, some ignored",
    ),
    pytest.param(
        (X, Y, W),
        {"sample_weight": True, "class_weight": CLASSES},
        lambda outputs: (W * cross_entropy(outputs, Y, CLASSES, reduction="none")).sum() / (W * CLASSES[Y]).sum(),
        id="samples and classes",
    ),
    pytest.param(
        (X, Z, W),
        {"sample_weight": True, "criterion": "MSELoss"},
        lambda outputs: (W[:, None] * mse_loss(outputs, Z, reduction="none")).sum() / (3 * W.sum()),
        id="squared error",
    ),
    pytest.param(
        {"x": X, "hit": (Z > 0).double(), "importance": W},
        {"sample_weight": "importance", "target": "hit", "criterion": nn.BCEWithLogitsLoss()},
        lambda outputs: (
            (W * binary_cross_entropy_with_logits(outputs, (Z > 0).double(), reduction="none").mean(1)).sum() / W.sum()
        ),
        id="dictionary",
    ),
    pytest.param(
        (X, Z, W),
        {"sample_weight": True, "criterion": lambda outputs, targets: (outputs - targets).abs().sum(dim=1)},
        lambda outputs: (W * (outputs - Z).abs().sum(dim=1)).sum() / W.sum(),
        id="a loss per sample",
    ),
]


@pytest.mark.parametrize(("data", "settings", "loss"), CASES)
def test_a_weighted_loss_equals_its_formula_also_in_parts(data: Any, settings: Any, loss: Any) -> None:
    expected, losses = by_hand(loss)
    # One batch of all samples, and windows of unequal batches.
    for batch_size, accumulation_steps in ((50, 1), (8, 7)):
        model = make_model()
        sizes = {"batch_size": batch_size, "accumulation_steps": accumulation_steps}
        trainer = make_trainer(model, **settings, **sizes)
        history = trainer.fit(data, data, max_length=Epochs(2))
        torch.testing.assert_close(model.weight, expected, rtol=0, atol=1e-14)
        reported = [row["loss"] for row in history.rows if row["stage"] == "train"]
        assert reported == pytest.approx(losses, rel=0, abs=1e-14)
        assert trainer.evaluate(data)["loss"] == pytest.approx(float(loss(model(X)).detach()), rel=0, abs=1e-14)


def test_the_weights_of_a_frame_are_a_column() -> None:
    frame = pd.DataFrame(X.numpy(), columns=list("abcd")).assign(label=Y.numpy(), importance=W.numpy())
    models = [make_model(), make_model()]
    make_trainer(models[0], sample_weight="importance").fit(frame, frame, max_length=Epochs(1))
    make_trainer(models[1], sample_weight=True).fit((X, Y, W), max_length=Epochs(1))
    assert torch.equal(models[0].weight, models[1].weight)  # type: ignore[arg-type]


def test_validation_data_may_have_no_weights() -> None:
    trainer = make_trainer(make_model(), sample_weight=True)
    assert trainer.evaluate((X, Y))["loss"] == pytest.approx(float(cross_entropy(trainer.model(X), Y).detach()))
    assert torch.equal(trainer.predict((X, Y, W)), trainer.predict(X))


@pytest.mark.parametrize("accumulation_steps", [1, 5])
def test_a_batch_whose_weights_are_all_zero_changes_nothing(accumulation_steps: int) -> None:
    models = [make_model(), make_model()]
    weights = torch.where(torch.arange(50) < 10, 0, W)
    sizes = {"batch_size": 10, "accumulation_steps": accumulation_steps}
    for model, start in zip(models, (0, 10), strict=True):
        data = (X[start:], Y[start:], weights[start:])
        make_trainer(model, sample_weight=True, **sizes).fit(data, max_length=Epochs(1))
    torch.testing.assert_close(models[0].weight, models[1].weight, rtol=0, atol=1e-15)


def test_mixed_precision_keeps_the_weights() -> None:
    expected, _ = by_hand(CASES[6].values[2])
    model = make_model().float()
    trainer = AMPTrainer(make_trainer(model, batch_size=50, sample_weight=True, class_weight=CLASSES), precision="bf16")
    trainer.fit((X.float(), Y, W.float()), max_length=Epochs(2))
    torch.testing.assert_close(model.weight.double(), expected, rtol=0, atol=2e-3)


def test_a_compiled_weighted_step_has_the_weights_of_training_by_hand() -> None:
    expected, _ = by_hand(CASES[6].values[2])
    model = make_model()
    trainer = CompiledTrainer(
        make_trainer(model, batch_size=50, sample_weight=True, class_weight=CLASSES), backend="eager"
    )
    trainer.fit((X, Y, W), max_length=Epochs(2))
    assert trainer.graphs == 1
    torch.testing.assert_close(model.weight, expected, rtol=0, atol=1e-14)


def test_weights_can_be_assigned_later() -> None:
    trainer = make_trainer(make_model(), batch_size=50)
    plain = trainer.evaluate((X, Y))["loss"]
    trainer.options.class_weight = CLASSES
    assert trainer.evaluate((X, Y))["loss"] == pytest.approx(
        float(cross_entropy(trainer.model(X), Y, CLASSES).detach())
    )
    trainer.options.class_weight = None
    assert trainer.evaluate((X, Y))["loss"] == plain


def test_a_weighted_run_resumes_as_if_it_had_not_stopped(tmp_path: Any) -> None:
    def run(epochs: int, model: nn.Module) -> None:
        options = {"sample_weight": True, "class_weight": "balanced", "batch_size": 16, "checkpoint_dir": tmp_path}
        make_trainer(model, save_every=1, **options).fit((X, Y, W), max_length=Epochs(epochs), resume="auto")

    first, second, whole = make_model(), make_model(), make_model()
    run(1, first)
    run(3, second)
    make_trainer(whole, sample_weight=True, class_weight="balanced", batch_size=16).fit((X, Y, W), max_length=Epochs(3))
    assert torch.equal(second.weight, whole.weight)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"class_weight": "equal"}, "class_weight: expected weights by class .* got 'equal'"),
        ({"class_weight": {0: 1.0}, "criterion": "MSELoss"}, "class_weight: expected CrossEntropyLoss or NLLLoss, got"),
        ({"class_weight": {0: 1.0}, "criterion": nn.CrossEntropyLoss(CLASSES)}, "the loss has a weight=… already"),
        (
            {"sample_weight": True, "criterion": nn.MSELoss(reduction="sum")},
            "a loss with reduction='mean', got MSELoss",
        ),
        ({"sample_weight": True, "loss_strategy": nn.MSELoss()}, "sample_weight: .* decides this"),
        ({"sample_weight": True, "train_step": lambda trainer, batch: {}}, "sample_weight: .* splits batches itself"),
    ],
)
def test_weights_without_an_effect_are_rejected(settings: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_trainer(make_model(), **settings)


def test_weights_beside_the_loss_of_a_subclass_are_rejected() -> None:
    class Own(Trainer):
        def get_loss_criterion(self) -> Any:
            return nn.CrossEntropyLoss()

    with pytest.raises(ConfigError, match="class_weight: get_loss_criterion of the subclass decides this"):
        Own(make_model(), class_weight={0: 2.0}, verbose=False)


@pytest.mark.parametrize(
    ("data", "settings", "message"),
    [
        (
            (X, Y),
            {"sample_weight": True},
            r"sample_weight: expected batches \(inputs, targets, weights\), .* got 2 items",
        ),
        ({"x": X, "label": Y}, {"sample_weight": "w"}, r"dictionaries with the key 'w', got \['label', 'x'\]"),
        ((X, Y, Z), {"sample_weight": True}, r"one weight for each of 50 samples, got the shape \(50, 3\)"),
        ((X, Y), {"class_weight": {7: 1.0}}, "the model has 3 classes, got a weight of class 7"),
        ((X, Y), {"class_weight": [1.0, 2.0]}, "the model has 3 classes, got 2 weights"),
        ([(X, Y)], {"class_weight": "balanced"}, "'balanced' needs class numbers in memory: .* got a list"),
        ((X, Y, W), {"sample_weight": True, "criterion": lambda out, y: out.mean()}, "which returns one number"),
    ],
)
def test_data_without_weights_is_rejected(data: Any, settings: Any, message: str) -> None:
    with pytest.raises((ConfigError, DataError), match=message):
        make_trainer(make_model(), batch_size=50, **settings).fit(data, max_length=Epochs(1))


def test_a_third_item_that_the_model_does_not_take_is_explained() -> None:
    with pytest.raises(DataError, match="if it holds a weight for each sample, give sample_weight=True"):
        make_trainer(make_model()).fit((X, Y, W), max_length=Epochs(1))
    with pytest.raises(TypeError) as caught:
        make_trainer(make_model()).fit([(X, Y, W)], max_length=Epochs(1))
    assert any("for each sample, give sample_weight=True" in note for note in caught.value.__notes__)
