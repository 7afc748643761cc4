"""Whole-step compilation: equality with eager training, and reasons for rejection."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from compiling import needs_compiler
from problem import Problem
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.optim import SGD, Adafactor, Adam, AdamW, Optimizer, SparseAdam

from dovetail.trainers.whole_step import Backend, CannotCompileError, Outputs, WholeStep, read_by
from dovetail.trainers.whole_step.comparing import run_and_compare
from dovetail.trainers.whole_step.graph import Graph
from dovetail.trainers.whole_step.rules import RULES

Batch = tuple[Tensor, Tensor]
MAX_NORM = 0.5

pytestmark = pytest.mark.usefixtures("compiler_cache")
torture = pytest.mark.torture


class Model(nn.Module):
    """Buffers, random numbers twice, and a parameter that is not used."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.layers = nn.Sequential(
                nn.Linear(6, 10, bias=False), nn.BatchNorm1d(10), nn.Dropout(0.4), nn.Linear(10, 8), nn.Dropout(0.3)
            )
        self.spare = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.layers(x)
        return logits


def whole_step(model: nn.Module, optimizer: Optimizer, backend: Backend = "eager") -> WholeStep:
    """A step whose graph is called operation by operation: the trace is tested without the compiler."""

    def compute(batch: Batch) -> dict[str, Any]:
        return {"loss": cross_entropy(model(batch[0]), batch[1])}

    def describe() -> Any:
        return read_by(model, frozenset(), trusts_code=True), None

    return WholeStep(compute, [model], optimizer, MAX_NORM, backend=backend, describe=describe)


# Takes seconds for the first of equal steps.
compiled_step = partial(whole_step, backend="inductor")


TRACED_OR_COMPILED = pytest.mark.parametrize(
    "whole",
    [
        pytest.param(whole_step, id="traced"),
        pytest.param(compiled_step, marks=[needs_compiler, pytest.mark.slow, torture], id="compiled"),
    ],
)


def eager_step(model: nn.Module, optimizer: Optimizer) -> Callable[[Batch], dict[str, Any]]:
    def step(batch: Batch) -> dict[str, Any]:
        optimizer.zero_grad()
        loss = cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        return {"loss": loss.detach()}

    return step


def run(step: Callable[[Batch], Any], batches: list[Batch]) -> list[float]:
    return [step(batch)["loss"].item() for batch in batches]


def shorter(batch: Batch, size: int) -> Batch:
    return batch[0][:size], batch[1][:size]


def assert_near(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=2e-6)


def linear_for(problem: Problem) -> nn.Module:
    """A model whose graphs are soon compiled, for what does not depend on it."""
    return nn.Linear(problem.x.shape[1], int(problem.y.max()) + 1)


# Every term of every update. A graph takes seconds to compile, so that most tests share the second one.


def make_sgd(model: nn.Module) -> Optimizer:
    first, second, third, fourth, *rest = model.parameters()
    return SGD(
        [
            {"params": [first]},
            {"params": [second], "momentum": 0.9, "weight_decay": 0.1},
            {"params": [third, *rest], "momentum": 0.8, "nesterov": True},
            {"params": [fourth], "maximize": True, "momentum": 0.5},
        ],
        lr=0.1,
    )


def make_adam(model: nn.Module) -> Optimizer:
    first, second, third, *rest = model.parameters()
    return Adam(
        [
            {"params": [first], "weight_decay": 0.1},
            {"params": [second], "weight_decay": 0.1, "decoupled_weight_decay": True},
            {"params": [third], "amsgrad": True},
            {"params": rest, "betas": (0.8, 0.99), "maximize": True, "weight_decay": 0.0},
        ],
        lr=0.01,
    )


