"""Which entries of a model patterns choose."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from toy import mlp

from dovetail.errors import ConfigError
from dovetail.federated.algorithms.layers import as_patterns, last_layers, local_names, matching
from dovetail.federated.personalization import personalizes
from dovetail.trainers.context import TrainingContext

NAMES = ["fc1.weight", "fc1.bias", "fc10.weight", "features.0.weight", "features.0.bias", "features.12.weight"]


@pytest.mark.parametrize(
    ("pattern", "chosen"),
    [
        ("fc1", {"fc1.weight", "fc1.bias"}),
        ("fc1*", {"fc1.weight", "fc1.bias", "fc10.weight"}),
        ("fc1.weight", {"fc1.weight"}),
        ("features", {"features.0.weight", "features.0.bias", "features.12.weight"}),
        ("features.0", {"features.0.weight", "features.0.bias"}),
        ("features.?", {"features.0.weight", "features.0.bias"}),
        ("features.*.weight", {"features.0.weight", "features.12.weight"}),
        ("*.bias", {"fc1.bias", "features.0.bias"}),
        ("fc[1-9]", {"fc1.weight", "fc1.bias"}),
    ],
)
def test_a_pattern_matches_whole_names(pattern: str, chosen: set[str]) -> None:
    assert matching(NAMES, [pattern]) == chosen


def test_a_name_with_a_bracket_matches_itself() -> None:
    assert matching(["block[0].weight", "block0.weight"], ["block[0]"]) == {"block[0].weight", "block0.weight"}
    assert matching(["block[0].weight"], ["block[0].weight"]) == {"block[0].weight"}


def test_a_pattern_without_a_match_is_rejected_with_the_known_names() -> None:
    with pytest.raises(ConfigError, match=r"local_layer_names: 'haed' matches nothing; the model has body.weight, .*"):
        local_names(mlp(), ["head", "haed"])


@pytest.mark.parametrize(
    ("given", "stays"),
    [
        ({}, {"head.weight", "head.bias"}),
        ({"local": ["head"]}, {"head.weight", "head.bias"}),
        ({"global_": ["body"]}, {"head.weight", "head.bias"}),
        ({"local": ["body"], "global_": ["head"]}, {"body.weight", "body.bias"}),
        ({"local": ["*.bias"]}, {"body.bias", "head.bias"}),
    ],
)
def test_unmatched_layers_are_of_the_other_kind(given: Any, stays: set[str]) -> None:
    assert local_names(mlp(), **given) == stays


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"local": ["head"], "global_": ["head.bias", "body"]}, "both choose 'head.bias'"),
        ({"local": ["head.bias"], "global_": ["body"]}, "neither local_layer_names nor .* chooses 'head.weight'"),
        ({"local": ["*"]}, "everything of the model would stay"),
        ({"global_": ["body", "head"]}, "nothing of the model would stay"),
        ({"num_local_layers": 2}, "num_local_layers: expected fewer than the 2 layers .* got 2"),
        ({"num_local_layers": 0}, "num_local_layers: expected a whole number that is at least 1, got 0"),
    ],
)
def test_invalid_layer_patterns_are_rejected(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        local_names(mlp(), **given)


def test_a_tensor_with_two_names_is_local_or_shared_as_a_whole() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    model[2].weight = model[0].weight
    with pytest.raises(ConfigError, match=r"'0.weight' and '2.weight' are one tensor; name both, or neither"):
        local_names(model)
    assert local_names(model, ["0.weight", "2"]) == {"0.weight", "2.weight", "2.bias"}


def test_the_last_layers_are_counted_by_modules_with_parameters() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.ReLU()))
    assert last_layers(model, 1) == ["1.1"]
    assert last_layers(model, 2) == ["1.0", "1.1"]


def test_buffers_belong_to_their_layer() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    assert local_names(model) == {name for name in model.state_dict() if name.startswith("1.")}


@pytest.mark.parametrize(
    ("given", "patterns"),
    [(None, ()), ("head", ("head",)), (2, ("2",)), ([0, "2"], ("0", "2")), (("a", "b"), ("a", "b"))],
)
def test_layer_names_may_be_one_or_several_and_numbers_of_a_sequential(given: Any, patterns: Any) -> None:
    assert as_patterns(given) == patterns


def test_only_the_round_after_the_last_personalizes() -> None:
    context = TrainingContext(torch.nn.Linear(1, 1))
    assert not personalizes(context)
    context.config["rounds"] = 3
    found = []
    for context.current_round in (0, 3, 4):
        found.append(personalizes(context))
    assert found == [False, False, True]
