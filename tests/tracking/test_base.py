from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from dovetail.errors import ConfigError
from dovetail.tracking import Histogram, Run
from dovetail.tracking.base import sort


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64])
def test_a_histogram_counts_every_value(dtype: torch.dtype) -> None:
    histogram = Histogram(torch.tensor([[0, 1], [1, 4]], dtype=dtype), bins=4)
    assert histogram.counts.tolist() == [1, 2, 0, 1]
    assert histogram.edges.tolist() == [0, 1, 2, 3, 4]
    assert (histogram.sum, histogram.sum_squares) == (6, 18)


def test_a_histogram_separates_values_that_are_not_finite() -> None:
    histogram = Histogram(torch.tensor([0.0, math.nan, 2.0, math.inf, -math.inf]), bins=2)
    assert histogram.counts.tolist() == [1, 1]
    assert histogram.num_not_finite == 3


@pytest.mark.parametrize("values", [[], [math.nan], torch.zeros(0)])
def test_a_histogram_of_an_empty_tensor_is_empty(values: Any) -> None:
    assert Histogram(values).counts.sum() == 0


def test_a_histogram_is_a_copy_of_its_tensor() -> None:
    weights = torch.tensor([0.0, 1.0], requires_grad=True)
    histogram = Histogram(weights, bins=2)
    with torch.no_grad():
        weights.fill_(7.0)
    assert histogram.edges.tolist() == [0.0, 0.5, 1.0]


def test_loggable_values_are_distinguished_by_type(figure: Any) -> None:
    histogram = Histogram([1.0])
    values: dict[str, Any] = {"b": torch.tensor([2.0]), "c": np.float32(3)}
    found = sort({"a": 1, **values, "h": histogram, "valid/f": figure})
    assert found.numbers == {"a": 1.0, "b": 2.0, "c": 3.0}
    assert found.histograms == {"h": histogram}
    assert found.figures == {"valid/f": figure}


def test_a_tensor_with_several_elements_is_rejected_with_its_shape() -> None:
    with pytest.raises(ConfigError, match=r"'output'.*got a tensor of shape \(2, 3\)"):
        sort({"output": torch.zeros(2, 3)})  # type: ignore[dict-item]


@pytest.mark.parametrize("name", ["", "..", "../x", "/etc/x", "a//b", "a/../../b", "a\\b", "a\0", "c:x"])
def test_a_figure_name_cannot_leave_its_folder(figure: Any, name: str) -> None:
    with pytest.raises(ConfigError, match="expected a name such as"):
        sort({name: figure})


@pytest.mark.parametrize("identity", ["", "../x", "a'b", "a b", "x" * 65])
def test_an_id_that_could_leave_the_folder_is_rejected(identity: Any) -> None:
    with pytest.raises(ConfigError, match="run id"):
        Run(identity)