@pytest.mark.parametrize(
    ("make", "whole"),
    [
        pytest.param(make_sgd, whole_step, id="sgd"),
        pytest.param(make_adam, whole_step, id="adam"),
        pytest.param(make_adam, compiled_step, marks=[needs_compiler, pytest.mark.slow], id="adam-compiled"),
        pytest.param(make_sgd, compiled_step, marks=[needs_compiler, pytest.mark.slow, torture], id="sgd-compiled"),
    ],
)
def test_a_whole_step_run_equals_eager_training_in_all_state(
    problem: Problem, make: Callable[[nn.Module], Optimizer], whole: Any
) -> None:
    def train(kind: Any) -> tuple[Any, ...]:
        model = Model()
        optimizer = make(model)
        torch.manual_seed(3)
        losses = run(kind(model, optimizer), problem.batches)
        # The optimizer's state has no entry for the parameter that is not used.
        return losses, model.state_dict(), optimizer.state_dict(), torch.get_rng_state()

    assert_near(train(whole), train(eager_step))


@TRACED_OR_COMPILED
def test_the_update_of_a_large_parameter_equals_the_eager_one(problem: Problem, whole: Any) -> None:
    """Some numbers are stored once for a large parameter, and computed again for the elements of a small one."""

    def train(kind: Any) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 400), nn.Linear(400, 8))
        optimizer = AdamW(model.parameters(), lr=0.01, amsgrad=True)
        return run(kind(model, optimizer), problem.batches), model.state_dict(), optimizer.state_dict()

    assert_near(train(whole), train(eager_step))


# Every optimizer of torch whose own update is traced, with all of its terms.
TRACED: dict[str, Callable[..., Optimizer]] = {
    "RMSprop": partial(torch.optim.RMSprop, momentum=0.9, centered=True, weight_decay=0.1),
    "RMSprop-plain": partial(torch.optim.RMSprop, maximize=True),
    "Adagrad": partial(torch.optim.Adagrad, lr_decay=0.1, weight_decay=0.1),
    "Adadelta": partial(torch.optim.Adadelta, weight_decay=0.1),
    "Adamax": partial(torch.optim.Adamax, weight_decay=0.1),
    "NAdam": partial(torch.optim.NAdam, weight_decay=0.1, decoupled_weight_decay=True),
    "RAdam": partial(torch.optim.RAdam, weight_decay=0.1, foreach=True),
    "ASGD": partial(torch.optim.ASGD, t0=3, weight_decay=0.1),
    "Rprop": torch.optim.Rprop,
    "Muon": torch.optim.Muon,
}


def train_on_schedule(problem: Problem, kind: Any, make: Callable[..., Optimizer]) -> tuple[Any, ...]:
    """Train a float64 model with matrices only, for Muon, and change the numbers of the optimizer in every step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 10, bias=False), nn.Tanh(), nn.Linear(10, 8, bias=False)).double()
    optimizer = make(model.parameters(), lr=0.01)
    step = kind(model, optimizer)
    losses = []
    for number, (inputs, targets) in enumerate(problem.batches[:8]):
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
            if "betas" in group:
                group["betas"] = (0.5 + number / 30, 0.9)
        losses.append(step((inputs.double(), targets))["loss"].item())
    return losses, model.state_dict(), optimizer.state_dict(), step


@pytest.mark.parametrize("name", [name for name in TRACED if name != "Muon"])
def test_the_traced_update_of_an_optimizer_equals_its_own(problem: Problem, name: str) -> None:
    *found, step = train_on_schedule(problem, whole_step, TRACED[name])
    *expected, _ = train_on_schedule(problem, eager_step, TRACED[name])
    # The state holds numbers in float32.
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-7)
    assert step.num_graphs == 1


@TRACED_OR_COMPILED
def test_the_update_of_muon_is_at_most_twice_as_inexact_as_its_own(
    problem: Problem, whole: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It orthogonalizes in bfloat16, where a difference in the last bit of float64 may change the rounding."""

    def weights(kind: Any) -> Tensor:
        _, state, _, step = train_on_schedule(problem, kind, TRACED["Muon"])
        assert kind is eager_step or step.num_graphs == 1
        return torch.cat([value.flatten() for value in state.values()])

    graph, own = weights(whole), weights(eager_step)
    monkeypatch.setattr(Tensor, "bfloat16", lambda it: it.double().clone())
    exact = weights(eager_step)
    assert 0 < (graph - exact).norm() <= 2 * (own - exact).norm()


