"""Compiled trainer: hooks, schedules and checkpoints as in eager training, and the fallback to it."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compiling import needs_compiler
from problem import Problem, assert_same_weights
from torch.nn.functional import cross_entropy
from torch.optim import LBFGS, Adafactor, Adam
from torch.optim.lr_scheduler import OneCycleLR, StepLR

from dovetail.callbacks import Callback
from dovetail.errors import ConfigError
from dovetail.trainers import CompiledTrainer, DDPTrainer, FSDPTrainer, Trainer
from dovetail.trainers.capabilities.compiled import Compiled
from dovetail.trainers.capabilities.mixed_precision import MixedPrecision
from dovetail.trainers.composable import ComposableTrainer
from dovetail.trainers.decorators import TrainerDecorator
from dovetail.units import Batches, Epochs, Progress, Records, Updates

pytestmark = pytest.mark.usefixtures("compiler_cache")
torture = pytest.mark.torture

Inductor: Any = Trainer.add_on(Compiled)
# Calls the operations of its graph one by one, which needs no compiler: everything else is the same.
Traced: Any = partial(Inductor, backend="eager")
COMPILED = [needs_compiler, pytest.mark.slow]


class Note(Callback):
    """Everything that a watcher can know of a run, in its order."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def on_epoch_start(self, context: Any) -> None:
        self.heard.append(("epoch", context.progress.epoch))

    def on_update(self, context: Any) -> None:
        self.heard.append(("update", context.progress.updates, context.optimizers[0].param_groups[0]["lr"]))

    def on_step_end(self, context: Any, output: Mapping[str, Any]) -> None:
        self.heard.append(("step", context.progress.batches, sorted(output)))

    def on_validation_end(self, context: Any, metrics: Mapping[str, float]) -> None:
        self.heard.append(("validation", sorted(metrics)))


# One graph for all tests: dropout, clipping, Adam, a schedule.
def make(problem: Problem, kind: Any = Traced, **settings: Any) -> Any:
    torch.manual_seed(1)
    model = problem.model(dropout=0.3)
    optimizer = settings.pop("optimizer", None) or Adam(model.parameters(), lr=0.01)
    if callable(optimizer):
        optimizer = optimizer(model)
    settings = {"gradient_clip": 1.0, "verbose": False, **settings}
    return kind(model, "cpu", optimizer=optimizer, **settings)


def schedule(optimizer: Any) -> OneCycleLR:
    return OneCycleLR(optimizer, max_lr=0.05, total_steps=40)


def halving(optimizer: Any) -> StepLR:
    return StepLR(optimizer, step_size=1, gamma=0.5)


@pytest.mark.parametrize(
    "kind", [Traced, pytest.param(Inductor, marks=[*COMPILED, torture])], ids=["traced", "compiled"]
)
def test_a_compiled_run_equals_the_eager_run_in_every_hook(problem: Problem, kind: Any) -> None:
    def train(kind: Any) -> tuple[Any, list[Any]]:
        note = Note()
        trainer = make(problem, kind, scheduler=schedule, callbacks=[note])
        trainer.fit(problem.batches, problem.batches[:2], max_length=Epochs(3))
        return trainer, note.heard

    compiled, heard = train(kind)
    eager, expected = train(Trainer)
    assert compiled.graphs == 1
    assert heard == expected
    assert compiled.context.progress == eager.context.progress
    torch.testing.assert_close(list(compiled.history.losses), list(eager.history.losses), rtol=0, atol=5e-6)
    torch.testing.assert_close(compiled.model.state_dict(), eager.model.state_dict(), rtol=0, atol=5e-6)


def test_compiled_decorator_and_add_on_give_equal_bits(problem: Problem) -> None:
    add_on, decorated = make(problem), CompiledTrainer(make(problem, Trainer), backend="eager")
    for trainer in (add_on, decorated):
        torch.manual_seed(2)
        trainer.fit(problem.batches, max_length=Epochs(2))

    assert decorated.graphs == 1
    assert_same_weights(add_on.model, decorated.model)


