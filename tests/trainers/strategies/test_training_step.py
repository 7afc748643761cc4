"""Step strategies alone, against loops written by hand, and nested in each other."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from problem import Problem, assert_same_weights, train_by_hand, weights
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from dovetail import Epochs
from dovetail.errors import ConfigError, DataError, NonFiniteLossError
from dovetail.trainers import Trainer
from dovetail.trainers.composable import ComposableTrainer
from dovetail.trainers.context import TrainingContext
from dovetail.trainers.strategies import (
    CrossEntropyLossStrategy,
    CustomBackwardStepStrategy,
    DefaultTrainingStepStrategy,
    GradientAccumulationStepStrategy,
    GradientClippingStepStrategy,
    MixedPrecisionStepStrategy,
    MultipleForwardPassStepStrategy,
    NestingStepStrategy,
    SGDOptimizerStrategy,
    TrainingStepStrategy,
    ValidateBeforeStepStrategy,
    compose_steps,
)


class Receiver(NestingStepStrategy):
    """Notes every hook that reaches it."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[str] = []

    def _note(name: str) -> Any:
        def hook(self: Receiver, *args: Any) -> None:
            self.heard.append(name)

        return hook

    setup, teardown = _note("setup"), _note("teardown")
    on_train_start, on_train_end = _note("on_train_start"), _note("on_train_end")
    on_epoch_start, on_epoch_end = _note("on_epoch_start"), _note("on_epoch_end")
    on_gradients = _note("on_gradients")

    def state_dict(self) -> dict[str, Any]:
        return {"heard": list(self.heard)}

    def load_state_dict(self, state: Any) -> None:
        self.heard = list(state["heard"])


def every_wrapper() -> list[NestingStepStrategy]:
    return [
        GradientAccumulationStepStrategy(1),
        MixedPrecisionStepStrategy(),
        GradientClippingStepStrategy(1e9),
        CustomBackwardStepStrategy(lambda model, loss, context: context.backward(loss)),
        MultipleForwardPassStepStrategy(1),
        ValidateBeforeStepStrategy(raise_on_error=True),
    ]


SGD = SGDOptimizerStrategy(0.1)


# One by one


def test_the_default_step_equals_a_hand_written_loop(problem: Problem, train: Callable[..., ComposableTrainer]) -> None:
    model, by_hand = problem.model(), problem.model()
    train(model, problem.batches, optimizer_strategy=SGD, training_step_strategy=DefaultTrainingStepStrategy())
    train_by_hand(by_hand, problem.batches, torch.optim.SGD(by_hand.parameters(), lr=0.1))
    assert_same_weights(model, by_hand)


@pytest.mark.parametrize("step", every_wrapper(), ids=lambda step: type(step).__name__)
def test_every_step_strategy_with_neutral_settings_equals_the_default_step(
    step: NestingStepStrategy, problem: Problem, train: Callable[..., ComposableTrainer]
) -> None:
    model, by_hand = problem.model(), problem.model()
    train(model, problem.batches, optimizer_strategy=SGD, training_step_strategy=step)
    train_by_hand(by_hand, problem.batches, torch.optim.SGD(by_hand.parameters(), lr=0.1))
    assert_same_weights(model, by_hand)


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
@pytest.mark.parametrize(
    ("step", "config"),
    [
        (DefaultTrainingStepStrategy(create_graph=True), {}),
        (GradientAccumulationStepStrategy(1, create_graph=True), {}),
        (MixedPrecisionStepStrategy(create_graph=True), {}),
        (GradientClippingStepStrategy(1e9, base_strategy=DefaultTrainingStepStrategy(create_graph=True)), {}),
        (DefaultTrainingStepStrategy(), {"create_graph": True}),
    ],
)
def test_create_graph_allows_differentiating_gradients_again(
    step: Any, config: Any, problem: Problem, train: Callable[..., ComposableTrainer]
) -> None:
    differentiable = []

    class Looks(SGDOptimizerStrategy):
        def on_gradients(self, optimizer: torch.optim.Optimizer, context: TrainingContext) -> None:
            differentiable.extend(p.grad.requires_grad for group in optimizer.param_groups for p in group["params"])

    trainer = ComposableTrainer(
        problem.model(), verbose=False, optimizer_strategy=Looks(0.1), training_step_strategy=step
    )
    trainer.context.config.update(config)
    trainer.fit(problem.batches[:1], max_length=Epochs(1))
    assert differentiable == [True] * 4