class Shapes(nn.Module):
    """Parameters of every number of dimensions, in float64: a number, a vector, a matrix and a stack of matrices."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale, self.linear = nn.Parameter(torch.tensor(1.5)), nn.Linear(6, 8)
        self.cube = nn.Parameter(torch.randn(2, 4, 8))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.scale * self.linear(x).tanh().unflatten(1, (2, 4))
        return torch.einsum("nij,ijk->nk", hidden, self.cube)


@pytest.mark.parametrize("foreach", [False, True])
@TRACED_OR_COMPILED
def test_the_update_of_adafactor_equals_its_own(problem: Problem, whole: Any, foreach: bool) -> None:
    def train(kind: Any, **settings: Any) -> tuple[Any, ...]:
        model = Shapes()
        groups = [
            {"params": [model.scale, model.linear.weight], "weight_decay": 0.1, "beta2_decay": -0.5},
            {"params": [model.linear.bias], "maximize": True},
            # So large that the first one replaces small variances, and the second one the norm of the weights.
            {"params": [model.cube], "eps": (0.01, 3.0), "d": 2.5},
        ]
        optimizer = Adafactor(groups, lr=0.05, **settings)
        step, losses = kind(model, optimizer), []
        for inputs, targets in problem.batches[:8]:
            for group in optimizer.param_groups:
                group["lr"], group["weight_decay"] = 0.9 * group["lr"], 1.1 * group["weight_decay"]
            losses.append(step((inputs.double(), targets))["loss"].item())
        return losses, model.state_dict(), optimizer.state_dict()["state"], step

    *found, step = train(whole)
    *expected, _ = train(eager_step, foreach=foreach)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert step.num_graphs == 1


@pytest.mark.parametrize("factor", [1.0, 1.01])
def test_a_changed_step_is_detected_although_compiled_code_rounds_more(factor: float) -> None:
    weight = nn.Parameter(torch.tensor([2.0]))

    def plain(value: Tensor) -> list[Tensor]:
        return [value.detach().sum()]

    def compiled(value: Tensor) -> list[Tensor]:
        return [value.detach().sum() * 1.01]

    graph = Graph(compiled, [weight], [], [], [], [], [], [], ["loss"], {}, plain=plain)

    def compare() -> list[Outputs]:
        return run_and_compare(graph, [], lambda: [{"loss": weight.sum() * factor}], 3e-2)

    if factor == 1.0:
        assert compare()[0]["loss"].item() == pytest.approx(2.02)
    else:
        with pytest.raises(CannotCompileError, match="changes from call to call"):
            compare()


def test_a_changed_setting_is_detected_in_code_that_was_found_on_disk() -> None:
    weight = nn.Parameter(torch.tensor([2.0]))
    graph = Graph(
        lambda it: [it.detach().sum()], [weight], [], [], [], [], [], [], ["loss"], {}, described=([0.1], [2], [])
    )

    def compare(now: Any, tolerance: float = 3e-2) -> list[Outputs]:
        return run_and_compare(graph, [], lambda: [{"loss": weight.sum()}], tolerance, describe=lambda: now)

    # A configuration may differ between the runs of a federation; a loss in full precision shows whether it matters.
    for now, tolerance in ((([0.1], [2], []), 3e-2), (([0.1], [3], []), 1e-3)):
        assert compare(now, tolerance)[0]["loss"].item() == 2.0
    for now in (([0.2], [2], []), ([0.1], [3], []), ([0.1], [2], ["code"]), None):
        with pytest.raises(CannotCompileError, match="a setting of the model, its loss or the configuration has ch"):
            compare(now)


@torture
@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in TRACED if name != "Muon"])
def test_the_compiled_update_of_an_optimizer_equals_its_own(problem: Problem, name: str) -> None:
    *found, _ = train_on_schedule(problem, compiled_step, TRACED[name])
    *expected, _ = train_on_schedule(problem, eager_step, TRACED[name])
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("make", [TRACED["NAdam"], Adafactor])
def test_an_optimizer_with_torchs_own_initial_state_resumes_an_eager_one(
    problem: Problem, make: Callable[..., Optimizer]
) -> None:
    def train(*kinds: Any) -> Any:
        torch.manual_seed(0)
        model, state = linear_for(problem), None
        for kind in kinds:
            optimizer = make(model.parameters(), lr=0.01)
            if state is not None:
                optimizer.load_state_dict(state)
            run(kind(model, optimizer), problem.batches[:3])
            state = optimizer.state_dict()
        return model.state_dict(), state

    expected = train(eager_step, eager_step)
    assert_near(train(whole_step, eager_step), expected)
    assert_near(train(eager_step, whole_step), expected)


def test_compiled_and_eager_steps_share_one_optimizer_state(problem: Problem) -> None:
    def train(first: Any, second: Any) -> tuple[nn.Module, Optimizer]:
        model = Model()
        optimizer = make_adam(model)
        torch.manual_seed(3)
        run(first(model, optimizer), problem.batches[:6])
        other = Model()
        other.load_state_dict(model.state_dict())
        resumed = make_adam(other)
        resumed.load_state_dict(optimizer.state_dict())
        torch.manual_seed(4)
        run(second(other, resumed), problem.batches[6:])
        return other, resumed

    expected, expected_state = train(eager_step, eager_step)
    for first, second in ((whole_step, eager_step), (eager_step, whole_step)):
        model, optimizer = train(first, second)
        assert_near(model.state_dict(), expected.state_dict())
        assert_near(optimizer.state_dict(), expected_state.state_dict())


def test_a_state_loaded_into_the_optimizer_is_used_by_its_graph(problem: Problem) -> None:
    def train(kind: Any) -> list[float]:
        model = Model()
        optimizer = make_adam(model)
        step = kind(model, optimizer)
        torch.manual_seed(3)
        losses = run(step, problem.batches[:3])
        kept = copy.deepcopy(optimizer.state_dict())
        losses += run(step, problem.batches[3:6])
        optimizer.load_state_dict(kept)
        return losses + run(step, problem.batches[6:])

    assert_near(train(whole_step), train(eager_step))


def test_optimizer_hyperparameters_change_without_a_new_graph(problem: Problem) -> None:
    def train(kind: Any) -> tuple[list[float], Any]:
        model = Model()
        optimizer = make_adam(model)
        step = kind(model, optimizer)
        torch.manual_seed(3)
        losses = []
        for number, batch in enumerate(problem.batches):
            for group in optimizer.param_groups:
                group["lr"], group["betas"] = 0.001 * (number + 1), (0.5 + number / 30, 0.9)
            optimizer.param_groups[0]["weight_decay"] = 0.5 + number
            losses.append(step(batch)["loss"].item())
        return losses, step

    losses, step = train(whole_step)
    assert_near(losses, train(eager_step)[0])
    assert step.num_graphs == 1


def test_a_new_batch_shape_is_compiled_at_its_eighth_occurrence(problem: Problem) -> None:
    model = linear_for(problem)
    step = whole_step(model, SGD(model.parameters(), lr=0.1))
    full = problem.batches[0]
    found = []
    for _ in range(8):
        assert step(full) is not None
        found.append(step(shorter(full, 5)) is not None)

    assert found == [False] * 7 + [True]
    assert step.num_graphs == 2


def test_a_shape_that_occurs_twice_in_a_row_is_compiled_after_a_resume(problem: Problem) -> None:
    model = linear_for(problem)
    optimizer = SGD(model.parameters(), lr=0.1)
    step = whole_step(model, optimizer)
    full = problem.batches[0]
    assert step(full) is not None
    assert step(shorter(full, 5)) is None

    resumed = whole_step(model, optimizer)
    resumed.load_state_dict(step.state_dict())
    assert resumed(shorter(full, 4)) is None
    assert resumed(full) is not None
    resumed.load_state_dict(step.state_dict())
    assert resumed(shorter(full, 5)) is not None


@TRACED_OR_COMPILED
def test_among_many_runs_all_shorter_batches_share_one_graph(problem: Problem, whole: Any) -> None:
    full = problem.batches[0]

    def train(sizes: list[int]) -> dict[int, Tensor]:
        """Weights after a full and a shorter batch, by the length of that, each from the same weights."""
        found = {}
        model = nn.Linear(6, 3)
        step = whole(model, SGD(model.parameters(), lr=0.1))
        for size in sizes:
            model.load_state_dict({"weight": torch.eye(3, 6), "bias": torch.zeros(3)})
            step.start_run(is_among_many=True)
            assert step(full) is not None
            assert step(shorter(full, size)) is not None
            found[size] = model.weight.detach().clone()
        assert step.num_graphs == 1
        return found

    found = train([5, 2, 7, 3])
    torch.testing.assert_close(train([3, 7, 2, 5]), found, rtol=0, atol=0)
    for size, weight in found.items():
        model = nn.Linear(6, 3)
        model.load_state_dict({"weight": torch.eye(3, 6), "bias": torch.zeros(3)})
        run(eager_step(model, SGD(model.parameters(), lr=0.1)), [full, shorter(full, size)])
        assert_near(weight, model.weight.detach())


def test_a_graph_for_shorter_batches_is_used_only_if_it_is_valid(problem: Problem) -> None:
    model = linear_for(problem)
    inputs, targets = problem.batches[0]

    def compute(batch: Batch) -> dict[str, Any]:
        loss = cross_entropy(model(batch[0]), batch[1])
        return {"loss": 2 * loss if batch[0].shape[0] >= 4 else loss}

    step = WholeStep(compute, [model], SGD(model.parameters(), lr=0.1), backend="eager")
    step.start_run(is_among_many=True)
    assert step((inputs, targets)) is not None
    # A list is another form, and a batch of one sample is a special case in torch.
    assert step([inputs[:5], targets[:5]]) is None
    assert step((inputs[:5], targets[:4])) is None
    for size in (7, 6, 5, 4, 3, 2, 1):
        batch = inputs[:size], targets[:size]
        due = compute(batch)["loss"].detach()
        found = step(batch)
        assert (found is not None) == (size >= 4)
        if found is not None:
            assert_near(found["loss"], due)


class Attention(nn.Module):
    """Looks twice at a sequence, without dropout."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(7, 8), nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)[:, None]
        for _ in range(2):
            hidden = hidden + scaled_dot_product_attention(hidden, hidden, hidden, is_causal=True)
        logits: Tensor = self.head(hidden.mean((1, 2)))
        return logits