@pytest.mark.parametrize(
    "kind", [Traced, pytest.param(Inductor, marks=[*COMPILED, torture])], ids=["traced", "compiled"]
)
def test_a_resumed_compiled_run_equals_an_uninterrupted_one(problem: Problem, tmp_path: Path, kind: Any) -> None:
    # The last batch of an epoch is shorter and stays eager.
    batches = [*problem.batches[:5], (problem.x[:3], problem.y[:3])]
    whole, first, second = (make(problem, kind, scheduler=schedule) for _ in range(3))
    torch.manual_seed(2)
    whole.fit(batches, max_length=Epochs(3))

    torch.manual_seed(2)
    first.fit(batches, max_length=Batches(8))
    first.save_checkpoint(tmp_path / "middle")
    torch.manual_seed(99)
    second.fit(batches, max_length=Epochs(3), resume=tmp_path / "middle")

    assert second.graphs == 1
    assert_same_weights(second.model, whole.model)
    assert list(second.history.losses) == list(whole.history.losses)


def adafactor(model: Any) -> Adafactor:
    return Adafactor(model.parameters(), lr=0.1)


@pytest.mark.parametrize("optimizer", [None, adafactor], ids=["adam", "adafactor"])
@pytest.mark.parametrize("kinds", [(Traced, Trainer), (Trainer, Traced)])
def test_a_checkpoint_resumes_compiled_or_eagerly(problem: Problem, tmp_path: Path, kinds: Any, optimizer: Any) -> None:
    whole, first, second = (make(problem, kind, optimizer=optimizer) for kind in (Trainer, *kinds))
    for trainer in (whole, first):
        torch.manual_seed(2)
        trainer.fit(problem.batches, max_length=Epochs(2) if trainer is whole else Batches(7))
    first.save_checkpoint(tmp_path / "middle")
    second.fit(problem.batches, max_length=Epochs(2), resume=tmp_path / "middle")

    assert [getattr(it, "graphs", 0) for it in (first, second)] == [int(kind is Traced) for kind in kinds]
    torch.testing.assert_close(second.model.state_dict(), whole.model.state_dict(), rtol=0, atol=5e-6)


def test_strategies_see_the_current_batch_and_its_loss_in_a_compiled_run(problem: Problem) -> None:
    seen = []

    class Look(Callback):
        def on_step_end(self, context: Any, output: Mapping[str, Any]) -> None:
            seen.append((context.state["current_batch"], context.state["last_loss"].item() == output["loss"].item()))

    torch.manual_seed(1)
    model = problem.model(dropout=0.3)
    trainer = ComposableTrainer.add_on(Compiled)(
        model,
        device="cpu",
        optimizer_strategy=lambda parameters: Adam(parameters, lr=0.01),
        gradient_clip=1.0,
        callbacks=[Look()],
        backend="eager",
        verbose=False,
    )
    trainer.fit(problem.batches[:3], max_length=Epochs(1))

    assert trainer.graphs == 1
    assert seen == [(0, True), (1, True), (2, True)]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "kind", [Traced, pytest.param(Inductor, marks=[*COMPILED, torture])], ids=["traced", "compiled"]
)
def test_a_compiled_model_keeps_its_state_dict_keys(problem: Problem, kind: Any) -> None:
    # Torch warns of itself while it is imported.
    from torch._dynamo.utils import counters

    compiled, eager = make(problem, kind, mode="model"), make(problem, Trainer)
    before = list(compiled.model.state_dict())
    graphs = counters["stats"]["unique_graphs"]
    for trainer in (compiled, eager):
        torch.manual_seed(2)
        trainer.model[2].p = 0.0
        trainer.fit(problem.batches[:3], max_length=Epochs(1))

    assert counters["stats"]["unique_graphs"] > graphs
    assert list(compiled.model.state_dict()) == before
    torch.testing.assert_close(compiled.model.state_dict(), eager.model.state_dict(), rtol=0, atol=5e-6)


# ------------------------------------------------------------------ several steps in one call


class Weights(Callback):
    """The first weight at every report, and when to stop."""

    def __init__(self, stop_at: int | None = None, fail_at: int | None = None) -> None:
        self.seen: list[float] = []
        self.stop_at, self.fail_at = stop_at, fail_at

    def on_report(self, context: Any, report: Any) -> None:
        self.seen.append(context.model[0].weight[0, 0].item())
        if context.progress.batches == self.stop_at:
            context.stop("enough")
        if context.progress.batches == self.fail_at:
            raise RuntimeError("here")


