from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterableDataset

from dovetail.data import as_loader
from dovetail.data.columns import Columns
from dovetail.data.forms import DataForm
from dovetail.errors import DataError, UnknownNameError

datasets: Any = pytest.importorskip("datasets")
pl: Any = pytest.importorskip("polars")

TABLE = {"age": [30, 41, 25], "height": [1.5, 2.25, 1.75], "is_new": [True, False, True], "label": [0, 2, 1]}
INPUTS = torch.tensor([[30, 1.5, 1], [41, 2.25, 0], [25, 1.75, 1]])


@pytest.fixture(params=[pd.DataFrame, pl.DataFrame], ids=["pandas", "polars"])
def frame(request: pytest.FixtureRequest) -> Any:
    return request.param(TABLE)


# ------------------------------------------------------------------ data frames


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_frame_is_a_matrix_of_inputs_and_its_target(frame: Any, dtype: torch.dtype) -> None:
    x, y = DataForm(target="label", dtype=dtype, target_type="classes").convert(frame)
    assert torch.equal(x, INPUTS.to(dtype))
    assert x.dtype == dtype
    assert torch.equal(y, torch.tensor([0, 2, 1]))


def test_several_targets_are_a_matrix(frame: Any) -> None:
    form = DataForm(target=["height", "age"], dtype=torch.float32, target_type="numbers")
    x, y = form.convert(frame)
    assert torch.equal(x, torch.tensor([[1.0, 0], [0, 2], [1, 1]]))
    assert torch.equal(y, INPUTS[:, [1, 0]])


def test_a_column_of_weights_follows_the_target(frame: Any) -> None:
    x, y, weights = DataForm(sample_weight="height").convert(frame)
    assert x.shape == (3, 2)
    assert y.tolist() == [0, 2, 1]
    assert weights.tolist() == [1.5, 2.25, 1.75]


def test_a_frame_for_a_prediction_needs_no_target(frame: Any) -> None:
    without = frame[["age", "height", "is_new"]]
    (x,) = DataForm(target="label", dtype=torch.float32).convert(without)
    assert torch.equal(x, INPUTS)


def test_columns_are_read_by_name_in_the_order_of_training(frame: Any) -> None:
    form = DataForm(target="label")
    form.convert(frame)
    later = DataForm(target="label", features=form.features)
    x, _ = later.convert(frame[["is_new", "label", "age", "height"]])
    assert torch.equal(x, INPUTS)
    message = r"columns \['age', 'height', 'is_new'\]; this DataFrame lacks \['age'\]$"
    with pytest.raises(DataError, match=message):
        later.convert(frame[["is_new", "label", "height"]])


def test_frames_and_series_can_be_items_of_a_tuple(frame: Any) -> None:
    x, y = DataForm().convert((frame[["age", "height", "is_new"]], frame["label"]))
    assert torch.equal(x, INPUTS)
    assert y.tolist() == [0, 2, 1]


def test_nullable_numbers_without_missing_values_are_numbers() -> None:
    frame = pd.DataFrame(
        {"a": pd.Series([1, 2], dtype="Int64"), "b": pd.Series([0.5, 1], dtype="Float64"), "y": [0, 1]}
    )
    assert torch.equal(DataForm().convert(frame)[0], torch.tensor([[1, 0.5], [2, 1]]))


@pytest.mark.parametrize(
    ("table", "form", "message"),
    [
        ({"a": [1.0, 2.0]}, {}, r"which column is the target\? Give Trainer\(…, target=…\); the columns are 'a'$"),
        ({"a": ["x", "y"], "label": [0, 1]}, {}, "expected numbers, but the column 'a' has the type [sS]tr"),
        ({"a": [1.0, None], "label": [0, 1]}, {}, "the column 'a' has 1 missing values"),
        ({"a": [1, None], "label": [0, 1]}, {}, "the column 'a' has 1 missing values"),
        ({"a": [1, 2], "label": [0.0, 1.0]}, {}, "the column 'label' holds targets of type torch.float64, but cross"),
        ({"label": [0, 1]}, {}, "no columns besides the target"),
        ({"a": [1, 2], "label": [0, 1]}, {"sample_weight": True}, "expected the name of a column of the DataFrame"),
    ],
)
@pytest.mark.parametrize("kind", [pd.DataFrame, pl.DataFrame])
def test_a_frame_without_numbers_is_rejected(kind: Any, table: Any, form: Any, message: str) -> None:
    settings: dict[str, Any] = {"needs_target": True, "dtype": torch.float32, "target_type": "classes"}
    with pytest.raises(DataError, match=message):
        DataForm(**settings, **form).convert(kind(table))


def test_a_misspelled_column_is_answered_with_the_nearest(frame: Any) -> None:
    with pytest.raises(UnknownNameError, match="unknown column 'lable': did you mean 'label'"):
        DataForm(target="lable", needs_target=True).convert(frame)


def test_a_lazy_frame_is_rejected() -> None:
    with pytest.raises(DataError, match=r"give frame.collect\(\)"):
        as_loader(pl.LazyFrame(TABLE), batch_size=2)


# ------------------------------------------------------------------ dictionaries


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("drop_last", [False, True])
def test_batches_of_a_dictionary_equal_those_of_torch(shuffle: bool, drop_last: bool) -> None:
    columns = {"x": torch.randn(70, 3), "label": torch.arange(70)}
    settings: Any = {"batch_size": 16, "shuffle": shuffle, "drop_last": drop_last}
    torch.manual_seed(3)
    expected = list(TorchDataLoader(Columns(columns), **settings))
    after = torch.get_rng_state()
    torch.manual_seed(3)
    found = list(as_loader(columns, **settings))
    assert torch.equal(torch.get_rng_state(), after)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert list(one) == ["x", "label"]
        assert all(torch.equal(one[name], other[name]) for name in other)


