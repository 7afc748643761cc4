"""Compiled code that trainers share: equal steps have one graph, and different ones never do."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from compiling import needs_compiler
from problem import Problem, assert_same_weights
from torch import Tensor, nn
from torch.nn.functional import relu
from torch.optim import RMSprop

from dovetail.errors import ConfigError
from dovetail.trainers import CompiledTrainer, Trainer
from dovetail.trainers.whole_step import stored
from dovetail.trainers.whole_step.draws import build_draw, describe_draws
from dovetail.trainers.whole_step.sharing import _SHARED, Code, find_shared, share
from dovetail.trainers.whole_step.stored import load_code, store_code
from dovetail.units import Epochs


class Model(nn.Module):
    """A module of a user, with a number, a function and weights that may be shared."""

    def __init__(
        self, scale: float = 1.0, activation: Callable[[Tensor], Tensor] = relu, *, ties: bool = False
    ) -> None:
        super().__init__()
        self._scale, self.activation = scale, activation
        self.first, self.second, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.dropout = nn.Dropout(0.0)
        if ties:
            self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.last(self.dropout(self.activation(self.second(self.first(x) * self._scale))))
        return logits


def with_dropout() -> nn.Module:
    model = Model()
    model.dropout.p = 0.5
    return model


def train(problem: Problem, wrap: Callable[[Any], Any], changed: dict[str, Any]) -> Any:
    settings = {"model": Model, "criterion": nn.CrossEntropyLoss(), "eps": 1e-8, "gradient_clip": 0.5, **changed}
    torch.manual_seed(1)
    model, criterion, eps = settings.pop("model")(), settings.pop("criterion"), settings.pop("eps")
    rates = {"lr": settings.pop("lr", 0.01), "momentum": settings.pop("momentum", 0.0)}
    optimizer = RMSprop(model.parameters(), eps=eps, **rates)
    trainer = wrap(Trainer(model, "cpu", optimizer=optimizer, criterion=criterion, verbose=False, **settings))
    torch.manual_seed(2)
    trainer.fit(problem.batches[:4], max_length=Epochs(1))
    return trainer.model.state_dict()


def compiled(trainer: Any) -> Any:
    return CompiledTrainer(trainer, backend="eager")


def test_a_trainer_with_an_equal_step_shares_the_graph_of_another(problem: Problem) -> None:
    _SHARED.clear()
    for rate in (0.01, 0.02):
        changed = {"lr": rate}
        found = train(problem, compiled, changed)
        torch.testing.assert_close(found, train(problem, lambda it: it, changed), rtol=0, atol=2e-6)
    assert len(_SHARED) == 1


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param({"model": lambda: Model(scale=0.5)}, id="attribute"),
        pytest.param({"model": lambda: Model(activation=torch.tanh)}, id="function"),
        pytest.param({"model": lambda: Model(ties=True)}, id="tied-weights"),
        pytest.param({"model": with_dropout}, id="dropout"),
        pytest.param({"criterion": nn.CrossEntropyLoss(label_smoothing=0.1)}, id="criterion"),
        pytest.param({"gradient_clip": 0.1}, id="clipping"),
        pytest.param({"eps": 1e-2}, id="constant-of-the-update"),
        pytest.param({"momentum": 0.9}, id="term-of-the-update"),
        pytest.param({"accumulation_steps": 2}, id="accumulation"),
    ],
)
def test_a_trainer_with_another_step_gets_its_own_graph(problem: Problem, changed: dict[str, Any]) -> None:
    _SHARED.clear()
    train(problem, compiled, {})
    found = train(problem, compiled, changed)
    assert len(_SHARED) == (3 if "accumulation_steps" in changed else 2)
    torch.testing.assert_close(found, train(problem, lambda it: it, changed), rtol=0, atol=2e-6)


def test_a_model_with_a_function_that_has_a_closure_shares_no_graph(problem: Problem) -> None:
    factor = 2.0
    _SHARED.clear()
    train(problem, compiled, {"model": lambda: Model(activation=lambda it: it * factor)})
    assert not _SHARED


class CreatesTensors(nn.Module):
    """A module that creates tensors of some numbers in every call."""

    def __init__(self, numbers: list[float]) -> None:
        super().__init__()
        self.linear, self.numbers = nn.Linear(6, 3), numbers

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.linear(x) * torch.tensor(0.5)
        return logits + torch.tensor(self.numbers).sum()


@pytest.mark.parametrize(("numbers", "num_shared"), [([0.25], 1), ([0.1] * 8, 1), ([0.1] * 9, 0)])
def test_a_model_that_creates_small_tensors_shares_its_graph(
    problem: Problem, numbers: list[float], num_shared: int
) -> None:
    _SHARED.clear()
    changed = {"model": lambda: CreatesTensors(numbers)}
    for _ in range(2):
        found = train(problem, compiled, changed)
    torch.testing.assert_close(found, train(problem, lambda it: it, changed), rtol=0, atol=2e-6)
    assert len(_SHARED) == num_shared
    train(problem, compiled, {"model": lambda: CreatesTensors([*numbers[1:], 0.75])})
    assert len(_SHARED) == 2 * num_shared


def test_only_the_graphs_that_were_used_last_are_kept() -> None:
    _SHARED.clear()
    for number in range(40):
        share(["step", number], Code(print, ()))
        assert find_shared(["step", 0]) is not None
    assert len(_SHARED) == 32
    assert find_shared(["step", 39]) is not None
    assert find_shared(["step", 1]) is None
    assert find_shared(["step", 39.0]) is None


# ------------------------------------------------------------------ on disk


class TwoDropouts(nn.Module):
    """A module of a user that draws random numbers twice, of two kinds, and creates small tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(6, 3), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.linear(self.dropout(x))
        return logits * torch.tensor([0.5, 1.0, 2.0]) + torch.tensor(0.1) * torch.randn_like(logits)