def as_bytes(state: Any) -> Any:
    if isinstance(state, (torch.Tensor, np.ndarray)):
        return state.dtype, state.shape, np.asarray(state).tobytes()
    if isinstance(state, Mapping):
        return {name: as_bytes(value) for name, value in state.items()}
    return [as_bytes(value) for value in state] if isinstance(state, (list, tuple)) else state


def assert_same_run(one: Any, other: Any) -> None:
    """Weights, optimizer, schedulers, counters, history, randomness, place in the data: all but the run's own name."""
    found, expected = (as_bytes({**trainer.state_dict(), "run_id": ""}) for trainer in (one, other))
    assert found.keys() == expected.keys()
    assert [name for name in found if found[name] != expected[name]] == []


@pytest.mark.parametrize(
    ("kind", "steps_per_call", "lengths"),
    [
        (Traced, 2, {"max_length": Epochs(3)}),
        (Traced, 3, {"max_length": Batches(25), "validation_period": Batches(9)}),
        (Traced, 3, {"max_length": Updates(20), "validation_period": Records(72)}),
        pytest.param(Inductor, 2, {"max_length": Epochs(3)}, marks=[*COMPILED, torture]),
        pytest.param(Inductor, 8, {"max_length": Epochs(3)}, marks=[*COMPILED, torture]),
    ],
)
def test_several_steps_per_call_equal_single_steps_bit_for_bit(
    problem: Problem, kind: Any, steps_per_call: int, lengths: dict[str, Any]
) -> None:
    trainers = [make(problem, kind, steps_per_call=number, scheduler=halving) for number in (1, steps_per_call)]
    for trainer in trainers:
        torch.manual_seed(2)
        # Eleven batches: no call ends with an epoch.
        trainer.fit(problem.batches[:11], problem.batches[:2], **lengths)
    assert_same_run(*trainers)


def test_one_compiled_call_makes_several_updates(problem: Problem) -> None:
    weights = Weights()
    trainer = make(problem, steps_per_call=3, print_every=1, callbacks=[weights])
    trainer.fit(problem.batches[:11], max_length=Epochs(2))
    # At the start of an epoch single steps are compared with eager ones; what is left at its end is no call.
    calls = [1, 3, 3, 3, 1, 1, 1, 1, 3, 3, 1, 1]
    assert [len(list(same)) for _, same in groupby(weights.seen)] == calls


@pytest.mark.parametrize(("steps_per_call", "done"), [(1, 5), (3, 14), (2, 11), (2, 15)])
def test_a_run_with_several_steps_per_call_resumes_at_any_step_and_call_size(
    problem: Problem, tmp_path: Path, steps_per_call: int, done: int
) -> None:
    whole, first, second = (make(problem, steps_per_call=number) for number in (3, 3, steps_per_call))
    torch.manual_seed(2)
    whole.fit(problem.batches[:11], max_length=Epochs(3))
    torch.manual_seed(2)
    first.fit(problem.batches[:11], max_length=Batches(done))
    first.save_checkpoint(tmp_path / "middle")
    torch.manual_seed(99)
    second.fit(problem.batches[:11], max_length=Epochs(3), resume=tmp_path / "middle")

    assert_same_weights(second.model, whole.model)
    assert list(second.history.losses) == list(whole.history.losses)


def test_a_batch_of_another_shape_splits_a_compiled_call(problem: Problem) -> None:
    batches = [*problem.batches[:5], (problem.x[:3], problem.y[:3]), *problem.batches[5:9]]
    trainers = [make(problem, steps_per_call=number) for number in (1, 3)]
    for trainer in trainers:
        torch.manual_seed(2)
        trainer.fit(batches, max_length=Epochs(2))
    # How often a form has come is counted in the same way, too.
    assert_same_run(*trainers)


def test_a_stop_takes_effect_at_the_end_of_a_compiled_call(problem: Problem) -> None:
    stopped = make(problem, steps_per_call=3, print_every=1, callbacks=[Weights(stop_at=5)])
    planned = make(problem)
    for trainer, length in ((stopped, Epochs(1)), (planned, Batches(7))):
        torch.manual_seed(2)
        trainer.fit(problem.batches[:11], max_length=length)

    assert stopped.context.progress == planned.context.progress
    assert_same_weights(stopped.model, planned.model)