# ------------------------------------------------------------------ lists of samples


X, Y = torch.randn(5, 3), torch.arange(5)


@pytest.mark.parametrize(
    "samples",
    [
        list(zip(X, Y, strict=True)),
        list(zip(X.numpy(), Y.tolist(), strict=True)),
        [[x.tolist(), y] for x, y in zip(X, Y.numpy(), strict=True)],
    ],
)
def test_a_list_of_pairs_is_a_pair_of_columns(samples: Any) -> None:
    x, y = DataForm(dtype=torch.float32, target_type="classes").convert(samples)
    assert torch.equal(x, X)
    assert torch.equal(y, Y)


def test_a_list_of_dictionaries_is_a_dictionary_of_columns() -> None:
    rows = [{"x": x.tolist(), "n": 1.5, "label": y} for x, y in zip(X, Y.tolist(), strict=True)]
    columns = DataForm(dtype=torch.float32).convert(rows).columns
    assert torch.equal(columns["x"], X)
    assert torch.equal(columns["n"], torch.full((5,), 1.5))
    assert torch.equal(columns["label"], Y)


@pytest.mark.parametrize("batches", [[(X, Y)], [{"x": X, "label": Y}], [X], [], [(X, None)]])
def test_a_list_of_batches_is_left_unchanged(batches: Any) -> None:
    assert DataForm().convert(batches) is batches


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([(X[0], 1), (X[0, :2], 0)], r"item 1 of the samples .* shapes such as \(2,\) and \(3,\); give collate_fn=…"),
        ([([1.0], 1), ([1.0, 2.0], 0)], r"item 1 of the samples .*, got \[1.0\]; give collate_fn=…"),
        ([("text", 1), ("more", 0)], "item 1 of the samples .*, got 'text'; give collate_fn=…"),
        ([{"x": 1.0, "y": 1}, {"y": 1}], r"dictionaries with the keys \['x', 'y'\], got one with \['y'\]"),
        ([(1.0, 1), (1.0, 1, 2)], "expected samples of 2 items, got one of 3"),
    ],
)
def test_samples_that_do_not_fit_together_are_rejected(samples: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        DataForm().convert(samples)


def test_a_function_that_forms_batches_receives_the_samples_of_a_list() -> None:
    samples = [("a", 1), ("b", 2), ("c", 3)]
    assert list(as_loader(samples, batch_size=2, collate_fn=list)) == [[("a", 1), ("b", 2)], [("c", 3)]]


# ------------------------------------------------------------------ types


def test_arrays_have_the_type_of_the_model_with_one_note(caplog: pytest.LogCaptureFixture) -> None:
    x, y = np.ones((2, 2)), np.array([0, 1], np.int32)
    form = DataForm(dtype=torch.float32, target_type="classes")
    with caplog.at_level(logging.INFO, "dovetail"):
        found = form.convert((x, y))
    assert [it.dtype for it in found] == [torch.float32, torch.int64]
    notes = [record.getMessage() for record in caplog.records]
    assert notes == ["item 1 of the tuple is converted from torch.float64 to torch.float32, the type of the model"]


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.int32, np.bool_])
def test_class_numbers_of_any_whole_type_become_int64(dtype: Any) -> None:
    y = np.array([0, 1], dtype)
    for labels in (y, torch.from_numpy(y)):
        _, found = DataForm(dtype=torch.float32, target_type="classes").convert((np.ones((2, 2)), labels))
        assert found.dtype == torch.int64
        assert found.tolist() == [0, 1]


def test_numbers_to_predict_have_the_type_of_the_model() -> None:
    _, y = DataForm(dtype=torch.float32, target_type="numbers").convert((np.ones((2, 2)), np.array([3, 4])))
    assert y.dtype == torch.float32


def test_tensors_keep_the_floating_point_type_that_the_user_chose() -> None:
    x, y = DataForm(dtype=torch.float32).convert((torch.ones(2, 2, dtype=torch.float64), torch.zeros(2).double()))
    assert (x.dtype, y.dtype) == (torch.float64, torch.float64)


# ------------------------------------------------------------------ Hugging Face


def test_a_hugging_face_dataset_returns_tensors() -> None:
    plain = datasets.Dataset.from_dict({"x": X.tolist(), "label": Y.tolist()})
    for data in (plain, plain.with_format("torch")):
        (batch,) = as_loader(data, batch_size=5)
        assert torch.equal(batch["x"], X)
        assert torch.equal(batch["label"], Y)


def test_a_stream_of_hugging_face_returns_tensors() -> None:
    stream = datasets.Dataset.from_dict({"x": X.tolist(), "label": Y.tolist()}).to_iterable_dataset()
    assert isinstance(stream, IterableDataset)
    (batch,) = as_loader(stream, batch_size=5)
    assert torch.equal(batch["x"], X)


def test_a_dictionary_of_hugging_face_datasets_is_rejected() -> None:
    parts = datasets.DatasetDict({"train": datasets.Dataset.from_dict({"x": [1]})})
    with pytest.raises(DataError, match=r"a DatasetDict holds several datasets: give one of them, such as data\['tr"):
        as_loader(parts, batch_size=2)
