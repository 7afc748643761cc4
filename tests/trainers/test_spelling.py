"""Texts of Python code for the keys of compiled code: equal for equal code, and different for every change."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from dovetail.trainers.whole_step import read_by
from dovetail.trainers.whole_step.reuse import with_code
from dovetail.trainers.whole_step.spelling import spell

SOURCE = """
import math
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

import layers

SCALE = 2.0


def shifted(x, *, by=1.0):
    return torch.relu(x) + by


@dataclass
class Config:
    width: int = 2
    rates: list = field(default_factory=list)

    def doubled(self):
        return self.width * 2


@dataclass(frozen=True)
class Result:
    logits: torch.Tensor
    weight: float = 0.5

    def __call__(self):
        return 3


class Base(nn.Module):
    factor = 3.0

    def scaled(self, x):
        return x * self.factor * SCALE

    @property
    def half(self):
        return 0.5

    @staticmethod
    def named(kind):
        return kind in {"one", "two", "three"}


class Model(Base):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.config = Config(rates=[0.1])

    def forward(self, x):
        # A comment.
        x = [shifted(each) for each in (self.scaled(x), self.half * x)][0] * self.config.doubled()
        result = Result(x)
        x = result.logits * result.weight
        return layers.inner.act(F.gelu(self.linear(x))) / math.sqrt(x.shape[-1])
"""
LAYERS = """
LIMIT = 4.0


def act(x):
    return x.clamp(max=LIMIT)