def test_updates_of_a_call_that_raises_are_counted(problem: Problem) -> None:
    trainer = make(problem, steps_per_call=3, print_every=1, callbacks=[Weights(fail_at=5)])
    with pytest.raises(RuntimeError, match="here"):
        trainer.fit(problem.batches[:11], max_length=Epochs(1))

    assert trainer.context.progress == Progress(batch=7, batches=7, records=56, updates=7)
    assert [state["step"].item() for state in trainer.optimizer.state.values()] == [7] * 4
    # The next run starts after them, and can be stopped.
    trainer.fit(problem.batches[:11], max_length=Batches(9))
    assert trainer.context.progress.batches == 9


class OwnAfterStep(Trainer):
    def after_step(self, output: Mapping[str, Any]) -> None:
        super().after_step(output)


@pytest.mark.parametrize(
    ("cause", "kind", "settings"),
    [
        ("a schedule moves at every update", Trainer, {"scheduler": schedule}),
        ("Note has a hook for every step", Trainer, {"callbacks": [Note()]}),
        ("OwnAfterStep has its own after_step", OwnAfterStep, {}),
    ],
)
def test_hooks_per_step_require_one_call_per_step(
    problem: Problem, cause: str, kind: Any, settings: dict[str, Any]
) -> None:
    traced = partial(kind.add_on(Compiled), backend="eager")
    several, single = (make(problem, traced, steps_per_call=number, **settings) for number in (3, 1))
    torch.manual_seed(2)
    with pytest.warns(UserWarning, match=f"steps_per_call: each call makes only one step: {cause}"):
        several.fit(problem.batches[:5], max_length=Epochs(1))
    torch.manual_seed(2)
    single.fit(problem.batches[:5], max_length=Epochs(1))
    assert several.graphs == 1
    assert_same_weights(several.model, single.model)


@needs_compiler
@pytest.mark.slow
def test_each_step_is_one_call_if_only_single_steps_can_be_compiled(problem: Problem) -> None:
    from torch._inductor import config

    several, single = make(problem, Inductor, steps_per_call=5), make(problem, Inductor)
    torch.manual_seed(2)
    several.fit(problem.batches[:11], max_length=Batches(2))
    with (
        config.patch({"cpp.cxx": ("/nowhere/g++",)}),
        pytest.warns(UserWarning, match="each call makes only one step: there is no C"),
    ):
        several.fit(problem.batches[:11], max_length=Epochs(2))
    torch.manual_seed(2)
    single.fit(problem.batches[:11], max_length=Epochs(2))
    assert several.graphs == 1
    assert_same_weights(several.model, single.model)


def test_each_step_is_one_call_without_a_graph(problem: Problem) -> None:
    weights = Weights()
    settings: dict[str, Any] = {"steps_per_call": 3, "print_every": 1, "callbacks": [weights]}
    compiled = make(problem, OwnBackward.add_on(Compiled), **settings)
    eager = make(problem, Trainer)
    torch.manual_seed(2)
    with pytest.warns(UserWarning, match="without a graph: OwnBackward has its own backward"):
        compiled.fit(problem.batches[:6], max_length=Epochs(2))
    torch.manual_seed(2)
    eager.fit(problem.batches[:6], max_length=Epochs(2))
    assert [len(list(same)) for _, same in groupby(weights.seen)] == [1] * 12
    assert_same_weights(compiled.model, eager.model)


@pytest.mark.parametrize("number", [0, True, 1.5, "8"])
def test_steps_per_call_must_be_an_integer(problem: Problem, number: Any) -> None:
    with pytest.raises(ConfigError, match="steps_per_call: expected a whole number that is at least 1"):
        make(problem, steps_per_call=number)


def test_a_compiled_module_rejects_steps_per_call(problem: Problem) -> None:
    with pytest.raises(ConfigError, match="steps_per_call: mode='model' has no graph of a step"):
        make(problem, mode="model", steps_per_call=2)


# ------------------------------------------------------------------ gradients outside of the graph


class SeesGradients(Callback):
    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_gradients(self, context: Any, optimizer: Any) -> None:
        gradients = [it.grad.flatten() for group in optimizer.param_groups for it in group["params"]]
        self.norms.append(torch.cat(gradients).norm().item())


class CountsItems(Trainer):
    """Every target that is not zero is an item, so that equal batches have different weights."""

    def train_step(self, batch: Any) -> Mapping[str, Any]:
        losses = cross_entropy(self.context.model(batch[0]), batch[1], reduction="none")
        is_item = batch[1] > 0
        return {"loss": (losses * is_item).sum() / is_item.sum(), "num_items": is_item.sum()}