@TRACED_OR_COMPILED
def test_attention_without_dropout_draws_no_random_numbers(whole: Any) -> None:
    """Torch marks it as if it did, and of several draws a graph must know all."""
    batches = [((torch.arange(20).reshape(4, 5) + number) % 7, torch.arange(4) % 3) for number in range(3)]
    ours, theirs = Attention(), Attention()
    found = run(whole(ours, SGD(ours.parameters(), lr=0.1)), batches)
    assert_near(torch.tensor(found), torch.tensor(run(eager_step(theirs, SGD(theirs.parameters(), lr=0.1)), batches)))
    assert_near(ours.state_dict(), theirs.state_dict())


def test_a_step_without_a_graph_for_shorter_batches_has_one_for_full_ones(problem: Problem) -> None:
    model = Model()
    step = whole_step(model, SGD(model.parameters(), lr=0.1))
    step.start_run(is_among_many=True)
    full = problem.batches[0]
    found = [step(batch) is not None for batch in (full, shorter(full, 5), full, shorter(full, 6))]
    # It draws random numbers twice, in an order that the compiler would decide.
    assert found == [True, False, True, False]


def test_a_step_with_python_side_effects_is_rejected_and_undone(problem: Problem) -> None:
    model = Model()
    doubles = False

    def compute(batch: Batch) -> dict[str, Any]:
        loss = cross_entropy(model(batch[0]), batch[1])
        return {"loss": 2 * loss if doubles else loss}

    step = WholeStep(compute, [model], make_adam(model), MAX_NORM, backend="eager")
    assert step(problem.batches[0]) is not None
    before = copy.deepcopy(model.state_dict())
    doubles = True
    step.recheck()

    with pytest.raises(CannotCompileError, match="changes from call to call"):
        step(problem.batches[1])
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_a_graph_is_reused_with_a_new_optimizer_of_the_same_parameters(problem: Problem) -> None:
    model = Model()
    step = whole_step(model, make_adam(model))
    step(problem.batches[0])
    other = make_adam(model)

    assert step.adopt([model], other)
    step(problem.batches[1])
    assert step.num_graphs == 1
    assert [state["step"].item() for state in other.state.values()] == [1, 1, 1, 1, 1]