def test_a_retained_graph_can_be_used_before_the_step(
    problem: Problem, train: Callable[..., ComposableTrainer]
) -> None:
    losses: list[Tensor] = []
    again: list[Tensor] = []

    class Keeps(CrossEntropyLossStrategy):
        def compute_loss(self, outputs: Any, labels: Any, context: TrainingContext) -> Tensor:
            losses.append(super().compute_loss(outputs, labels, context))
            return losses[-1]

        def on_gradients(self, optimizer: torch.optim.Optimizer, context: TrainingContext) -> None:
            parameters = list(context.model.parameters())
            gradients = torch.autograd.grad(losses[0], parameters)
            again.extend(one - other.grad for one, other in zip(gradients, parameters, strict=True))

    step = DefaultTrainingStepStrategy(retain_graph=True)
    train(problem.model(), problem.batches[:1], loss_strategy=Keeps(), training_step_strategy=step)
    assert len(again) == 4
    assert not any(difference.any() for difference in again)


def test_the_default_step_accepts_labels_of_none() -> None:
    step = DefaultTrainingStepStrategy()
    loss = step.training_step(
        nn.Identity(), None, torch.tensor([2.0]), None, lambda outputs, labels: outputs.sum(), TrainingContext()
    )
    assert loss.item() == 2.0


def test_a_multi_input_step_calls_the_model_with_each_input() -> None:
    examples = (torch.ones(1, 2), torch.ones(1, 3))
    loss = DefaultTrainingStepStrategy().training_step(
        nn.Bilinear(2, 3, 1), None, examples, None, lambda outputs, labels: outputs.sum(), TrainingContext()
    )
    assert loss.ndim == 0


# Accumulation (P-PL-6)


def test_accumulation_of_four_over_ten_batches_makes_three_updates(
    problem: Problem, train: Callable[..., ComposableTrainer]
) -> None:
    stepped = []

    class Counts(SGDOptimizerStrategy):
        def on_optimizer_step(self, optimizer: torch.optim.Optimizer, context: TrainingContext) -> None:
            stepped.append(context.progress.batches + 1)

    trainer = train(
        problem.model(),
        problem.batches[:10],
        optimizer_strategy=Counts(0.1),
        training_step_strategy=GradientAccumulationStepStrategy(4),
    )
    assert trainer.context.progress.updates == 3
    assert stepped == [4, 8, 10]