class OwnClipping(Trainer):
    def clip_gradients(self, optimizer: Any) -> None:
        for group in optimizer.param_groups:
            torch.nn.utils.clip_grad_value_(group["params"], 0.01)


def both(model: Any) -> list[Any]:
    return [torch.optim.NAdam([model[0].weight], lr=0.01), Adam([model[0].bias, *model[3].parameters()], lr=0.01)]


Half: Any = Trainer.add_on(MixedPrecision)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        pytest.param(Trainer, {"accumulation_steps": 2}, id="accumulation"),
        pytest.param(CountsItems, {"accumulation_steps": 3}, id="items"),
        pytest.param(Trainer, {"callbacks": 1}, id="hook"),
        pytest.param(OwnClipping, {}, id="clipping"),
        pytest.param(Half, {"precision": "bf16"}, id="bf16"),
        pytest.param(Half, {"precision": "bf16", "accumulation_steps": 2}, id="bf16-accumulation"),
        # The first scale overflows, so that some updates are skipped.
        pytest.param(Half, {"precision": "fp16", "init_scale": 2.0**24}, id="fp16"),
        pytest.param(Trainer, {"optimizer": both, "accumulation_steps": 2}, id="two-optimizers"),
        pytest.param(Trainer, {"optimizer": adafactor, "accumulation_steps": 2}, id="adafactor"),
    ],
)
def test_a_graph_with_gradients_outside_of_it_equals_eager_training(
    problem: Problem, kind: Any, settings: dict[str, Any]
) -> None:
    # The last batch of an epoch is shorter, closes a window that is not full, and has no graph.
    batches = [*problem.batches[:6], (problem.x[:3], problem.y[:3])]

    def train(kind: Any, **more: Any) -> tuple[Any, list[float]]:
        sees = SeesGradients()
        hooks = {"callbacks": [sees]} if "callbacks" in settings else {}
        trainer = make(problem, kind, **{**settings, **hooks}, **more)
        torch.manual_seed(2)
        trainer.fit(batches, max_length=Epochs(3))
        return trainer, sees.norms

    (compiled, norms), (eager, expected) = train(kind.add_on(Compiled), backend="eager"), train(kind)
    assert compiled.graphs == 1
    assert compiled.context.progress == eager.context.progress
    if settings.get("precision") == "fp16":
        assert 0 < eager.context.progress.updates < eager.context.progress.batches
    for found, due in (
        (list(compiled.history.losses), list(eager.history.losses)),
        (compiled.model.state_dict(), eager.model.state_dict()),
        (norms, expected),
    ):
        torch.testing.assert_close(found, due, rtol=0, atol=5e-6)


@pytest.mark.torture
@needs_compiler
@pytest.mark.slow
def test_two_compiled_graphs_of_an_update_equal_eager_training(problem: Problem) -> None:
    settings = {"accumulation_steps": 2, "gradient_clip": 0.1}
    compiled, eager = make(problem, Inductor, **settings), make(problem, Trainer, **settings)
    for trainer in (compiled, eager):
        torch.manual_seed(2)
        trainer.fit(problem.batches[:5], max_length=Epochs(2))
    assert compiled.graphs == 1
    torch.testing.assert_close(compiled.model.state_dict(), eager.model.state_dict(), rtol=0, atol=5e-6)


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=[*COMPILED, torture])])
def test_a_graph_in_bfloat16_is_at_most_twice_as_inexact_as_eager_training(problem: Problem, backend: str) -> None:
    def losses(kind: Any, dtype: torch.dtype = torch.float32, **settings: Any) -> torch.Tensor:
        torch.manual_seed(1)
        # Without dropout, whose masks depend on the type.
        model = problem.model(dtype=dtype)
        trainer = kind(model, "cpu", optimizer=torch.optim.SGD(model.parameters(), lr=0.05), verbose=False, **settings)
        trainer.fit([(x.to(dtype), y) for x, y in problem.batches], max_length=Epochs(2))
        assert kind is Trainer or kind is Half or trainer.graphs == 1
        return torch.tensor(list(trainer.history.losses), dtype=torch.float64)

    exact = losses(Trainer, torch.float64)
    eager = losses(Half, precision="bf16")
    graph = losses(Half.add_on(Compiled), precision="bf16", backend=backend)
    assert 0 < (graph - exact).norm() <= 2 * (eager - exact).norm()