@needs_compiler
@pytest.mark.slow
@torture
def test_a_compiled_image_model_has_the_losses_of_eager_training() -> None:
    def train(kind: Any) -> list[float]:
        torch.manual_seed(5)
        batch = torch.randn(4, 1, 8, 8), torch.randint(3, (4,))
        model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(27, 3))
        return run(kind(model, SGD(model.parameters(), lr=0.1)), [batch] * 4)

    assert_near(train(compiled_step), train(eager_step))


def mlp() -> tuple[nn.Module, tuple[int, ...]]:
    return nn.Sequential(nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 5)), (10,)


def cnn() -> tuple[nn.Module, tuple[int, ...]]:
    layers = (nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 8, 3), nn.ReLU())
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(288, 5)), (1, 16, 16)


@pytest.mark.torture
@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(
    ("make_model", "make_optimizer"),
    [
        pytest.param(cnn, lambda parameters: SGD(parameters, lr=0.05, momentum=0.9), id="cnn-momentum"),
        pytest.param(mlp, lambda parameters: AdamW(parameters, lr=0.01), id="mlp-AdamW", marks=torture),
        pytest.param(mlp, lambda parameters: SGD(parameters, lr=0.1), id="mlp-SGD", marks=torture),
        pytest.param(mlp, lambda parameters: SGD(parameters, lr=0.05, momentum=0.9), id="mlp-momentum", marks=torture),
        pytest.param(mlp, lambda parameters: Adam(parameters, lr=0.01), id="mlp-Adam", marks=torture),
        pytest.param(cnn, lambda parameters: SGD(parameters, lr=0.1), id="cnn-SGD", marks=torture),
        pytest.param(cnn, lambda parameters: Adam(parameters, lr=0.01), id="cnn-Adam", marks=torture),
        pytest.param(cnn, lambda parameters: AdamW(parameters, lr=0.01), id="cnn-AdamW", marks=torture),
    ],
)
def test_a_compiled_step_from_the_same_state_equals_the_eager_step(
    make_model: Callable[[], tuple[nn.Module, tuple[int, ...]]], make_optimizer: Callable[..., Optimizer]
) -> None:
    torch.manual_seed(0)
    (model, shape), (twin, _) = make_model(), make_model()
    optimizer, other = make_optimizer(model.parameters()), make_optimizer(twin.parameters())
    eager, compiled = eager_step(model, optimizer), compiled_step(twin, other)
    for _ in range(30):
        # Long runs drift apart because differences add up, so every step starts from the same state.
        twin.load_state_dict(model.state_dict())
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        batch = torch.randn(16, *shape), torch.randint(5, (16,))
        loss = compiled(batch)
        assert loss is not None
        assert abs(loss["loss"] - eager(batch)["loss"]).item() <= 1e-6
        with torch.no_grad():
            after = [cross_entropy(it(batch[0]), batch[1]).item() for it in (model, twin)]
        assert abs(after[0] - after[1]) <= 1e-6


