"""Contract suites of strategies, one per kind."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dovetail.callbacks import Callback
from dovetail.data import num_batches, split_batch
from dovetail.testing.contract import (
    BATCH_SIZE,
    BATCHES,
    EPOCHS,
    PASSES_BEFORE_FAILURE,
    StrategyContract,
    assert_same,
    preserve_rng,
)
from dovetail.trainers.composable import ComposableTrainer
from dovetail.trainers.context import TrainingContext
from dovetail.trainers.modules import forward
from dovetail.trainers.strategies.base import (
    DataLoaderStrategy,
    LossCriterionStrategy,
    LRSchedulerStrategy,
    ModelUpdateStrategy,
    OptimizerStrategy,
    Strategy,
    TestingStrategy,
    TrainingStepStrategy,
)
from dovetail.trainers.strategies.nesting import Nesting
from dovetail.trainers.strategies.optimizer import SGDOptimizerStrategy


class LossStrategyContract(StrategyContract):
    """Tests of a `LossCriterionStrategy`.

    The gradient is compared in float64, so a loss with its own tensors must convert them to the outputs' type.

    Example:
        >>> from dovetail.trainers.strategies import CrossEntropyLossStrategy
        >>> class TestMyLoss(LossStrategyContract):
        ...     def make(self):
        ...         return CrossEntropyLossStrategy(label_smoothing=0.1)
        >>> TestMyLoss().test_gradient_agrees_with_finite_differences()
    """

    kind = LossCriterionStrategy

    def test_loss_is_one_finite_number(self) -> None:
        """`compute_loss` returns a differentiable tensor without dimensions."""
        loss = self._loss(self.make(), self.make_model(), self.make_data())
        assert isinstance(loss, Tensor), f"compute_loss returned {loss!r}, which is not a tensor"
        assert loss.ndim == 0, f"the loss has the shape {tuple(loss.shape)}; take its mean()"
        assert loss.isfinite(), f"the loss is {loss.item()}"
        assert loss.requires_grad, "the loss does not depend on the parameters: it was detached"

    def test_gradient_agrees_with_finite_differences(self) -> None:
        """Autograd's derivative of the loss agrees with finite differences of the loss."""
        strategy, model, data = self.make(), self.make_model().double(), _as_double(self.make_data())
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        generator = torch.Generator().manual_seed(1)
        directions = [torch.randn(it.shape, dtype=it.dtype, generator=generator) for it in parameters]
        gradients = torch.autograd.grad(self._loss(strategy, model, data), parameters, allow_unused=True)
        slope = sum(float((it * by).sum()) for it, by in zip(gradients, directions, strict=True) if it is not None)
        distance = 1e-5
        values = []
        for sign in (1, -1):
            moved = copy.deepcopy(model)
            with torch.no_grad():
                for parameter, by in zip(_trainable(moved), directions, strict=True):
                    parameter.add_(by, alpha=sign * distance)
            values.append(float(self._loss(strategy, moved, data).detach()))
        measured = (values[0] - values[1]) / (2 * distance)
        assert math.isclose(slope, measured, rel_tol=1e-5, abs_tol=1e-7), (
            f"the gradient is {slope:.9g}, but finite differences give {measured:.9g}"
        )

    def test_loss_leaves_the_batch_alone(self) -> None:
        """`compute_loss` does not change outputs and labels."""
        data = self.make_data()
        context = self._context(self.make_model())
        strategy = self._start(context)
        examples, labels = split_batch(data)
        outputs = forward(context.model, examples)
        before = copy.deepcopy((_detached(outputs), labels))
        strategy.compute_loss(outputs, labels, context)
        assert_same((_detached(outputs), labels), before, "outputs and labels after compute_loss")

    def _start(self, context: TrainingContext, strategy: Any = None) -> Any:
        strategy = self.make() if strategy is None else strategy
        strategy.setup(context)
        strategy.on_train_start(context)
        return strategy

    def _loss(self, strategy: Any, model: nn.Module, data: Any) -> Tensor:
        context = self._context(model)
        examples, labels = split_batch(data)
        loss: Tensor = self._start(context, strategy).compute_loss(forward(model, examples), labels, context)
        return loss