"""


def text_of_model(change: tuple[str, str] = ("", "")) -> str | None:
    """Return the text of a model whose code has one change, as a new process would import it."""
    assert change[0] in SOURCE + LAYERS
    inner, outer, user = (ModuleType(name) for name in ("layers.inner", "layers", "user"))
    vars(outer)["inner"] = inner
    modules = {"layers": outer, "user": user}
    with pytest.MonkeyPatch.context() as patch:
        for name, module in modules.items():
            patch.setitem(sys.modules, name, module)
        exec(LAYERS.replace(*change), vars(inner))
        # The name of the file of a program of `python -c`.
        exec(compile(SOURCE.replace(*change), "<string>", "exec"), vars(user))
    parts = spell(read_by(user.Model(), frozenset(), trusts_code=True))
    return None if parts is None else "\n".join(parts)


def test_the_text_of_equal_code_is_equal() -> None:
    text = text_of_model()
    assert text is not None
    assert text_of_model() == text
    assert text_of_model(("# A comment.", "# Another one.")) == text
    # How attributes were computed does not matter: they are inputs of the trace.
    assert text_of_model(("self.linear = nn", "self.linear = torch.nn")) == text


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(("SCALE = 2.0", "SCALE = 2.5"), id="global"),
        pytest.param(("SCALE = 2.0", "SCALE = 2"), id="type-of-a-global"),
        pytest.param(("by=1.0", "by=1.5"), id="default"),
        pytest.param(("relu", "tanh"), id="function-of-torch"),
        pytest.param(("F.gelu", "F.silu"), id="attribute-of-a-module-of-torch"),
        pytest.param(("factor = 3.0", "factor = 3.5"), id="attribute-of-a-base"),
        pytest.param(("return 0.5", "return 0.25"), id="property"),
        pytest.param(('"two"', '"four"'), id="constant-in-a-static-method"),
        pytest.param(("self.half * x)][0]", "self.half * x)][1]"), id="forward"),
        pytest.param(("LIMIT = 4.0", "LIMIT = 5.0"), id="global-of-another-module"),
        pytest.param(("max=LIMIT", "min=LIMIT"), id="function-of-another-module"),
        pytest.param(("rates=[0.1]", "rates=[0.2]"), id="attribute-of-a-dataclass"),
        pytest.param(("self.width * 2", "self.width * 3"), id="method-of-a-dataclass"),
        pytest.param(("weight: float = 0.5", "weight: float = 0.7"), id="default-of-a-dataclass"),
        pytest.param(("return 3", "return 4"), id="special-method-of-a-dataclass"),
        pytest.param(("nn.Linear(2, 2)", "nn.Linear(2, 4)"), id="attribute-of-the-model"),
        pytest.param(("class Model(Base)", "class Model(nn.Identity, Base)"), id="bases"),
    ],
)
def test_every_change_of_the_code_of_a_user_changes_the_text(change: tuple[str, str]) -> None:
    found = text_of_model(change)
    assert found is not None
    assert found != text_of_model()


def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        return function(*args)

    # As `functools.wraps` does.
    call.__module__, call.__qualname__ = function.__module__, function.__qualname__
    return call


class Half(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient / 2


class Halved(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        halved: Tensor = Half.apply(x)  # type: ignore[no-untyped-call]
        return halved


def test_functions_with_other_code_closure_or_arguments_have_other_texts() -> None:
    def power(exponent: float) -> Callable[[float], float]:
        return lambda base: base**exponent

    values: list[Any] = [
        power(2.0),
        power(3.0),
        partial(pow, 2),
        partial(pow, 3),
        math.sqrt,
        math.exp,
        torch.relu,
        torch.nn.functional.relu,
        wrapped(torch.nn.functional.relu),
        wrapped(torch.nn.functional.gelu),
        Halved,
        nn.Identity,
    ]
    texts = [spell([value]) for value in values]
    assert None not in texts
    assert len({"\n".join(text or ()) for text in texts}) == len(values)
    assert spell([power(2.0)]) == texts[0]


STATE = torch.ones(2)
FACTOR = 1.0


def changing() -> None:
    global STATE
    STATE = torch.zeros(2)


def importing() -> Any:
    import json

    return json


@pytest.mark.parametrize(
    "function",
    [
        lambda: STATE,
        lambda: open("facts"),  # noqa: SIM115
        lambda: eval("1"),
        lambda: os.environ["SCALE"],
        lambda: getattr(subprocess, "run"),  # noqa: B009
        lambda: torch.ops.mine.scale(STATE),
        lambda it: it.__globals__["STATE"],
        changing,
        importing,
        [].append,
    ],
)
def test_code_that_reads_what_has_no_text_is_unknown(function: Callable[..., Any]) -> None:
    assert spell([function]) is None


def test_a_changed_global_is_described(monkeypatch: pytest.MonkeyPatch) -> None:

    def step(x: Tensor) -> Tensor:
        return x * FACTOR

    describe = with_code(lambda: ([step], {"epochs": 2}))
    assert describe is not None
    before = describe()
    assert describe() == before
    monkeypatch.setitem(globals(), "FACTOR", 1.01)
    assert describe() != before
    assert with_code(None) is None


def test_functions_of_torch_that_the_user_replaces_are_described(monkeypatch: pytest.MonkeyPatch) -> None:
    layers: list[Any] = [nn.ReLU, lambda it: (torch.nn.functional.gelu(it), FACTOR)]
    texts = [spell([it]) for it in layers]
    for factor in (2.0, 3.0):

        def replaced(*args: Any, factor: float = factor) -> float:
            return factor

        monkeypatch.setattr(nn.ReLU, "forward", replaced)
        monkeypatch.setattr(torch.nn.functional, "gelu", replaced)
        texts += [spell([it]) for it in layers]
    assert None not in texts
    assert len({"\n".join(it or ()) for it in texts}) == 6
    assert any("float 1.0" in it for it in texts[1] or ())


class Sizes(NamedTuple):
    width: int
    depth: int = 2

    def product(self) -> int:
        return self.width * self.depth


class OtherSizes(NamedTuple):
    width: int
    depth: int = 2

    def product(self) -> int:
        return self.width + self.depth


class Swapped(NamedTuple):
    depth: int
    width: int = 2

    def product(self) -> int:
        return self.width * self.depth


class Doubled(list[int]):
    pass


def test_named_tuples_with_other_fields_or_methods_have_other_texts() -> None:
    texts = []
    for kind in (Sizes, OtherSizes, Swapped):
        parts = spell([kind(3, 2)])
        assert parts is not None
        texts.append("\n".join(parts).replace(kind.__name__, "Sizes"))
    assert len(set(texts)) == 3
    assert spell([Sizes(3, 2)]) == spell([Sizes(3)])
    # A subclass may have any attributes.
    assert spell([Doubled([1])]) is None


def test_functions_that_are_nested_too_deeply_have_no_text() -> None:
    functions: list[Any] = [lambda: 0]
    for _ in range(sys.getrecursionlimit()):
        functions.append(lambda inner=functions[-1]: inner())
    assert spell(functions[-1:]) is None


@pytest.mark.torture
@pytest.mark.slow
def test_the_text_is_the_same_in_every_process() -> None:
    folder = os.path.dirname(__file__)
    command = f"import sys; sys.path.append({folder!r}); import test_spelling as it; print(it.text_of_model())"
    found = [
        subprocess.run(
            [sys.executable, "-c", command],
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert found[0] == found[1] == f"{text_of_model()}\n"