@needs_compiler
@pytest.mark.slow
def test_autograd_detects_weights_that_a_graph_has_changed(problem: Problem) -> None:
    model = Model()
    # Shares its graph with another test.
    step = compiled_step(model, make_adam(model))
    inputs = problem.batches[0][0].clone().requires_grad_()
    loss = model(inputs).sum()
    step(problem.batches[0])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@needs_compiler
@pytest.mark.slow
@torture
def test_a_long_compiled_run_in_double_precision_equals_the_eager_run() -> None:
    def train(kind: Any) -> list[float]:
        torch.manual_seed(0)
        model = mlp()[0].double()
        batches = [(torch.randn(16, 10).double(), torch.randint(5, (16,))) for _ in range(1000)]
        return run(kind(model, Adam(model.parameters(), lr=0.01)), batches)

    torch.testing.assert_close(train(compiled_step), train(eager_step), rtol=0, atol=1e-12)


@TRACED_OR_COMPILED
def test_several_steps_in_one_call_equal_as_many_calls_bit_for_bit(problem: Problem, whole: Any) -> None:
    def train(number: int) -> tuple[Any, ...]:
        model = Model()
        optimizer = make_adam(model)
        step = whole(model, optimizer)
        torch.manual_seed(3)
        losses = run(step, problem.batches[:1])
        for start in range(1, 9, number):
            batches = problem.batches[start : start + number]
            outputs = [step(batch) for batch in batches] if number == 1 else step.several(batches)
            assert outputs is not None
            losses += [output["loss"].item() for output in outputs]
        return losses, model.state_dict(), optimizer.state_dict(), torch.get_rng_state()

    torch.testing.assert_close(train(2), train(1), rtol=0, atol=0)