class OptimizerStrategyContract(StrategyContract):
    """Tests of an `OptimizerStrategy`.

    Example:
        >>> from dovetail.trainers.strategies import AdamOptimizerStrategy
        >>> class TestMyOptimizer(OptimizerStrategyContract):
        ...     def make(self):
        ...         return AdamOptimizerStrategy(lr=0.01)
        >>> TestMyOptimizer().test_optimizer_has_every_trainable_parameter_once()
    """

    kind = OptimizerStrategy

    def test_optimizer_has_every_trainable_parameter_once(self) -> None:
        """The optimizer has every trainable parameter of the model exactly once, and no others."""
        model = self.make_model()
        next(model.parameters()).requires_grad_(False)
        optimizer = self.make().create_optimizer(model, self._context(model))
        given = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        assert len(given) == len(set(given)), "a parameter is in the optimizer twice"
        assert set(given) <= set(names), "the optimizer has a parameter that is not in the model"
        missing = [names[id(parameter)] for parameter in _trainable(model) if id(parameter) not in given]
        assert not missing, f"the optimizer does not have {', '.join(missing)}"

    def test_frozen_parameters_stay(self) -> None:
        """A parameter without a gradient does not change."""
        model = self.make_model()
        frozen = next(model.parameters()).requires_grad_(False)
        before = frozen.clone()
        self._fit(self._trainer(self.make(), model), EPOCHS)
        assert_same(frozen, before, "a frozen parameter")

    def test_on_optimizer_step_follows_every_real_step(self) -> None:
        """Under accumulation the optimizer steps once per window, and the hook is called once per step."""
        watched = _WatchedOptimizer(self.make())
        trainer = self._trained(watched, accumulation_steps=2)
        windows = EPOCHS * math.ceil(BATCHES / 2)
        counts = (watched.steps, watched.hook_calls, trainer.context.progress.updates)
        assert counts == (windows,) * 3, (
            f"{windows} windows: expected as many steps, calls of on_optimizer_step and updates, got {counts}"
        )


class TrainingStepStrategyContract(StrategyContract):
    """Tests of a `TrainingStepStrategy`.

    Attributes:
        changes_gradients: Whether its gradients differ on purpose from a plain backward pass over the batches of a
            window, for example because they are clipped or rounded.

    Example:
        >>> from dovetail.trainers.strategies import GradientAccumulationStepStrategy
        >>> class TestMyStep(TrainingStepStrategyContract):
        ...     def make(self):
        ...         return GradientAccumulationStepStrategy(accumulation_steps=2)
        >>> TestMyStep().test_gradients_are_those_of_a_plain_backward()
    """

    kind = TrainingStepStrategy
    changes_gradients: ClassVar[bool] = False

    def test_gradients_are_those_of_a_plain_backward(self) -> None:
        """Every update gets the gradient of its window's batches as one, unless `changes_gradients` is set."""
        gradients = _Gradients(compares=not self.changes_gradients)
        trainer = self._trainer(self.make())
        trainer.context.callbacks.add(gradients)
        self._fit(trainer, EPOCHS)
        assert gradients.seen, "no update went through context.step, so clipping and scaling would miss it"

    def test_updates_are_real_steps(self) -> None:
        """The trainer's counter of updates equals the number of optimizer steps."""
        watched = _WatchedOptimizer(SGDOptimizerStrategy(lr=0.1))
        trainer = self._trained(self.make(), optimizer_strategy=watched)
        assert watched.steps == trainer.context.progress.updates > 0, (
            f"the optimizer made {watched.steps} steps, but the trainer counted {trainer.context.progress.updates}"
        )

    def test_accumulation_is_inherited(self) -> None:
        """Inside of an accumulation window of the trainer the step does not step the optimizer."""
        strategy, context = self.make(), self._context(self.make_model())
        strategy.setup(context)
        size = context.run.window.size
        strategy.teardown(context)
        # A step that accumulates itself rejects windows of another size.
        size = 3 if size == 1 else size
        watched = _WatchedOptimizer(SGDOptimizerStrategy(lr=0.1))
        self._trained(self.make(), accumulation_steps=size, optimizer_strategy=watched)
        expected = EPOCHS * math.ceil(BATCHES / size)
        assert watched.steps == expected, f"windows of {size} make {expected} updates, got {watched.steps}"


