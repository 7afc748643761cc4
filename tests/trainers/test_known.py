"""Inputs of a step besides tensors, and objects with unknown code."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dovetail.trainers.strategies import CrossEntropyLossStrategy
from dovetail.trainers.whole_step import UnknownError, read_by

KNOWN = frozenset({CrossEntropyLossStrategy})


class Own(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


class OwnLinear(nn.Linear):
    pass


def with_own_forward() -> nn.Module:
    layer = nn.Identity()
    layer.forward = lambda x: 2 * x  # type: ignore[method-assign]
    return layer


def model() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Dropout(0.1), nn.Sequential(nn.LeakyReLU()))


def loss(**settings: Any) -> Any:
    strategy = CrossEntropyLossStrategy(**settings)
    return partial(strategy.compute_loss, context=None)


@dataclass
class Settings:
    width: int
    rates: list[float] = field(default_factory=lambda: [0.1])


@dataclass(slots=True)
class Narrow:
    width: int


def with_settings(settings: Any) -> nn.Module:
    layer = Own()
    layer.settings = settings
    return layer


@pytest.mark.parametrize("make", [Settings, Narrow, lambda width: SimpleNamespace(width=width)])
def test_plain_settings_of_a_module_of_the_user_are_described(make: Any) -> None:
    def described(width: int) -> Any:
        return read_by(with_settings(make(width)), KNOWN, trusts_code=True)

    assert described(3) == described(3)
    assert described(3) != described(4)
    with pytest.raises(UnknownError):
        read_by(make(3), KNOWN)


class Entries(dict[str, int]):
    scale: float


class OtherEntries(dict[str, int]):
    pass


class OwnAttributes(dict[str, int]):
    def __init__(self, **entries: int) -> None:
        super().__init__(entries)
        self.__dict__ = self  # type: ignore[assignment]


def test_the_class_and_the_attributes_of_a_dictionary_are_described() -> None:
    def described(kind: Any, **attributes: float) -> Any:
        entries = kind(width=3)
        vars(entries).update(attributes)
        return read_by(entries, KNOWN, trusts_code=True)

    found = [described(Entries), described(OtherEntries), described(Entries, scale=1.0), described(Entries, scale=2.0)]
    assert all(found.count(it) == 1 for it in found)
    assert described(Entries, scale=2.0) == found[-1]
    assert described(OwnAttributes) == described(OwnAttributes)


@dataclass
class Lazy:
    width: int
    table: Any = field(init=False)


def test_a_field_that_was_not_set_yet_is_described() -> None:
    settings = Lazy(3)
    before = read_by(settings, KNOWN, trusts_code=True)
    settings.table = 1.0
    assert read_by(settings, KNOWN, trusts_code=True) != before


def test_an_object_that_contains_itself_is_unknown() -> None:
    layer, settings = Own(), Settings(3)
    layer.parents, vars(settings)["all"] = [layer], [settings]
    for piece in (layer, settings):
        with pytest.raises(UnknownError, match="contains itself"):
            read_by(piece, KNOWN, trusts_code=True)
    # Twice, but not inside of itself.
    assert read_by([Settings(3)] * 2, KNOWN, trusts_code=True)


@pytest.mark.parametrize("make", [model, loss, lambda: nn.CrossEntropyLoss(torch.ones(3)), lambda: {"a": [1, None]}])
def test_equal_strategies_have_equal_descriptions(make: Any) -> None:
    assert read_by(make(), KNOWN) == read_by(make(), KNOWN)


@pytest.mark.parametrize(
    "change",
    [
        lambda it: setattr(it[0], "padding", (1, 1)),
        lambda it: setattr(it[1], "momentum", 0.2),
        lambda it: setattr(it[1], "running_mean", None),
        lambda it: setattr(it[2], "p", 0.2),
        lambda it: it[3].append(nn.ReLU()),
        lambda it: it[3].__setitem__(0, nn.ELU()),
        lambda it: it.eval(),
    ],
)
def test_a_change_of_any_layer_changes_the_description(change: Any) -> None:
    changed = model()
    change(changed)
    assert read_by(changed, KNOWN) != read_by(model(), KNOWN)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (loss(), loss(label_smoothing=0.1)),
        (loss(), loss(weight=torch.ones(3))),
        (nn.CrossEntropyLoss(), nn.CrossEntropyLoss(torch.ones(3))),
        ({"a": 1}, {"a": True}),
        ({"a": 1}, {"b": 1}),
        ([1], (1,)),
        (float("nan"), float("nan")),
    ],
)
def test_different_settings_compare_as_different(one: Any, other: Any) -> None:
    assert read_by(one, KNOWN) != read_by(other, KNOWN)


@pytest.mark.parametrize(
    "piece",
    [
        Own(),
        OwnLinear(2, 2),
        nn.Sequential(nn.Linear(2, 2), Own()),
        with_own_forward(),
        nn.TripletMarginWithDistanceLoss(distance_function=lambda x, y: x - y),
        lambda outputs, labels: outputs.sum(),
        partial(max, 1),
        loss(weight=object()),
        {"own": object()},
    ],
    ids=lambda piece: type(piece).__name__,
)
def test_a_strategy_with_custom_code_is_not_comparable(piece: Any) -> None:
    with pytest.raises(UnknownError, match="may read values that are not inputs of a graph"):
        read_by(piece, KNOWN)


def test_an_unknown_strategy_is_not_comparable() -> None:
    with pytest.raises(UnknownError):
        read_by(loss(), frozenset())