def test_several_steps_per_call_require_a_proven_graph_for_one_step(problem: Problem) -> None:
    model = Model()
    step = whole_step(model, make_adam(model))
    batches = problem.batches[:2]
    assert step.several(batches) is None
    step(batches[0])
    assert step.several([batches[0], shorter(batches[1], 5)]) is None
    step.recheck()
    assert step.several(batches) is None
    before = copy.deepcopy(model.state_dict())
    step(batches[0])
    assert step.several(batches) is not None
    assert not torch.equal(before["layers.0.weight"], model.layers[0].weight)


def refusal(
    compute: Callable[..., Any], model: nn.Module, optimizer: Optimizer | None = None, batch: Any = None
) -> str:
    optimizer = optimizer or SGD(model.parameters(), lr=0.1)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(CannotCompileError) as caught:
        WholeStep(lambda batch: compute(model, batch), [model], optimizer)(torch.ones(3, 2) if batch is None else batch)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    return str(caught.value)


def mean(model: nn.Module, batch: Any) -> dict[str, Any]:
    return {"loss": model(batch).mean()}


def linear() -> nn.Linear:
    return nn.Linear(2, 2)


def with_hook(register: str) -> nn.Module:
    model = linear()
    getattr(model, register)(lambda *given: None)
    return model


