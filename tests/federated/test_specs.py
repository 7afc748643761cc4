"""Pieces from specifications: the types of their arguments are checked by annotations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import pytest

from dovetail.errors import ConfigError, MissingExtraError
from dovetail.federated.postprocess.registry import make
from dovetail.federated.robust import Krum, make_aggregator
from dovetail.federated.specs import build, spec_problems
from dovetail.registry import Registry


def _piece(
    count: int = 1,
    share: float = 0.5,
    is_on: bool = False,
    name: str | None = None,
    bits: Literal[4, 8] = 8,
    sizes: Sequence[int] = (),
    extra: Mapping[str, Any] | None = None,
    rule: Literal["a", "b"] | Callable[[int], int] = "a",
    unknown: NotImported = None,  # type: ignore[name-defined]  # noqa: F821
) -> dict[str, Any]:
    return dict(locals())


pieces: Registry[Callable[..., dict[str, Any]]] = Registry("piece", lambda: {"piece": _piece})


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"count": 1e3}, 1000),
        ({"count": np.int64(3)}, 3),
        ({"share": 1}, 1.0),
        ({"share": np.float32(0.5)}, 0.5),
        ({"name": None}, None),
        ({"bits": 4}, 4),
        ({"sizes": [1, 2.0]}, [1, 2]),
        ({"extra": {"a": 1}}, {"a": 1}),
        ({"rule": "b"}, "b"),
        ({"rule": abs}, abs),
        ({"unknown": "anything"}, "anything"),
    ],
)
def test_an_argument_is_converted_by_its_annotation(given: dict[str, Any], expected: Any) -> None:
    (name,) = given
    made = build(pieces, {"piece": given})[name]
    assert (made, type(made)) == (expected, type(expected))


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"count": True}, "count: expected a whole number, got True"),
        ({"count": 2**60}, "count: expected a whole number that a float can hold, got "),
        ({"share": "0.1"}, "share: expected a number, got '0.1'"),
        ({"share": 10**400}, "share: expected a number, got 1000"),
        ({"share": float("nan")}, "share: expected a number, got nan"),
        ({"is_on": 1}, "is_on: expected true or false, got 1"),
        ({"name": 3}, "name: expected text or null, got 3"),
        ({"bits": 8.0}, "bits: expected one of 4, 8, got 8.0"),
        ({"sizes": "12"}, "sizes: expected a list with a whole number as every item, got '12'"),
        ({"sizes": [1, "2"]}, "sizes: expected a whole number as item 2, got"),
        ({"extra": [1]}, "extra: expected 'key: value' lines or null, got [1]"),
        ({"rule": 3}, "rule: expected one of a, b or a function, got 3"),
    ],
)
def test_an_argument_of_the_wrong_type_is_rejected(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build(pieces, {"piece": given})
    assert str(caught.value).startswith(f"piece 'piece': {sentence}")
    ((keys, found),) = spec_problems(pieces, {"piece": given})
    assert keys == ("piece", *given)
    assert sentence.partition(": ")[2].partition(", got")[0] in found


def test_aggregators_and_postprocessors_built_in_python_are_checked() -> None:
    with pytest.raises(ConfigError, match="aggregator 'krum': num_attackers: expected a whole number, got 'x'"):
        make_aggregator({"krum": {"num_attackers": "x"}})
    with pytest.raises(ConfigError, match=r"postprocessor 'top_k': ratio: expected a number, got '0\.1'"):
        make({"top_k": {"ratio": "0.1"}})
    assert make_aggregator({"krum": {"num_attackers": 2.0}}) == Krum(2)


def test_a_missing_extra_is_not_reported_as_a_file_mistake() -> None:
    def needy() -> None:
        raise MissingExtraError("not installed")

    assert list(spec_problems(Registry("piece", lambda: {"needy": needy}), "needy")) == []