def train_dropouts(problem: Problem, *, is_compiled: bool = True) -> Any:
    torch.manual_seed(1)
    trainer: Any = Trainer(
        TwoDropouts(),
        "cpu",
        optimizer=partial(RMSprop, lr=0.01),
        criterion=nn.CrossEntropyLoss(),
        verbose=False,
    )
    trainer = CompiledTrainer(trainer) if is_compiled else trainer
    trainer.fit(problem.batches, max_length=Epochs(1))
    return trainer


@needs_compiler
@pytest.mark.slow
def test_stored_code_replaces_trace_and_compiler_in_a_safe_folder(
    problem: Problem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor import cpp_builder

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    _SHARED.clear()
    first = train_dropouts(problem)
    # From here on only what is on disk can be used.
    monkeypatch.setenv("PATH", str(tmp_path))
    cpp_builder.cpp_compiler_search.cache_clear()
    _SHARED.clear()
    second = train_dropouts(problem)
    generator = torch.get_rng_state()
    assert second.graphs == 1
    assert_same_weights(first.model, second.model)
    eager = train_dropouts(problem, is_compiled=False)
    torch.testing.assert_close(second.model.state_dict(), eager.model.state_dict(), rtol=0, atol=2e-6)
    assert torch.equal(generator, torch.get_rng_state())

    _SHARED.clear()
    (tmp_path / "dovetail").chmod(0o777)
    with pytest.warns(UserWarning, match="there is no C"):
        train_dropouts(problem)


def test_damaged_stored_code_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    library = tmp_path / "library.so"
    library.write_bytes(b"not a library")
    store_code(["step"], Code(print, (True,), names=("loss",), library=library))
    stored = sorted(path.suffix for path in (tmp_path / "dovetail").iterdir())
    assert stored == [".json", ".so"]
    assert load_code(["step"]) is None
    assert load_code(["another"]) is None
    (facts,) = (tmp_path / "dovetail").glob("*.json")
    facts.write_text("[", encoding="utf-8")
    assert load_code(["step"]) is None


def test_stored_code_that_was_not_used_for_longest_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("DOVETAIL_COMPILE_CACHE_GB", "25e-7")
    library = tmp_path / "library.so"
    library.write_bytes(bytes(1000))
    stored: list[set[Path]] = []
    for number in range(4):
        store_code(["step", number], Code(print, (True,), names=("loss",), library=library))
        stored.append(set((tmp_path / "dovetail").iterdir()))
        # The second one is used less recently than the first one.
        for path in stored[number] - stored[number - 1] if number else stored[0]:
            os.utime(path, (0, 10 - number))
    assert [len(files) for files in stored] == [2, 4, 4, 4]
    assert stored[0] < stored[1]
    assert stored[1] & stored[2] == stored[0]
    assert stored[2] & stored[3] == stored[0]

    monkeypatch.setenv("DOVETAIL_COMPILE_CACHE_GB", "much")
    with pytest.raises(ConfigError, match=r"DOVETAIL_COMPILE_CACHE_GB: expected a number of gigabytes.*got 'much'"):
        store_code(["step", 4], Code(print, (True,), names=("loss",), library=library))


def test_a_changed_setting_of_the_compiler_gets_its_own_code(problem: Problem) -> None:
    from torch._inductor import config

    _SHARED.clear()
    train(problem, compiled, {})
    with config.patch({"cpp.simdlen": 256}):
        train(problem, compiled, {})
    assert len(_SHARED) == 2
    # Threads of the compiler do not change its code. A setting that was reset is not a change.
    with config.patch(compile_threads=7):
        train(problem, compiled, {})
    assert len(_SHARED) == 2
    with config.patch(post_grad_custom_pre_pass=lambda graph: None):
        train(problem, compiled, {})
    assert len(_SHARED) == 2


def test_an_autocast_around_a_run_gets_its_own_code(problem: Problem) -> None:
    _SHARED.clear()
    for number, dtype in enumerate((torch.float32, torch.bfloat16, torch.float16)):
        with torch.autocast("cpu", dtype, enabled=dtype is not torch.float32), warnings.catch_warnings():
            # Roundings in a low precision may end the use of the graph.
            warnings.simplefilter("ignore")
            train(problem, compiled, {})
        assert len(_SHARED) == number + 1


@pytest.mark.parametrize(
    ("key", "draws"),
    [
        pytest.param([object()], (), id="object"),
        pytest.param([lambda: eval("1")], (), id="code"),
        pytest.param(None, (), id="unknown"),
        pytest.param(["step"], (partial(torch.ops.aten.rand.generator, [2], generator=torch.Generator()),), id="draw"),
    ],
)
def test_a_step_with_unknown_inputs_is_not_stored(
    key: Any, draws: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    library = tmp_path / "library.so"
    library.write_bytes(b"")
    store_code(key, Code(print, (True,), draws, library=library))
    assert not (tmp_path / "dovetail").exists()


@pytest.mark.parametrize(
    "draw",
    [
        partial(torch.ops.aten.bernoulli_.float, torch.empty_strided((3, 4), (1, 3)), 0.3),
        partial(torch.ops.aten.bernoulli_.float, torch.empty(5, dtype=torch.bool), 0.5),
        partial(torch.ops.aten.rand.default, [2, 3], dtype=torch.float64, device=torch.device("cpu"), pin_memory=False),
        partial(torch.ops.aten.randn_like.default, torch.empty(2, 3), memory_format=torch.preserve_format),
        partial(torch.ops.aten.normal_.default, torch.empty(4), 1.5, float("inf")),
        partial(torch.ops.aten.randint.low, 3, 9, [6], layout=torch.strided),
    ],
    ids=lambda draw: str(draw.func),
)
def test_a_stored_draw_has_the_bits_and_the_layout_of_the_first_one(draw: Any) -> None:
    (described,) = json.loads(json.dumps(describe_draws([draw])))
    torch.manual_seed(0)
    expected = draw()
    torch.manual_seed(0)
    found = build_draw(described)()
    assert (found.dtype, found.stride()) == (expected.dtype, expected.stride())
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "described",
    [
        ["add", "Tensor", [1, 2], []],
        ["rand", "default", [[2]], [["dtype", {"torch": "load"}]]],
        ["no_operation", "default", [], []],
        ["rand"],
    ],
)
def test_a_damaged_description_of_a_draw_is_ignored(
    described: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(stored, "library_call", lambda path: print)
    library = tmp_path / "library.so"
    library.write_bytes(b"")
    store_code(["step"], Code(print, (True,), library=library))
    assert load_code(["step"]) is not None
    (facts,) = (tmp_path / "dovetail").glob("*.json")
    facts.write_text(json.dumps({**json.loads(facts.read_text()), "draws": [described]}), encoding="utf-8")
    assert load_code(["step"]) is None