class Scaled(Trainer):
    factor = 1.0

    def train_step(self, batch: Any) -> Mapping[str, Any]:
        return {"loss": self.factor * super().train_step(batch)["loss"]}


class Rescales(Callback):
    def on_epoch_start(self, context: Any) -> None:
        Scaled.factor = 1.0 if context.progress.epoch == 0 else 1.01


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=[*COMPILED, torture])])
def test_a_loss_that_changes_by_one_percent_is_detected_in_bfloat16(
    problem: Problem, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Scaled, "factor", 1.0)
    kind: Any = Scaled.add_on(MixedPrecision)
    compiled = make(problem, kind.add_on(Compiled), precision="bf16", backend=backend, callbacks=[Rescales()])
    eager = make(problem, kind, precision="bf16", callbacks=[Rescales()])
    torch.manual_seed(2)
    with pytest.warns(UserWarning, match="changes from call to call"):
        compiled.fit(problem.batches[:4], max_length=Epochs(2))
    torch.manual_seed(2)
    eager.fit(problem.batches[:4], max_length=Epochs(2))
    torch.testing.assert_close(
        compiled.model.state_dict(), eager.model.state_dict(), rtol=0, atol=5e-6 if backend == "eager" else 1e-2
    )


def test_a_window_in_which_only_some_batches_have_a_graph_equals_eager(problem: Problem) -> None:
    short = (problem.x[:3], problem.y[:3])
    batches = [problem.batches[0], short, problem.batches[1], problem.batches[2], short, problem.batches[3]]
    compiled = make(problem, accumulation_steps=3)
    eager = make(problem, Trainer, accumulation_steps=3)
    for trainer in (compiled, eager):
        torch.manual_seed(2)
        trainer.fit(batches, max_length=Epochs(2))
    torch.testing.assert_close(compiled.model.state_dict(), eager.model.state_dict(), rtol=0, atol=5e-6)


class HasGraph(Callback):
    """Raises in a process without a graph."""

    def on_train_end(self, context: Any) -> None:
        if context.run.trainer.graphs != 1:
            raise RuntimeError(f"{context.run.trainer.graphs} graphs")


@pytest.mark.slow
@pytest.mark.usefixtures("forking")
@pytest.mark.parametrize("accumulation_steps", [1, 2])
def test_two_processes_with_graphs_make_the_updates_of_one(problem: Problem, accumulation_steps: int) -> None:
    def train(batch_size: int, wrap: Callable[[Any], Any]) -> Any:
        trainer = Trainer(
            problem.model(dtype=torch.float64),
            "cpu",
            optimizer=partial(torch.optim.RMSprop, lr=0.01),
            batch_size=batch_size,
            accumulation_steps=accumulation_steps,
            gradient_clip=0.5,
            callbacks=[HasGraph()] if batch_size == 8 else [],
            drop_last=False,
            verbose=False,
            seed=1,
        )
        wrapped = wrap(trainer)
        wrapped.fit((problem.x.double(), problem.y), max_length=Epochs(2))
        return wrapped

    one = train(16, lambda trainer: trainer)
    two = train(8, lambda trainer: DDPTrainer(CompiledTrainer(trainer, backend="eager"), num_processes=2))
    torch.testing.assert_close(two.model.state_dict(), one.model.state_dict(), rtol=0, atol=1e-10)


class CountsGraphs(Callback):
    """Raises in a process in which Dynamo has compiled nothing."""

    def on_train_start(self, context: Any) -> None:
        from torch._dynamo.utils import counters

        counters.clear()

    def on_train_end(self, context: Any) -> None:
        from torch._dynamo.utils import counters

        if not counters["stats"]["unique_graphs"]:
            raise RuntimeError("no graph")


@pytest.mark.slow
@pytest.mark.usefixtures("forking")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_two_processes_with_a_compiled_sharded_model_make_the_updates_of_one(problem: Problem) -> None:
    def train(batch_size: int, wrap: Callable[[Any], Any]) -> Any:
        trainer = Trainer(
            problem.model(dtype=torch.float64),
            "cpu",
            optimizer=partial(Adam, lr=0.01),
            batch_size=batch_size,
            gradient_clip=0.5,
            callbacks=[CountsGraphs()] if batch_size == 8 else [],
            drop_last=False,
            verbose=False,
            seed=1,
        )
        wrapped = wrap(trainer)
        wrapped.fit((problem.x.double(), problem.y), max_length=Epochs(2))
        return wrapped

    def shard(trainer: Any) -> Any:
        return FSDPTrainer(CompiledTrainer(trainer, mode="model", backend="eager"), num_processes=2)

    one, two = train(16, lambda trainer: trainer), train(8, shard)
    torch.testing.assert_close(two.model.state_dict(), one.model.state_dict(), rtol=0, atol=1e-10)


