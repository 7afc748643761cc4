"""Batches with names and models that compute their own loss, without transformers."""

from __future__ import annotations

import copy
import io
import warnings
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from dovetail import Epochs, Trainer
from dovetail.callbacks import ProgressDisplay
from dovetail.errors import ConfigError, DataError, UnknownNameError
from dovetail.trainers import AutoBatchTrainer, CompiledTrainer
from dovetail.trainers.composable import ComposableTrainer
from dovetail.trainers.metrics import Meter
from dovetail.trainers.strategies import CrossEntropyLossStrategy, MultipleForwardPassStepStrategy

SETTINGS: dict[str, Any] = {"optim_function": "SGD", "learning_rate": 0.5, "verbose": False}
SETTINGS |= {"momentum": 0.0, "weight_decay": 0.0}


class Tagger(nn.Module):
    """One score for each class of each token; with labels, also the mean loss over labels that are not masked."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(20, 6), nn.Linear(6, 5)
        self.double()

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None) -> Any:
        logits = self.head(self.embedding(input_ids).tanh())
        if labels is None:
            return {"logits": logits}
        return {"loss": cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class Scorer(Tagger):
    """Returns scores only."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Any:  # type: ignore[override]
        return super().forward(input_ids)


def make(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind()


def batch_of(lengths: list[int], seed: int = 0) -> dict[str, Tensor]:
    """Return padded sequences: tokens, mask, and labels that are masked behind the end of a sequence."""
    generator = torch.Generator().manual_seed(seed + sum(lengths))
    size = (len(lengths), max(lengths, default=0))
    mask = torch.arange(size[1])[None] < torch.tensor(lengths)[:, None]
    ids = torch.randint(20, size, generator=generator).where(mask, 0)
    labels = torch.randint(5, size, generator=generator).where(mask, -100)
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": labels}


def joined(batches: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return one large batch, padded to the longest sequence."""
    width = max(batch["labels"].shape[1] for batch in batches)
    pad = {"input_ids": 0, "attention_mask": 0, "labels": -100}
    return {
        name: torch.cat(
            [nn.functional.pad(it[name], (0, width - it[name].shape[1]), value=pad[name]) for it in batches]
        )
        for name in pad
    }


# The third batch has no label at all.
PARTS = [batch_of([3, 1]), batch_of([6, 5, 2]), batch_of([2, 2]), batch_of([4])]
PARTS[2]["labels"].fill_(-100)


def trained(kind: type[nn.Module], batches: list[Any], *, wrap: Any = None, style: Any = Trainer, **more: Any) -> Any:
    trainer = style(make(kind), **{**SETTINGS, **more})
    layer = trainer if wrap is None else wrap(trainer)
    layer.fit(batches, [PARTS[1], PARTS[0]], max_length=Epochs(3))
    return trainer


def difference(one: Any, other: Any) -> float:
    pairs = zip(one.model.parameters(), other.model.parameters(), strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


def test_a_model_with_its_own_loss_trains_like_a_loop_by_hand() -> None:
    model = make(Tagger)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(3):
        for batch in PARTS[:2]:
            optimizer.zero_grad()
            model(**batch)["loss"].backward()
            optimizer.step()
    ours = trained(Tagger, PARTS[:2])
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), ours.model.parameters(), strict=True))


@pytest.mark.parametrize("kind", [Tagger, Scorer])
@pytest.mark.parametrize("style", [Trainer, ComposableTrainer])
def test_accumulated_batches_count_by_their_labels(kind: type[nn.Module], style: Any) -> None:
    large = trained(kind, [joined(PARTS)], style=style)
    for batches in (PARTS, PARTS[2:] + PARTS[:2]):
        small = trained(kind, batches, accumulation_steps=4, style=style)
        assert difference(large, small) < 1e-12
        for name in ("train_loss", "valid_loss"):
            ours, one = (it.history.get_metric_values(name) for it in (small, large))
            assert ours == pytest.approx(one, abs=1e-12)


def test_a_window_without_labels_changes_nothing() -> None:
    before = make(Tagger)
    after = trained(Tagger, [PARTS[2], PARTS[2]], accumulation_steps=2)
    assert all(torch.equal(a, b) for a, b in zip(before.parameters(), after.model.parameters(), strict=True))


def test_the_own_loss_equals_the_criterion_on_the_logits() -> None:
    assert difference(trained(Tagger, PARTS[:2]), trained(Scorer, PARTS[:2])) < 1e-15


def test_a_chosen_loss_takes_precedence_over_the_own_one() -> None:
    def doubled(outputs: Any, labels: Tensor) -> Tensor:
        return 2 * cross_entropy(outputs["logits"].flatten(0, 1), labels.flatten())

    ours = trained(Tagger, PARTS[:2], criterion=doubled, learning_rate=0.25)
    assert difference(ours, trained(Tagger, PARTS[:2])) < 1e-15
    smooth = nn.CrossEntropyLoss(label_smoothing=0.1)
    by_strategy = trained(Scorer, PARTS[:2], loss_strategy=CrossEntropyLossStrategy(label_smoothing=0.1))
    assert difference(trained(Tagger, PARTS[:2], criterion=smooth), by_strategy) < 1e-15


def test_step_strategies_use_the_own_loss() -> None:
    twice = trained(Tagger, PARTS[:2], training_step_strategy=MultipleForwardPassStepStrategy(2))
    assert difference(twice, trained(Tagger, PARTS[:2])) < 1e-15


def test_micro_batches_of_a_masked_batch_count_by_their_labels() -> None:
    class Narrow(Tagger):
        def forward(self, input_ids: Tensor, attention_mask: Any = None, labels: Any = None) -> Any:
            if len(input_ids) > 2:
                raise torch.OutOfMemoryError("more than 2 rows")
            return super().forward(input_ids, attention_mask, labels)

    large = joined(PARTS)
    small = trained(Narrow, [large], wrap=AutoBatchTrainer)
    assert difference(small, trained(Tagger, [large])) < 1e-12


def test_a_graph_uses_the_own_loss_and_counts_its_labels() -> None:
    compiled: list[CompiledTrainer] = []

    def wrap(trainer: Trainer) -> CompiledTrainer:
        compiled.append(CompiledTrainer(trainer, backend="eager"))
        return compiled[0]

    batches = [batch_of([3, 1, 3]), batch_of([2, 3, 3]), batch_of([1, 1, 3])]
    ours, eager = trained(Tagger, batches, wrap=wrap), trained(Tagger, batches)
    assert compiled[0].graphs == 1
    assert difference(ours, eager) < 1e-12
    losses = [it.history.get_metric_values("train_loss") for it in (ours, eager)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-12)


def test_the_testing_strategy_reads_the_logits() -> None:
    class Classes(nn.Linear):
        def forward(self, values: Tensor, labels: Any = None) -> Any:
            return {"logits": super().forward(values)}

    trainer = ComposableTrainer(Classes(3, 3), **SETTINGS)
    nn.init.eye_(trainer.model.weight)
    nn.init.zeros_(trainer.model.bias)
    batch = {"values": torch.eye(3), "labels": torch.tensor([0, 1, 0])}
    assert trainer.test([batch]) == pytest.approx(2 / 3)


def test_evaluation_is_the_mean_over_all_labels() -> None:
    trainer, whole = Trainer(make(Tagger), metrics=["perplexity"], verbose=False), joined(PARTS)
    loss = trainer.model(**whole)["loss"].detach()
    metrics = trainer.evaluate(PARTS)
    assert metrics["loss"] == pytest.approx(loss.item(), abs=1e-12)
    assert metrics["perplexity"] == pytest.approx(loss.exp().item(), abs=1e-12)


def test_predictions_have_the_structure_of_the_outputs() -> None:
    trainer = Trainer(make(Tagger), verbose=False)
    same = [batch_of([3, 2]), batch_of([3])]
    predicted = trainer.predict(same)
    expected = torch.cat([trainer.model(**batch)["logits"] for batch in same])
    assert predicted.keys() == {"logits"}
    assert torch.equal(predicted["logits"], expected)
    rows = trainer.predict(PARTS)["logits"]
    assert [len(row) for row in rows] == [3, 3, 6, 6, 6, 2, 2, 4]


def test_a_model_returns_its_own_number_of_items() -> None:
    class Halved(Tagger):
        def forward(self, input_ids: Tensor, attention_mask: Any = None, labels: Any = None) -> Any:
            outputs = super().forward(input_ids, attention_mask, labels)
            return outputs if labels is None else {**outputs, "num_items": (labels != -100).sum() * 0.5}

    batches = [PARTS[0], PARTS[1], PARTS[3]]
    halved = trained(Halved, batches, accumulation_steps=3)
    assert difference(halved, trained(Tagger, batches, accumulation_steps=3)) < 1e-15


def test_an_autoencoder_needs_no_labels() -> None:
    class Auto(nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 3)

        def forward(self, values: Tensor, scale: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
            return {"loss": (super().forward(values) * scale - values).square().mean()}

    batches = [{"values": torch.randn(4, 3), "scale": torch.ones(4, 1)}]
    trainer = Trainer(make(Auto), **SETTINGS)
    losses = trainer.fit(batches, batches, max_length=Epochs(3)).get_metric_values("valid_loss")
    assert losses[2] < losses[0]


class TestNames:
    def test_the_key_label_reaches_the_parameter_labels(self) -> None:
        renamed = [{("label" if name == "labels" else name): it for name, it in batch.items()} for batch in PARTS[:2]]
        assert difference(trained(Tagger, renamed), trained(Tagger, PARTS[:2])) == 0

    def test_a_single_input_needs_no_matching_name(self) -> None:
        x = torch.randn(8, 4)
        pairs, names = [(x, torch.arange(8) % 2)], [{"image": x, "label": torch.arange(8) % 2}]
        one, other = (Trainer(nn.Linear(4, 2), seed=0, **SETTINGS) for _ in range(2))
        other.model = copy.deepcopy(one.model)
        one.fit(pairs, max_length=Epochs(2))
        other.fit(names, max_length=Epochs(2))
        assert difference(one, other) < 1e-7
        assert torch.equal(other.predict([{"image": x}]), other.model(x))

    def test_an_unknown_key_is_left_out_with_one_warning(self) -> None:
        class Fresh(Tagger):
            pass

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            ours = trained(Fresh, [{**batch, "index": torch.zeros(len(batch["labels"]))} for batch in PARTS[:2]])
        assert [str(it.message) for it in caught] == [
            "'index' of the batch: Fresh.forward has no such parameter, so it is not passed on"
        ]
        assert difference(ours, trained(Tagger, PARTS[:2])) == 0

    def test_keys_that_do_not_match_at_all_give_one_sentence(self) -> None:
        batch = {"left": torch.zeros(2, 3), "right": torch.zeros(2, 3), "labels": torch.zeros(2, dtype=torch.long)}
        with pytest.raises(
            DataError, match=r"no key of the batch \('left', 'right'\) is a parameter of Linear.forward"
        ):
            Trainer(nn.Linear(3, 2), **SETTINGS).fit([batch])

    def test_a_batch_without_labels_and_loss_gives_one_sentence(self) -> None:
        batch = {name: it for name, it in PARTS[0].items() if name != "labels"}
        with pytest.raises(DataError, match="the batch has no targets: Tagger returns no loss for it; give the labels"):
            Trainer(make(Tagger), **SETTINGS).fit([batch])


def test_the_loss_of_a_meter_is_weighted_by_items_and_tokens_are_summed() -> None:
    meter = Meter()
    meter.add({"loss": torch.tensor(1.0), "other": 1.0, "num_items": torch.tensor(3), "num_tokens": 5}, 1)
    meter.add({"loss": torch.tensor(5.0), "other": 3.0, "num_items": 1, "num_tokens": torch.tensor(2)}, 1)
    # A batch without weight, which a process without data computes along with the others.
    meter.add({"loss": torch.tensor(9.0), "other": 9.0, "num_items": 4, "num_tokens": 7}, 0)
    assert meter.compute() == {"loss": 2.0, "other": 2.0, "tokens": 7.0}
    assert meter.tokens_per_sample == 3.5


def test_the_display_shows_tokens_per_second_and_no_count() -> None:
    text = io.StringIO()
    display = ProgressDisplay(1e9, Console(file=text, force_terminal=True, width=160, color_system=None))
    trainer = Trainer(make(Tagger), callbacks=[display], print_every=1, **SETTINGS)
    trainer.fit(PARTS, max_length=Epochs(1))
    assert " tok/s" in text.getvalue()
    assert "tokens" not in text.getvalue()
    assert trainer.history.get_latest_metric("train_tokens") == 25


def test_a_collate_function_makes_batches_of_lists_in_every_stage() -> None:
    samples = [{"x": torch.full((3,), float(i)), "y": i % 2} for i in range(10)]

    def collate(chosen: list[dict[str, Any]]) -> tuple[Tensor, Tensor]:
        return torch.stack([it["x"] for it in chosen]), torch.tensor([it["y"] for it in chosen])

    trainer = Trainer(nn.Linear(3, 2), collate_fn=collate, batch_size=4, num_workers=0, **SETTINGS)
    trainer.fit(samples, samples, max_length=Epochs(2))
    # The last batch has two samples and is dropped in training.
    assert trainer.context.progress.batches == 4
    assert torch.equal(trainer.predict(samples), trainer.model(collate(samples)[0]))
    with pytest.raises(ConfigError, match="collate_fn: expected a function of a list of samples, got 3"):
        Trainer(nn.Linear(3, 2), collate_fn=3)


def test_metrics_by_name_suggest_the_nearest_one() -> None:
    with pytest.raises(UnknownNameError, match="perplexity"):
        Trainer(nn.Linear(3, 2), metrics=["perplexty"])
