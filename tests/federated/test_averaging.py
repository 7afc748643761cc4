"""How weights move."""

from __future__ import annotations

import torch

from dovetail.federated.averaging import moved, weighted_mean
from dovetail.federated.messages import Update


def test_unnamed_entries_are_the_same_tensors() -> None:
    weights = {"w": torch.ones(2), "head": torch.ones(2)}
    after = moved(weights, {"w": torch.ones(2)})
    assert after["head"] is weights["head"]
    assert after["w"].tolist() == [2.0, 2.0]


def test_averaging_does_not_change_its_inputs() -> None:
    weights = {"w": torch.ones(2)}
    moved(weights, {"w": torch.ones(2)}, rate=0.5)
    assert weights["w"].tolist() == [1.0, 1.0]


def test_dtypes_are_kept_and_integers_are_rounded() -> None:
    weights = {"half": torch.ones(1, dtype=torch.bfloat16), "n": torch.tensor(10), "on": torch.tensor(False)}
    after = moved(weights, {"half": torch.ones(1), "n": torch.tensor(2.6), "on": torch.tensor(1.0)})
    assert [value.dtype for value in after.values()] == [torch.bfloat16, torch.int64, torch.bool]
    assert after["n"].item() == 13
    assert after["on"].item() is True


def test_the_mean_is_computed_in_the_given_order() -> None:
    values = [1e8, 1.0, -1e8]
    updates = [Update(k, 1, 1, delta={"w": torch.tensor([v])}) for k, v in enumerate(values)]
    total = torch.tensor([1e8]) + torch.tensor([1.0]) + torch.tensor([-1e8])
    assert torch.equal(weighted_mean(updates)["w"], total / 3)