class Counting(nn.Linear):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class Keeping(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.outputs: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.outputs.append(super().forward(x))
        return self.outputs[-1]


class OwnSGD(SGD):
    """May change the update."""


@pytest.mark.parametrize(
    ("cause", "refused"),
    [
        ("the optimizer is OwnSGD", lambda: refusal(mean, m := linear(), OwnSGD(m.parameters(), lr=0.1))),
        ("the optimizer is SparseAdam", lambda: refusal(mean, m := linear(), SparseAdam([*m.parameters()]))),
        ("dampening", lambda: refusal(mean, m := linear(), SGD(m.parameters(), momentum=0.9, dampening=0.1))),
        ("not the model's", lambda: refusal(mean, linear(), SGD(linear().parameters()))),
        ("a recurrent layer, LSTM", lambda: refusal(mean, nn.LSTM(2, 2))),
        ("a Linear has the hook <lambda>", lambda: refusal(mean, with_hook("register_forward_hook"))),
        ("a Linear has the hook", lambda: refusal(mean, with_hook("register_full_backward_hook"))),
        ("by .item() or an if", lambda: refusal(lambda m, b: {"loss": m(b).mean() * m(b).sum().item()}, linear())),
        ("by .item() or an if", lambda: refusal(lambda m, b: {"loss": m(b).mean() if m(b)[0, 0] > 0 else 0}, linear())),
        ("changes Counting.calls", lambda: refusal(mean, Counting(2, 2))),
        ("changes Keeping.outputs", lambda: refusal(mean, Keeping())),
        ("from Python or numpy", lambda: refusal(lambda m, b: {"loss": m(b).mean() * random.random()}, linear())),
        ("returns no loss", lambda: refusal(lambda m, b: {"loss": m(b)}, linear())),
        ("a list as 'all'", lambda: refusal(lambda m, b: {"loss": m(b).mean(), "all": [m(b)]}, linear())),
        ("an object of type object", lambda: refusal(mean, linear(), batch=[torch.ones(3, 2), object()])),
        ("cannot be traced (RuntimeError", lambda: refusal(mean, linear(), batch=torch.ones(3, 5))),
    ],
)
def test_a_step_without_a_graph_is_rejected_by_name_and_changes_nothing(cause: str, refused: Callable[[], str]) -> None:
    assert cause in refused()


def test_an_optimizer_that_reads_values_is_rejected_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    # Its own code reads norms, so it needs the written rule.
    monkeypatch.delitem(RULES, Adafactor)
    model = linear()
    cause = "the update of Adafactor depends on the value of a tensor"
    assert refusal(mean, model, Adafactor(model.parameters())) == cause


def test_a_parameter_outside_the_modules_is_rejected() -> None:
    foreign = nn.Parameter(torch.ones(2))
    assert "a parameter that is not the model's" in refusal(lambda m, b: {"loss": (m(b) * foreign).mean()}, linear())


def test_a_hook_on_a_gradient_is_rejected() -> None:
    model = linear()
    model.bias.register_hook(lambda gradient: gradient)
    assert refusal(mean, model) == "the parameter bias has a hook on its gradient"


def test_parameters_with_shared_memory_are_rejected() -> None:
    model = linear()
    model.register_buffer("alias", model.weight.data[0])
    assert refusal(mean, model) == "two parameters or buffers share their memory"


def test_a_missing_compiler_is_named() -> None:
    from torch._inductor import config

    with config.patch({"cpp.cxx": ("/nowhere/g++",)}):
        assert refusal(mean, linear()) == "there is no C++ compiler, such as g++"


def test_a_compiled_loss_with_one_element_equals_eager_training(problem: Problem) -> None:
    compiled, eager = linear_for(problem), linear_for(problem)
    eager.load_state_dict(compiled.state_dict())

    def step(batch: Batch) -> dict[str, Any]:
        return {"loss": cross_entropy(compiled(batch[0]), batch[1]).reshape(1)}

    graph = WholeStep(step, [compiled], SGD(compiled.parameters(), lr=0.1), MAX_NORM, backend="eager")
    expected = run(eager_step(eager, SGD(eager.parameters(), lr=0.1)), problem.batches)
    assert_near(run(graph, problem.batches), expected)