class LRSchedulerStrategyContract(StrategyContract):
    """Tests of an `LRSchedulerStrategy`.

    Example:
        >>> from dovetail.trainers.strategies import StepLRSchedulerStrategy
        >>> class TestMySchedule(LRSchedulerStrategyContract):
        ...     def make(self):
        ...         return StepLRSchedulerStrategy(step_size=3)
        >>> TestMySchedule().test_state_continues_exactly()
    """

    kind = LRSchedulerStrategy

    def test_interval_and_frequency_are_known(self) -> None:
        """The strategy has a valid interval and frequency."""
        strategy = self.make()
        strategy.create_scheduler(_optimizer(), self._context(self.make_model()))
        assert strategy.interval in ("epoch", "update", "batch"), f"interval is {strategy.interval!r}"
        assert strategy.frequency >= 1, f"frequency is {strategy.frequency!r}"

    def test_rates_are_finite_and_not_negative(self) -> None:
        """Twelve steps of the scheduler give valid learning rates."""
        rates = _Walk(self.make(), self._context(self.make_model())).rates(12)
        assert all(math.isfinite(rate) and rate >= 0 for group in rates for rate in group), f"the rates are {rates}"

    def test_state_continues_exactly(self) -> None:
        """A new scheduler with the restored state gives the same rates as the old one."""
        whole = _Walk(self.make(), self._context(self.make_model()))
        whole.rates(5)
        state = copy.deepcopy(whole.state_dict())
        expected = whole.rates(7)
        resumed = _Walk(self.make(), self._context(self.make_model()))
        resumed.load_state_dict(state)
        assert_same(resumed.rates(7), expected, "the rates after a round trip of the state")


class ModelUpdateStrategyContract(StrategyContract):
    """Tests of a `ModelUpdateStrategy`.

    Example:
        >>> from dovetail.trainers.strategies import StateTrackingUpdateStrategy
        >>> class TestMyUpdate(ModelUpdateStrategyContract):
        ...     def make(self):
        ...         return StateTrackingUpdateStrategy()
        >>> TestMyUpdate().test_payload_is_a_copy()
    """

    kind = ModelUpdateStrategy

    def test_payload_is_a_copy(self) -> None:
        """Further training does not change a payload that was returned earlier."""
        strategy = self.make()
        trainer = self._trainer(strategy)
        self._fit(trainer, 1)
        payload = strategy.get_update_payload(trainer.context)
        assert isinstance(payload, dict), f"get_update_payload returned {payload!r}, which is not a dict"
        before = copy.deepcopy(payload)
        self._fit(trainer, EPOCHS)
        assert_same(payload, before, "the payload after further training")

    def test_payload_leaves_the_weights_their_name(self) -> None:
        """The payload does not use the key `model_update`, which is reserved for the weights."""
        strategy = self.make()
        trainer = self._trained(strategy)
        assert "model_update" not in strategy.get_update_payload(trainer.context), "the payload hides the weights"

    def _outcome(self, trainer: ComposableTrainer, part: Any) -> dict[str, Any]:
        return {**super()._outcome(trainer, part), "payload": part.get_update_payload(trainer.context)}