def test_accumulated_gradients_equal_the_gradients_of_large_batches(
    problem: Problem, train: Callable[..., ComposableTrainer]
) -> None:
    model, by_hand = problem.model(dtype=torch.float64), problem.model(dtype=torch.float64)
    small = [(x.double(), y) for x, y in problem.batches[:10]]
    large = [
        (torch.cat([x for x, _ in group]), torch.cat([y for _, y in group]))
        for group in (small[:4], small[4:8], small[8:])
    ]
    train(model, small, optimizer_strategy=SGD, training_step_strategy=GradientAccumulationStepStrategy(4), epochs=2)
    train_by_hand(by_hand, large, torch.optim.SGD(by_hand.parameters(), lr=0.1), epochs=2)
    for one, other in zip(model.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_parameters_of_two_optimizers_are_rescaled_once_per_window(problem: Problem) -> None:
    batches = [(problem.x[:8].double(), problem.y[:8]), (problem.x[8:13].double(), problem.y[8:13])]

    def trained(data: Any, accumulation_steps: int) -> nn.Module:
        model = problem.model(dtype=torch.float64)

        class TwoOptimizers(Trainer):
            def get_optimizer(self, model: nn.Module) -> Any:
                return [torch.optim.SGD(model.parameters(), lr=rate) for rate in (0.1, 0.05)]

        trainer = TwoOptimizers(model, "cpu", num_epochs=1, accumulation_steps=accumulation_steps, verbose=False)
        trainer.fit(data)
        return model

    whole = trained([tuple(torch.cat(parts) for parts in zip(*batches, strict=True))], 1)
    for one, other in zip(trained(batches, 2).parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_accumulating_in_two_places_is_rejected() -> None:
    with pytest.raises(ConfigError, match="accumulate in one place"):
        ComposableTrainer(
            nn.Linear(1, 1), accumulation_steps=2, training_step_strategy=GradientAccumulationStepStrategy(4)
        )


def test_an_accumulation_window_of_zero_batches_is_rejected() -> None:
    with pytest.raises(ConfigError, match="at least 1, got 0"):
        GradientAccumulationStepStrategy(0)


# Mixed precision (P-PL-10)


def test_bf16_equals_a_hand_written_loop_under_autocast(
    problem: Problem, train: Callable[..., ComposableTrainer]
) -> None:
    model, by_hand = problem.model(), problem.model()
    optimizer = torch.optim.SGD(by_hand.parameters(), lr=0.1)
    train(
        model,
        problem.batches,
        optimizer_strategy=SGD,
        training_step_strategy=MixedPrecisionStepStrategy(precision="bf16"),
    )
    for x, y in problem.batches:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = functional.cross_entropy(by_hand(x), y)
        loss.backward()
        optimizer.step()
    assert_same_weights(model, by_hand)


def test_fp16_with_clipping_equals_unscaling_and_clipping_by_hand(
    problem: Problem, train: Callable[..., ComposableTrainer]
) -> None:
    model, by_hand = problem.model(), problem.model()
    optimizer, scaler = torch.optim.SGD(by_hand.parameters(), lr=0.1), torch.amp.GradScaler("cpu")
    train(
        model,
        problem.batches,
        optimizer_strategy=SGD,
        training_step_strategy=compose_steps(
            MixedPrecisionStepStrategy(precision="fp16"), GradientClippingStepStrategy(max_norm=0.1)
        ),
    )
    for x, y in problem.batches:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = functional.cross_entropy(by_hand(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(by_hand.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
    assert_same_weights(model, by_hand)


def test_an_overflow_in_fp16_skips_the_update_and_does_not_count_it(
    problem: Problem, train: Callable[..., ComposableTrainer]
) -> None:
    model, before = problem.model(), weights(problem.model())
    stepped = []

    class Counts(SGDOptimizerStrategy):
        def on_optimizer_step(self, optimizer: torch.optim.Optimizer, context: TrainingContext) -> None:
            stepped.append(context.run.batch.number)

    factors = iter([1e38, 1.0, 1.0])

    trainer = train(
        model,
        problem.batches[:3],
        loss_strategy=lambda outputs, labels: functional.cross_entropy(outputs, labels) * next(factors),
        optimizer_strategy=Counts(0.1),
        training_step_strategy=MixedPrecisionStepStrategy(precision="fp16"),
    )
    assert trainer.context.progress.batches == 3
    assert trainer.context.progress.updates == 2
    assert stepped == [1, 2]
    assert not torch.equal(model[0].weight, before["0.weight"])
    assert all(value.isfinite().all() for value in model.state_dict().values())


def test_the_scale_of_fp16_is_saved_and_restored(context: TrainingContext) -> None:
    step = MixedPrecisionStepStrategy(precision="fp16", base_strategy=Receiver())
    step.setup(context)
    scaler = context.precision.scaler
    scaler.load_state_dict({**scaler.state_dict(), "scale": 1024.0})
    other, other_context = MixedPrecisionStepStrategy(precision="fp16", base_strategy=Receiver()), TrainingContext()
    other.setup(other_context)
    other.load_state_dict(step.state_dict())
    assert other_context.precision.state_dict()["scale"] == 1024.0
    assert other.base_strategy.heard == ["setup"]


@pytest.mark.parametrize(
    ("step", "dtype"),
    [
        (MixedPrecisionStepStrategy(), None),
        (MixedPrecisionStepStrategy(enabled=False, precision="bf16"), None),
        (MixedPrecisionStepStrategy(precision="fp32"), None),
        (MixedPrecisionStepStrategy(enabled=True), torch.bfloat16),
        (MixedPrecisionStepStrategy(precision="fp16"), torch.float16),
    ],
    ids=repr,
)
def test_the_requested_precision_is_used_on_a_cpu(step: Any, dtype: torch.dtype, context: TrainingContext) -> None:
    step.setup(context)
    assert (None if context.precision is None else context.precision.dtype) == dtype


def test_an_unknown_precision_is_rejected_in_the_constructor() -> None:
    with pytest.raises(ConfigError, match="'fp64'"):
        MixedPrecisionStepStrategy(precision="fp64")


# Clipping


def test_clipping_limits_the_gradient_norm(problem: Problem, train: Callable[..., ComposableTrainer]) -> None:
    model = problem.model()
    before = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    train(
        model,
        [(1e4 * problem.x, problem.y)],
        optimizer_strategy=SGDOptimizerStrategy(lr=1.0),
        training_step_strategy=GradientClippingStepStrategy(max_norm=1e-3),
    )
    moved = (nn.utils.parameters_to_vector(model.parameters()) - before).norm().item()
    assert moved == pytest.approx(1e-3, rel=1e-3)


def test_clipping_applies_to_whole_accumulation_windows(
    problem: Problem, train: Callable[..., ComposableTrainer]
) -> None:
    norms = []

    class Looks(SGDOptimizerStrategy):
        def on_optimizer_step(self, optimizer: torch.optim.Optimizer, context: TrainingContext) -> None:
            norms.append(nn.utils.get_total_norm([p.grad for p in context.model.parameters()]).item())

    train(
        problem.model(),
        problem.batches[:10],
        optimizer_strategy=Looks(0.1),
        training_step_strategy=[GradientClippingStepStrategy(1e-3), GradientAccumulationStepStrategy(4)],
    )
    assert norms == pytest.approx([1e-3] * 3, rel=1e-3)


# Custom backward


def test_a_backward_function_may_differentiate_other_losses(
    problem: Problem, train: Callable[..., ComposableTrainer]
) -> None:
    def with_penalty(model: nn.Module, loss: Tensor, context: TrainingContext) -> None:
        context.backward(loss)
        context.backward(0.05 * sum(parameter.square().sum() for parameter in model.parameters()))

    model, by_hand = problem.model(dtype=torch.float64), problem.model(dtype=torch.float64)
    data = [(x.double(), y) for x, y in problem.batches]
    train(model, data, optimizer_strategy=SGD, training_step_strategy=CustomBackwardStepStrategy(with_penalty))
    train_by_hand(by_hand, data, torch.optim.SGD(by_hand.parameters(), lr=0.1, weight_decay=0.1))
    for one, other in zip(model.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_a_backward_function_may_only_add_to_gradients(
    problem: Problem, train: Callable[..., ComposableTrainer]
) -> None:
    def decay(model: nn.Module, loss: Tensor, context: TrainingContext) -> None:
        for parameter in model.parameters():
            parameter.grad = 0.1 * parameter.detach()

    model, by_hand = problem.model(dtype=torch.float64), problem.model(dtype=torch.float64)
    data = [(x.double(), y) for x, y in problem.batches]
    train(model, data, optimizer_strategy=SGD, training_step_strategy=CustomBackwardStepStrategy(decay))
    train_by_hand(by_hand, data, torch.optim.SGD(by_hand.parameters(), lr=0.1, weight_decay=0.1))
    for one, other in zip(model.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_a_backward_function_that_steps_the_optimizer_is_not_stepped_again(
    problem: Problem, train: Callable[..., ComposableTrainer]
) -> None:
    def whole(model: nn.Module, loss: Tensor, context: TrainingContext) -> None:
        context.backward(loss)
        context.step(context.optimizers[0])

    model, by_hand = problem.model(), problem.model()
    strategy = SGDOptimizerStrategy(0.1, momentum=0.9)
    train(model, problem.batches, optimizer_strategy=strategy, training_step_strategy=CustomBackwardStepStrategy(whole))
    train_by_hand(by_hand, problem.batches, torch.optim.SGD(by_hand.parameters(), lr=0.1, momentum=0.9))
    assert_same_weights(model, by_hand)


# Several passes


def test_several_passes_use_the_mean_of_their_losses(problem: Problem, train: Callable[..., ComposableTrainer]) -> None:
    model, by_hand = problem.model(dropout=0.5), problem.model(dropout=0.5)
    torch.manual_seed(3)
    train(model, problem.batches, optimizer_strategy=SGD, training_step_strategy=MultipleForwardPassStepStrategy(3))
    optimizer = torch.optim.SGD(by_hand.parameters(), lr=0.1)
    torch.manual_seed(3)
    for x, y in problem.batches:
        optimizer.zero_grad()
        torch.stack([functional.cross_entropy(by_hand(x), y) for _ in range(3)]).mean().backward()
        optimizer.step()
    assert_same_weights(model, by_hand)


def test_several_passes_are_aggregated_by_the_given_function(context: TrainingContext) -> None:
    losses = iter([torch.tensor(1.0), torch.tensor(5.0)])
    step = MultipleForwardPassStepStrategy(aggregate_fn=max)
    loss = step.training_step(nn.Identity(), None, torch.ones(1), None, lambda *_: next(losses), context)
    assert loss.item() == 5.0


def test_zero_passes_are_rejected() -> None:
    with pytest.raises(ConfigError, match="num_passes"):
        MultipleForwardPassStepStrategy(0)


# Validation of numbers (P-PL-7)


def test_the_validating_step_runs_its_base_strategy(problem: Problem, train: Callable[..., ComposableTrainer]) -> None:
    trainer = train(
        problem.model(),
        problem.batches[:10],
        training_step_strategy=ValidateBeforeStepStrategy(base_strategy=GradientAccumulationStepStrategy(4)),
    )
    assert trainer.context.progress.updates == 3


NAN = torch.tensor([[torch.nan]])


@pytest.mark.parametrize(
    ("model", "examples", "labels", "error", "what"),
    [
        (nn.Identity(), NAN, torch.zeros(1, 1), DataError, "examples"),
        (nn.Identity(), (torch.ones(1, 1), {"a": NAN}), None, DataError, "examples"),
        (nn.Identity(), torch.ones(1, 1), NAN, DataError, "labels"),
        (lambda x: x / 0, torch.ones(1, 1), torch.zeros(1, 1), NonFiniteLossError, "outputs"),
        (nn.Identity(), torch.full((1, 1), 1e30), torch.zeros(1, 1), NonFiniteLossError, "loss"),
    ],
)
def test_a_loss_that_is_not_finite_is_named(
    model: nn.Module, examples: Any, labels: Any, error: Any, what: Any, context: TrainingContext
) -> None:
    with pytest.raises(error, match=f"NaN or infinity in the {what}"):
        ValidateBeforeStepStrategy(raise_on_error=True).training_step(
            model, None, examples, labels, functional.mse_loss, context
        )


def test_a_gradient_that_is_not_finite_is_named_before_the_step(
    problem: Problem, train: Callable[..., ComposableTrainer]
) -> None:
    class Infinite(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            return self.weight.sqrt() + 0 * x.sum()

    model = Infinite()
    with pytest.raises(NonFiniteLossError, match="NaN or infinity in the gradients"):
        train(
            model,
            [(torch.ones(1, 1), torch.ones(1))],
            loss_strategy=lambda outputs, labels: outputs.sum(),
            training_step_strategy=ValidateBeforeStepStrategy(raise_on_error=True),
        )
    assert model.weight.item() == 0.0


def test_the_validating_step_warns_unless_it_raises(context: TrainingContext) -> None:
    with pytest.warns(RuntimeWarning, match="NaN or infinity in the labels"):
        ValidateBeforeStepStrategy(check_outputs=False).training_step(
            nn.Identity(), None, torch.ones(1, 1), NAN, functional.mse_loss, context
        )


def test_disabled_checks_report_nothing(context: TrainingContext) -> None:
    step = ValidateBeforeStepStrategy(check_inputs=False, check_outputs=False, raise_on_error=True)
    assert step.training_step(nn.Identity(), None, NAN, NAN, functional.mse_loss, context).isnan()


def test_the_validating_step_leaves_an_overflow_of_fp16_to_the_scaler(context: TrainingContext) -> None:
    step = ValidateBeforeStepStrategy(raise_on_error=True, base_strategy=MixedPrecisionStepStrategy(precision="fp16"))
    step.setup(context)
    weight = torch.zeros(1, requires_grad=True)
    weight.grad = torch.tensor([torch.inf])
    step.on_gradients(torch.optim.SGD([weight]), context)
    assert weight.grad.isinf().all()


# Nesting


@pytest.mark.parametrize("outer", every_wrapper(), ids=lambda step: type(step).__name__)
def test_every_step_strategy_passes_hooks_and_state_to_the_inner_one(
    outer: NestingStepStrategy, context: TrainingContext
) -> None:
    inner = Receiver()
    outer.base_strategy = inner
    outer.setup(context)
    outer.on_train_start(context)
    outer.on_epoch_start(context)
    outer.on_gradients(torch.optim.SGD([torch.zeros(1)]), context)
    outer.on_epoch_end(context)
    outer.on_train_end(context)
    outer.teardown(context)
    kept = outer.state_dict()
    inner.heard = []
    outer.load_state_dict(kept)
    assert inner.heard == [
        "setup",
        "on_train_start",
        "on_epoch_start",
        "on_gradients",
        "on_epoch_end",
        "on_train_end",
        "teardown",
    ]


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))), ids=str)
def test_accumulation_precision_clipping_and_passes_nest_in_any_order(order: tuple[int, ...], problem: Problem) -> None:
    steps: list[NestingStepStrategy] = [
        GradientAccumulationStepStrategy(3),
        MixedPrecisionStepStrategy(precision="bf16"),
        GradientClippingStepStrategy(max_norm=0.05),
        MultipleForwardPassStepStrategy(2),
    ]
    model, by_hand = problem.model(), problem.model()
    trainer = ComposableTrainer(
        model,
        verbose=False,
        optimizer_strategy=SGD,
        training_step_strategy=compose_steps(*(steps[place] for place in order)),
    )
    trainer.fit(problem.batches[:6], max_length=Epochs(1))
    optimizer = torch.optim.SGD(by_hand.parameters(), lr=0.1)
    for number, (x, y) in enumerate(problem.batches[:6], start=1):
        losses = []
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                losses.append(functional.cross_entropy(by_hand(x), y))
        (torch.stack(losses).mean() / 3).backward()
        if number % 3 == 0:
            nn.utils.clip_grad_norm_(by_hand.parameters(), 0.05)
            optimizer.step()
            optimizer.zero_grad()
    for one, other in zip(model.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


def test_a_custom_step_is_innermost_and_keeps_its_optimizer_step(
    problem: Problem, train: Callable[..., ComposableTrainer]
) -> None:
    class Whole(TrainingStepStrategy):
        def training_step(
            self,
            model: nn.Module,
            optimizer: Optimizer,
            examples: Any,
            labels: Any,
            loss_criterion: Callable[..., torch.Tensor],
            context: TrainingContext,
        ) -> torch.Tensor:
            loss = loss_criterion(model(examples), labels)
            context.backward(loss)
            context.step(optimizer)
            return loss

    trainer = train(
        problem.model(),
        problem.batches[:10],
        training_step_strategy=compose_steps(GradientAccumulationStepStrategy(4), Whole()),
    )
    assert trainer.context.progress.updates == 3


def test_a_step_that_cannot_wrap_another_is_rejected_unless_it_is_last() -> None:
    class Whole(TrainingStepStrategy):
        def training_step(
            self,
            model: nn.Module,
            optimizer: Optimizer,
            examples: Any,
            labels: Any,
            loss_criterion: Callable[..., torch.Tensor],
            context: TrainingContext,
        ) -> torch.Tensor:
            return loss_criterion(model(examples), labels)

    with pytest.raises(ConfigError, match="put it last"):
        compose_steps(Whole(), GradientAccumulationStepStrategy(4))


def test_composing_the_same_steps_again_changes_nothing() -> None:
    outer, inner = GradientAccumulationStepStrategy(4), GradientClippingStepStrategy()
    compose_steps(outer, inner)
    assert compose_steps(outer, inner) is outer
    assert (outer.base_strategy, inner.base_strategy) == (inner, None)


def test_the_default_step_is_innermost_at_any_position() -> None:
    default, outer = DefaultTrainingStepStrategy(create_graph=True), GradientClippingStepStrategy()
    assert compose_steps(default, outer) is outer
    assert outer.base_strategy is default


def test_a_step_strategy_that_contains_itself_is_rejected() -> None:
    inner = GradientClippingStepStrategy()
    with pytest.raises(ConfigError, match="given twice"):
        compose_steps(inner, GradientAccumulationStepStrategy(4, base_strategy=inner))
