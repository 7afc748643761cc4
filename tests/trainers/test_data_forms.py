"""Training on data as people have it equals training on the tensors that are made from it by hand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from dovetail import Epochs
from dovetail.data import pack
from dovetail.errors import DataError
from dovetail.trainers import Trainer

datasets: Any = pytest.importorskip("datasets")
pl: Any = pytest.importorskip("polars")

X = np.random.default_rng(0).normal(size=(48, 4))
Y = (X.sum(axis=1) > 0).astype(np.int32)
FRAME = pd.DataFrame(X, columns=list("abcd")).assign(kind=Y)
ROWS = [{"x": x, "label": int(y)} for x, y in zip(X.tolist(), Y, strict=True)]
HUGGING_FACE = datasets.Dataset.from_list(ROWS)


def by_hand(samples: list[Any]) -> tuple[Tensor, Tensor]:
    return torch.tensor([it["x"] for it in samples]), torch.tensor([it["label"] for it in samples])


def make_trainer(**settings: Any) -> Trainer:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
    options = {"batch_size": 16, "seed": 1, "learning_rate": 0.1, "num_workers": 0, "verbose": False, **settings}
    return Trainer(model, "cpu", **options)


@pytest.fixture(scope="module")
def reference() -> tuple[Tensor, dict[str, float], Tensor]:
    data = (torch.tensor(X, dtype=torch.float32), torch.tensor(Y).long())
    return results(data)


def results(data: Any, **settings: Any) -> tuple[Tensor, dict[str, float], Tensor]:
    trainer = make_trainer(**settings)
    trainer.fit(data, data, max_length=Epochs(3))
    return trainer.model.weight.detach(), trainer.evaluate(data), trainer.predict(data)


@pytest.mark.parametrize(
    ("data", "settings"),
    [
        pytest.param((X, Y), {}, id="float64 and int32"),
        pytest.param(FRAME, {"target": "kind"}, id="pandas"),
        pytest.param(pl.from_pandas(FRAME), {"target": "kind"}, id="polars"),
        pytest.param((FRAME[list("abcd")], FRAME["kind"]), {}, id="frame and series"),
        pytest.param((pl.from_pandas(FRAME)[list("abcd")], pl.Series(Y)), {}, id="frame and series of polars"),
        pytest.param({"x": X, "label": Y}, {}, id="dictionary"),
        pytest.param({"x": torch.tensor(X).float(), "kind": Y.tolist()}, {"target": "kind"}, id="dictionary, target"),
        pytest.param(list(zip(X, Y, strict=True)), {}, id="pairs"),
        pytest.param([(x, int(y)) for x, y in zip(X.tolist(), Y, strict=True)], {}, id="pairs of lists"),
        pytest.param(ROWS, {}, id="dictionaries"),
        pytest.param(HUGGING_FACE, {}, id="Hugging Face"),
        pytest.param(HUGGING_FACE.with_format("torch"), {}, id="Hugging Face, torch"),
        pytest.param(HUGGING_FACE.rename_column("label", "kind"), {"target": "kind"}, id="Hugging Face, target"),
        pytest.param(ROWS, {"collate_fn": by_hand}, id="list, collate_fn"),
        pytest.param(HUGGING_FACE, {"collate_fn": by_hand}, id="Hugging Face, collate_fn"),
    ],
)
def test_every_form_of_data_trains_the_same_weights(data: Any, settings: Any, reference: Any) -> None:
    weight, metrics, predictions = results(data, **settings)
    assert torch.equal(weight, reference[0])
    assert metrics == reference[1]
    assert torch.equal(predictions, reference[2])


def test_a_stream_of_hugging_face_is_read_in_batches() -> None:
    trainer = make_trainer()
    trainer.fit(HUGGING_FACE.to_iterable_dataset(), max_length=Epochs(2))
    assert trainer.context.progress.batches == 6
    assert trainer.context.progress.records == 96


def test_a_prediction_needs_no_target_and_finds_its_columns_by_name() -> None:
    trainer = make_trainer(target="kind")
    trainer.fit(FRAME, max_length=Epochs(1))
    expected = trainer.predict(torch.tensor(X, dtype=torch.float32))
    for frame in (FRAME, FRAME[list("dbca")], pl.from_pandas(FRAME[list("badc")])):
        assert torch.equal(trainer.predict(frame), expected)
    with pytest.raises(DataError, match=r"lacks \['d'\] and also has \['e'\]"):
        trainer.predict(FRAME.rename(columns={"d": "e"}))
    assert torch.equal(trainer.predict({"x": X}), expected)


def test_a_regression_learns_from_whole_numbers() -> None:
    settings: Any = {"criterion": "MSELoss", "target": ["kind"]}
    trainers = [make_trainer(**settings), make_trainer(**settings)]
    for trainer in trainers:
        trainer.model = nn.Linear(4, 1).requires_grad_()
        nn.init.zeros_(trainer.model.weight)
        nn.init.zeros_(trainer.model.bias)
    data = (torch.tensor(X, dtype=torch.float32), torch.tensor(Y, dtype=torch.float32)[:, None])
    for trainer, source in zip(trainers, (FRAME, data), strict=True):
        trainer.fit(source, max_length=Epochs(2))
    assert torch.equal(trainers[0].model.weight, trainers[1].model.weight)


def test_a_collate_function_can_be_assigned_later() -> None:
    trainer = make_trainer()
    trainer.options.collate_fn = by_hand
    trainer.fit(ROWS, ROWS, max_length=Epochs(1))
    assert trainer.context.progress.records == 48


def test_a_dry_run_finds_the_named_target() -> None:
    data = {"x": X, "kind": Y}
    # A problem would be a warning, and warnings are errors.
    assert len(make_trainer(target="kind").fit(data, data, dry_run=True).losses) == 1


# ------------------------------------------------------------------ data that cannot be used


class Doubles(Dataset[Any]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return X[index], Y[index]


def test_types_that_do_not_fit_the_model_are_named() -> None:
    with pytest.raises(RuntimeError) as caught:
        make_trainer().fit(Doubles())
    expected = "the inputs have the type float64, the model float32, and the targets int32"
    assert any(note.startswith(expected) for note in caught.value.__notes__)


def test_a_frame_without_a_target_is_rejected_before_the_first_step() -> None:
    with pytest.raises(DataError, match="which column is the target"):
        make_trainer().fit(FRAME)


def generator() -> Iterator[Any]:
    yield by_hand(ROWS[:24])
    yield by_hand(ROWS[24:])


@pytest.mark.parametrize("make", [generator, lambda: iter(list(generator())), lambda: map(tuple, generator())])
def test_data_that_can_be_read_only_once_trains_one_epoch_only(make: Any) -> None:
    trainer = make_trainer()
    with pytest.raises(DataError, match=r"which can be read only once, but training runs to Epochs\(2\)"):
        trainer.fit(make(), max_length=Epochs(2))
    assert trainer.context.progress.batches == 0
    trainer.fit(make(), max_length=Epochs(1))
    assert trainer.context.progress.batches == 2
    with pytest.raises(DataError, match=r"the valid data is a .*, which can be read only once"):
        trainer.fit(list(generator()), make(), max_length=Epochs(4))


class Plain(Dataset[Any]):
    """A dataset of the user, which may compute."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return torch.ones(3), index % 2


@pytest.mark.parametrize(
    ("data", "num_workers"),
    [
        (TensorDataset(torch.ones(8, 3), torch.zeros(8, dtype=torch.long)), 0),
        (Subset(ConcatDataset([TensorDataset(torch.ones(8, 3), torch.zeros(8, dtype=torch.long))]), [0, 5]), 0),
        ([(torch.ones(3), 0)] * 8, 0),
        ({"x": torch.ones(8, 3), "y": torch.zeros(8, dtype=torch.long)}, 0),
        (pack([[1, 2, 3]], 2), 0),
        (Plain(), 1),
        (Subset(Plain(), [0, 1]), 1),
    ],
    ids=["tensors", "subset", "list", "columns", "packed rows", "own dataset", "subset of an own dataset"],
)
def test_only_data_that_is_not_in_memory_gets_a_worker(data: Any, num_workers: int) -> None:
    trainer = Trainer(nn.Linear(3, 2), "cpu", train_dataset=data, batch_size=2, verbose=False)
    loader: Any = trainer._loader("train")
    assert loader.num_workers == num_workers