class DataLoaderStrategyContract(StrategyContract):
    """Tests of a `DataLoaderStrategy`.

    Attributes:
        changes_samples: Whether the strategy drops, repeats or changes samples on purpose.

    Example:
        >>> from dovetail.trainers.strategies import ShuffleDataLoaderStrategy
        >>> class TestMyLoader(DataLoaderStrategyContract):
        ...     def make(self):
        ...         return ShuffleDataLoaderStrategy()
        >>> TestMyLoader().test_every_sample_comes_once()
    """

    kind = DataLoaderStrategy
    changes_samples: ClassVar[bool] = False

    def test_every_sample_comes_once(self) -> None:
        """An epoch contains every sample once, in any order, unless `changes_samples` is set."""
        batches = self._batches(None)
        assert batches, "the loader is empty"
        if not self.changes_samples:
            assert_same(_rows(batches), _rows([self.make_data()]), "the samples of an epoch")

    def test_a_sampler_chooses_the_samples(self) -> None:
        """If the sampler is a list of indices, an epoch contains exactly these samples."""
        chosen = [0, 3, 5, 6, 7, 11, 13]
        batches = self._batches(chosen)
        assert batches, "the loader is empty"
        if not self.changes_samples:
            assert_same(_rows(batches), _rows([_picked(self.make_data(), chosen)]), "the samples of a sampler")

    def test_length_is_true(self) -> None:
        """The length of a loader is its number of batches; accumulation uses it to close the last window."""
        loader = self.make().create_train_loader(self.make_data(), None, BATCH_SIZE, self._context(self.make_model()))
        length = num_batches(loader)
        assert length in (None, actual := len(list(loader))), f"the loader's length is {length}, but it has {actual}"

    def test_order_follows_the_seed(self) -> None:
        """Two loaders with the same `order_seed` give the same batches."""
        assert_same(self._batches(None), self._batches(None), "the batches of one seed")

    def _batches(self, sampler: Sequence[int] | None) -> list[Any]:
        context = self._context(self.make_model())
        strategy = self.make()
        strategy.setup(context)
        return list(strategy.create_train_loader(self.make_data(), sampler, BATCH_SIZE, context))


class TestingStrategyContract(StrategyContract):
    """Tests of a `TestingStrategy`.

    Example:
        >>> from dovetail.trainers.strategies import DefaultTestingStrategy
        >>> class TestMyTesting(TestingStrategyContract):
        ...     def make(self):
        ...         return DefaultTestingStrategy()
        >>> TestMyTesting().test_result_is_one_finite_number()
    """

    __test__ = False
    kind = TestingStrategy

    def test_result_is_one_finite_number(self) -> None:
        """`test_model` returns a number, and the same number when it is called again."""
        trainer = self._trained(self.make())
        result = self._judge(trainer)
        assert isinstance(result, (int, float)), f"test_model returned {result!r}, which is not a number"
        assert math.isfinite(result), f"the result is {result}"
        assert_same(self._judge(trainer), result, "a second test")

    def test_testing_leaves_the_model_alone(self) -> None:
        """Testing does not change weights, modes and gradients."""
        trainer = self._trained(self.make())
        model = trainer.model.train()
        before = copy.deepcopy(model.state_dict())
        trainer.test(self.make_data())
        assert_same(model.state_dict(), before, "the weights after a test")
        assert all(module.training for module in model.modules()), "a module was left in evaluation mode"

    def test_a_sampler_chooses_the_samples(self) -> None:
        """A test with a sampler gives the same result as a test on a dataset of these samples."""
        chosen = [0, 3, 5, 6, 7, 11, 13]
        trainer = self._trained(self.make())
        expected = trainer.test(_picked(self.make_data(), chosen))
        assert_same(trainer.test(self.make_data(), sampler=chosen), expected, "the result for a sampler")

    def _judge(self, trainer: ComposableTrainer) -> float:
        strategy, model = trainer.strategies.testing, trainer.model.eval()
        assert strategy is not None
        with torch.no_grad():
            return strategy.test_model(model, {"batch_size": 5}, self.make_data(), None, trainer.context)

    def _outcome(self, trainer: ComposableTrainer, part: Any) -> dict[str, Any]:
        return {**super()._outcome(trainer, part), "result": trainer.test(self.make_data())}

    def _provoke(self, trainer: ComposableTrainer) -> None:
        for _ in range(PASSES_BEFORE_FAILURE + 1):
            trainer.test(self.make_data())