def test_an_unknown_backend_is_rejected(problem: Problem) -> None:
    with pytest.raises(ConfigError, match="backend: expected 'inductor' or 'eager', got 'triton'"):
        make(problem, backend="triton")


# ------------------------------------------------------------------ eager, with one sentence


class OwnBackward(Trainer):
    def backward(self, loss: Any, **kwargs: Any) -> None:
        super().backward(loss, **kwargs)


class ByHand(Trainer):
    def train_step(self, batch: Any) -> Mapping[str, Any]:
        loss = self.criterion(self.context.model(batch[0]), batch[1])
        self.context.backward(loss)
        self.context.step()
        return {"loss": loss}


class ReadsValues(Trainer):
    def train_step(self, batch: Any) -> Mapping[str, Any]:
        loss = self.criterion(self.context.model(batch[0]), batch[1])
        return {"loss": loss if loss.item() > 0 else -loss}


class Doubled(TrainerDecorator):
    def train_step(self, batch: Any) -> Mapping[str, Any]:
        return {"loss": 2 * super().train_step(batch)["loss"]}


def add_on(kind: Any) -> Callable[..., Any]:
    return lambda *given, **settings: kind.add_on(Compiled)(*given, **settings)


@pytest.mark.parametrize(
    ("cause", "compiled", "eager", "settings"),
    [
        ("LBFGS evaluates the loss", add_on(Trainer), Trainer, {"optimizer": lambda model: LBFGS(model.parameters())}),
        ("OwnBackward has its own backward", add_on(OwnBackward), OwnBackward, {}),
        ("train_step optimises by itself", add_on(ByHand), ByHand, {}),
        ("by .item() or an if", add_on(ReadsValues), ReadsValues, {}),
        (
            "Doubled changes what train_step returns",
            lambda *given, **settings: Doubled(Inductor(*given, **settings)),
            lambda *given, **settings: Doubled(Trainer(*given, **settings)),
            {},
        ),
    ],
)
def test_a_run_that_cannot_be_compiled_runs_eagerly_and_warns_once(
    problem: Problem, cause: str, compiled: Any, eager: Any, settings: dict[str, Any]
) -> None:
    trainers = [make(problem, kind, **copy.copy(settings)) for kind in (compiled, eager)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for trainer in trainers:
            torch.manual_seed(2)
            trainer.fit(problem.batches[:4], max_length=Epochs(2))

    reported = [str(warning.message) for warning in caught if "without a graph" in str(warning.message)]
    assert len(reported) == 1
    assert cause in reported[0]
    assert_same_weights(*(trainer.model for trainer in trainers))


def test_a_hook_added_between_two_compiled_runs_is_called(problem: Problem) -> None:
    seen: list[int] = []
    trainer = make(problem)
    trainer.fit(problem.batches, max_length=Epochs(1))
    assert trainer.graphs == 1
    trainer.model[0].register_forward_hook(lambda module, inputs, output: seen.append(len(output)))
    with pytest.warns(UserWarning, match="without a graph: a Linear has the hook"):
        trainer.fit(problem.batches, max_length=Epochs(2))
    assert seen == [8] * 12


def test_an_unknown_mode_is_rejected(problem: Problem) -> None:
    with pytest.raises(ConfigError, match="mode: expected 'model' or 'step', got 'graph'"):
        make(problem, mode="graph")


def test_the_compile_modes_of_a_trainer_are_passed_to_torch(problem: Problem) -> None:
    assert make(problem, mode="test")._mode == "test"


def test_a_dry_run_reads_gradients_without_a_warning(problem: Problem) -> None:
    plain = Trainer(problem.model(), "cpu", optim_function="SGD", verbose=False)
    trainer = CompiledTrainer(plain, steps_per_call=4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer.fit(problem.batches, problem.batches, dry_run=True)
    assert trainer.graphs == 0
