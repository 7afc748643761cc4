"""Compiled code that trainers share: equal steps have one graph, and different ones never do."""

from __future__ import annotations

import os
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


def make_plain(problem: Problem) -> Any:
    torch.manual_seed(1)
    optimizer = partial(RMSprop, lr=0.01)
    return CompiledTrainer(
        Trainer(nn.Linear(6, 3), "cpu", optimizer=optimizer, criterion=nn.CrossEntropyLoss(), verbose=False)
    )


@needs_compiler
@pytest.mark.slow
def test_stored_code_replaces_trace_and_compiler_in_a_safe_folder(
    problem: Problem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor import cpp_builder

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    _SHARED.clear()
    first, second, third = (make_plain(problem) for _ in range(3))
    first.fit(problem.batches, max_length=Epochs(1))
    # From here on only what is on disk can be used.
    monkeypatch.setenv("PATH", str(tmp_path))
    cpp_builder.cpp_compiler_search.cache_clear()
    _SHARED.clear()
    second.fit(problem.batches, max_length=Epochs(1))
    assert second.graphs == 1
    assert_same_weights(first.model, second.model)

    _SHARED.clear()
    (tmp_path / "dovetail").chmod(0o777)
    with pytest.warns(UserWarning, match="there is no C"):
        third.fit(problem.batches, max_length=Epochs(1))


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


@pytest.mark.parametrize("key", [[Model], [relu, lambda it: it], [object()], None])
def test_a_step_with_code_of_the_user_is_not_stored(key: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    library = tmp_path / "library.so"
    library.write_bytes(b"")
    store_code(key, Code(print, (True,), library=library))
    assert not (tmp_path / "dovetail").exists()