class _Gradients(Callback):
    """Compares the gradient at each update with the gradient of the window's batches as one."""

    def __init__(self, compares: bool) -> None:
        self._compares = compares
        self._batches: list[Any] = []
        self.seen = 0

    def on_step_start(self, context: TrainingContext, batch: Any) -> None:
        self._batches.append(batch)

    def on_gradients(self, context: TrainingContext, optimizer: Optimizer) -> None:
        if optimizer not in context.optimizers:
            # An additional optimizer of a strategy for its own parameters.
            return
        self.seen += 1
        batches, self._batches = self._batches, []
        trainer, model = context.run.trainer, copy.deepcopy(context.model)
        assert isinstance(trainer, ComposableTrainer)
        assert model is not None
        model.zero_grad()
        examples, labels = split_batch(_joined(batches))
        with preserve_rng(), torch.enable_grad():
            trainer.criterion(forward(model, examples), labels).backward()
        for (name, expected), actual in zip(model.named_parameters(), trainer.model.parameters(), strict=True):
            if actual.grad is None or expected.grad is None or not self._compares:
                assert actual.grad is None or actual.grad.isfinite().all(), f"the gradient of {name} is not finite"
                continue
            assert torch.allclose(actual.grad, expected.grad, rtol=1e-4, atol=1e-6), (
                f"the gradient of {name} differs from a plain backward; if this is intended, set changes_gradients"
            )


@dataclass(eq=False, repr=False)
class _WatchedOptimizer(Nesting, OptimizerStrategy):
    """Wraps an optimizer strategy and counts the real steps of its optimizer."""

    base_strategy: OptimizerStrategy
    steps: int = field(default=0, init=False)
    hook_calls: int = field(default=0, init=False)

    @property
    def parts(self) -> Sequence[Strategy]:
        return (self.base_strategy,)

    def create_optimizer(self, model: nn.Module, context: TrainingContext) -> Optimizer:
        optimizer = self.base_strategy.create_optimizer(model, context)
        optimizer.register_step_post_hook(self._count)
        return optimizer

    def on_optimizer_step(self, optimizer: Optimizer, context: TrainingContext) -> None:
        self.hook_calls += 1
        self.base_strategy.on_optimizer_step(optimizer, context)

    def _count(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.steps += 1


class _Walk:
    """Runs a scheduler without a trainer: every interval is one update, and the validation metrics are constant."""

    def __init__(self, strategy: Any, context: TrainingContext) -> None:
        self.strategy, self.context, self.optimizer = strategy, context, _optimizer()
        strategy.setup(context)
        self.scheduler = strategy.create_scheduler(self.optimizer, context)

    def rates(self, steps: int) -> list[list[float]]:
        """Make a number of steps, and return the rates of all groups after every step."""
        found = []
        context, progress = self.context, self.context.progress
        for _ in range(steps):
            self.optimizer.step()
            progress.updates, progress.batches, progress.epoch = [progress.updates + 1] * 3
            context.state["last_loss"] = torch.tensor(1.0)
            context.run.validation = {"valid_loss": 1.0, "valid_accuracy": 0.5}
            context.run.validated_at = progress.batches
            if self.scheduler is not None:
                self.strategy.step(self.scheduler, context)
            self.strategy.on_epoch_end(context)
            found.append([float(group["lr"]) for group in self.optimizer.param_groups])
        return found

    def state_dict(self) -> dict[str, Any]:
        return {
            "optimizer": self.optimizer.state_dict(),
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "strategy": self.strategy.state_dict(),
            "progress": self.context.progress.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        self.strategy.load_state_dict(state["strategy"])
        self.context.progress.load_state_dict(state["progress"])


def _optimizer() -> Optimizer:
    groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": rate} for rate in (0.1, 0.02)]
    return torch.optim.SGD(groups, lr=0.1)


def _trainable(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _as_double(data: Any) -> Any:
    if isinstance(data, Tensor):
        return data.double() if data.is_floating_point() else data
    return type(data)(_as_double(it) for it in data)


def _detached(outputs: Any) -> Any:
    return outputs.detach() if isinstance(outputs, Tensor) else outputs


def _picked(data: Any, chosen: Sequence[int]) -> Any:
    return data[list(chosen)] if isinstance(data, Tensor) else tuple(it[list(chosen)] for it in data)


def _joined(batches: Sequence[Any]) -> Any:
    if isinstance(batches[0], Tensor):
        return torch.cat(list(batches))
    return tuple(_joined(column) for column in zip(*batches, strict=True))


def _rows(batches: Sequence[Any]) -> list[Any]:
    """Return the samples of batches, in an order that does not depend on the order of the batches."""
    joined = _joined(batches)
    columns = [joined] if isinstance(joined, Tensor) else joined
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return sorted(map(repr, rows))
