"""Contract suites: what every strategy, callback, searcher, algorithm and backend must do, as tests for your own.

Subclass the contract of a kind in a test file, and say how yours is made:

    from dovetail.testing import LossStrategyContract

    class TestFocalLoss(LossStrategyContract):
        def make(self):
            return FocalLossStrategy(gamma=2.0)

pytest collects the subclass and runs every test of the contract. The problem is a tiny classifier; a strategy that
needs another one overrides `make_model`, `make_data` or `make_options`. The contracts of searchers, of
backends and of algorithms are modules of their own: `dovetail.search.contract`, `dovetail.federated.backends.contract`
and `dovetail.servers.contract`. Nothing here imports
pytest.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dovetail.callbacks import Callback, TrainerCallback
from dovetail.data import num_batches, split_batch
from dovetail.federated.backends.contract import BackendContract
from dovetail.search.contract import SearcherContract
from dovetail.servers.contract import AlgorithmContract
from dovetail.trainers.composable import ComposableTrainer
from dovetail.trainers.context import TrainingContext
from dovetail.trainers.pieces import forward
from dovetail.trainers.randomness import rng_state, seed_everything, set_rng_state
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
from dovetail.units import Batches, Epochs

__all__ = [
    "AlgorithmContract",
    "BackendContract",
    "CallbackContract",
    "DataLoaderStrategyContract",
    "LRSchedulerStrategyContract",
    "LossStrategyContract",
    "ModelUpdateStrategyContract",
    "OptimizerStrategyContract",
    "SearcherContract",
    "TestingStrategyContract",
    "TrainingStepStrategyContract",
]

_SAMPLES = 18
_BATCH_SIZE = 4
_BATCHES = math.ceil(_SAMPLES / _BATCH_SIZE)
_EPOCHS = 2
_PASSES_BEFORE_FAILURE = 2


class _Contract:
    """What strategies and callbacks have in common: they train, again and alike, and leave others alone."""

    # Not tests themselves, whatever their names; `__init_subclass__` makes tests of those that say how to `make`.
    __test__: ClassVar[bool] = False
    kind: ClassVar[type[Any] | tuple[type[Any], ...]] = object
    # Whether the trainer can validate on the data: False for data without labels.
    validates: ClassVar[bool] = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__test__" not in vars(cls):
            cls.__test__ = cls.make is not _Contract.make

    # ------------------------------------------------------------------ what a subclass says

    def make(self) -> Any:
        """Return a new object to test, every time with the same settings."""
        raise NotImplementedError(f"{type(self).__name__}.make: return the object to test")

    def make_model(self) -> nn.Module:
        """Return a new model, every time with the same weights; by default a classifier of 4 numbers in 3 classes."""
        with _randomness_kept():
            seed_everything(0)
            return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))

    def make_data(self) -> Any:
        """Return 18 samples, as `fit` takes them; by default of the classifier."""
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(_SAMPLES, 4, generator=generator)
        return x, x[:, :3].argmax(dim=1)

    def make_options(self) -> dict[str, Any]:
        """Return further arguments of the `ComposableTrainer`, such as the loss that goes with your data."""
        return {}

    # ------------------------------------------------------------------ tests

    def test_is_of_its_kind(self) -> None:
        """`make` returns a new object of the kind."""
        one, other = self.make(), self.make()
        assert isinstance(one, self.kind), f"make() returned {one!r}, which is no {self.kind}"
        assert one is not other, "make() returned the same object twice"

    def test_trains_two_epochs(self) -> None:
        """Two epochs inside a trainer end, with numbers that are finite."""
        trainer = self._trained(self.make())
        planned = max(_EPOCHS, sum(phase.epochs for phase in trainer.context.phases))
        assert trainer.context.progress.epoch == planned, f"training ended after {trainer.context.progress}"
        assert all(map(math.isfinite, trainer.history.losses)), f"a loss is not finite: {trainer.history.losses}"
        assert all(value.isfinite().all() for value in trainer.model.state_dict().values()), "a weight is not finite"

    def test_training_is_reproducible(self) -> None:
        """The same seed gives the same weights, bit for bit."""
        one, other = self.make(), self.make()
        _assert_same(
            self._outcome(self._trained(one), one), self._outcome(self._trained(other), other), "two runs of one seed"
        )

    def test_training_resumes_bit_for_bit(self) -> None:
        """A new trainer that goes on from any checkpoint ends where the uninterrupted one did."""
        with TemporaryDirectory() as folder:
            part, saved = self.make(), _Saved()
            whole = self._trainer(part, checkpoint_dir=folder, save_hist=False, save_every=0)
            whole.callbacks.add(saved)
            self._fit(whole, _EPOCHS, checkpoint_period=Batches(3))
            expected = {**self._outcome(whole, part), **self._kept(part)}
            assert len(saved.paths) > 1, "no checkpoint was written before the end"
            for path in saved.paths:
                part = self.make()
                resumed = self._trainer(part)
                self._fit(resumed, _EPOCHS, resume=path)
                _assert_same(
                    {**self._outcome(resumed, part), **self._kept(part)}, expected, f"resumed from {path.name}"
                )

    def test_state_survives_a_round_trip(self) -> None:
        """What `state_dict` gave after training is what it gives after `load_state_dict`."""
        part, other = self.make(), self.make()
        trainer, reader = self._trained(part), self._trainer(other)
        state = copy.deepcopy(_state_of(part))
        if state:
            other.load_state_dict(copy.deepcopy(state))
        _assert_same(_state_of(other), state, "the state after a round trip")
        trainer.close()
        reader.close()

    def test_two_trainers_share_nothing(self) -> None:
        """A second trainer with an object of its own, in turns with the first, changes nothing for it."""
        outcomes = []
        for is_disturbed in (False, True):
            part = self.make()
            trainer = self._trainer(part)
            second = self._trainer(self.make(), _shifted(self.make_model()))
            self._fit(trainer, 1)
            if is_disturbed:
                with _randomness_kept():
                    self._fit(second, 1)
            self._fit(trainer, _EPOCHS)
            outcomes.append(self._outcome(trainer, part))
        _assert_same(outcomes[1], outcomes[0], "training in turns with another trainer")

    def test_errors_keep_their_type(self) -> None:
        """An error inside the model reaches the caller as it is, and the trainer can be closed after it."""
        trainer = self._trainer(self.make(), _failing(self.make_model()))
        caught: Exception | None = None
        try:
            self._provoke(trainer)
        except Exception as error:
            caught = error
        assert type(caught) is _ProvokedError, f"the model's error came out as {caught!r}"
        trainer.close()

    # ------------------------------------------------------------------ private

    def _arguments(self, part: Any) -> dict[str, Any]:
        raise NotImplementedError

    def _trainer(self, part: Any, model: nn.Module | None = None, **options: Any) -> ComposableTrainer:
        arguments = {
            "optimizer_strategy": SGDOptimizerStrategy(lr=0.1, momentum=0.9),
            **self.make_options(),
            **self._arguments(part),
            **options,
        }
        model = self.make_model() if model is None else model
        return ComposableTrainer(model, device="cpu", seed=0, batch_size=_BATCH_SIZE, verbose=False, **arguments)

    def _fit(self, trainer: ComposableTrainer, epochs: int, **wishes: Any) -> None:
        data = self.make_data()
        trainer.fit(data, data if self.validates else None, max_length=Epochs(epochs), **wishes)

    def _trained(self, part: Any, **options: Any) -> ComposableTrainer:
        trainer = self._trainer(part, **options)
        self._fit(trainer, _EPOCHS)
        return trainer

    def _outcome(self, trainer: ComposableTrainer, part: Any) -> dict[str, Any]:
        """What two runs are compared by."""
        return {
            "weights": trainer.model.state_dict(),
            "losses": list(trainer.history.losses),
            "optimizers": [optimizer.state_dict() for optimizer in trainer.context.optimizers],
            "progress": trainer.context.progress.state_dict(),
        }

    def _kept(self, part: Any) -> dict[str, Any]:
        """What besides must be the same after a run that was resumed."""
        return {}

    def _provoke(self, trainer: ComposableTrainer) -> None:
        self._fit(trainer, _EPOCHS)


class _StrategyContract(_Contract):
    """What all kinds of strategy have in common."""

    def test_setup_and_teardown_can_be_repeated(self) -> None:
        """A strategy that was set up and torn down serves the next trainer as a new one does."""
        used, fresh = self.make(), self.make()
        for _ in range(2):
            context = self._context(self.make_model())
            used.setup(context)
            used.teardown(context)
        with self._trainer(used) as one, self._trainer(fresh) as other:
            self._fit(one, _EPOCHS)
            self._fit(other, _EPOCHS)
            _assert_same(self._outcome(one, used), self._outcome(other, fresh), "a strategy after setup and teardown")

    def _arguments(self, part: Any) -> dict[str, Any]:
        return {f"{part.role}_strategy": part}

    def _kept(self, part: Any) -> dict[str, Any]:
        return {"state": copy.deepcopy(part.state_dict())}

    def _context(self, model: nn.Module) -> TrainingContext:
        context = TrainingContext(model)
        context.config = {"epochs": _EPOCHS, "batch_size": _BATCH_SIZE}
        context.state["order_seed"] = 0
        return context


class LossStrategyContract(_StrategyContract):
    """Tests of a `LossCriterionStrategy`.

    The gradient is compared in float64: a loss with tensors of its own takes them to the outputs' type.

    Example:
        >>> from dovetail.trainers.strategies import CrossEntropyLossStrategy
        >>> class TestMyLoss(LossStrategyContract):
        ...     def make(self):
        ...         return CrossEntropyLossStrategy(label_smoothing=0.1)
        >>> TestMyLoss().test_gradient_agrees_with_finite_differences()
    """

    kind = LossCriterionStrategy

    def test_loss_is_one_finite_number(self) -> None:
        """`compute_loss` returns a tensor without dimensions that can be differentiated."""
        loss = self._loss(self.make(), self.make_model(), self.make_data())
        assert isinstance(loss, Tensor), f"compute_loss returned {loss!r}, which is no tensor"
        assert loss.ndim == 0, f"the loss has the shape {tuple(loss.shape)}; take its mean()"
        assert loss.isfinite(), f"the loss is {loss.item()}"
        assert loss.requires_grad, "the loss does not depend on the parameters: it was detached"

    def test_gradient_agrees_with_finite_differences(self) -> None:
        """Autograd's derivative of the loss is the one that the loss itself shows."""
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
        difference = (values[0] - values[1]) / (2 * distance)
        assert math.isclose(slope, difference, rel_tol=1e-5, abs_tol=1e-7), (
            f"the gradient says {slope:.9g}, finite differences say {difference:.9g}"
        )

    def test_loss_leaves_the_batch_alone(self) -> None:
        """Outputs and labels are what they were after the loss was computed."""
        data = self.make_data()
        context = self._context(self.make_model())
        strategy = self._begun(context)
        examples, labels = split_batch(data)
        outputs = forward(context.model, examples)
        before = copy.deepcopy((_detached(outputs), labels))
        strategy.compute_loss(outputs, labels, context)
        _assert_same((_detached(outputs), labels), before, "outputs and labels after compute_loss")

    def _begun(self, context: TrainingContext, strategy: Any = None) -> Any:
        strategy = self.make() if strategy is None else strategy
        strategy.setup(context)
        strategy.on_train_start(context)
        return strategy

    def _loss(self, strategy: Any, model: nn.Module, data: Any) -> Tensor:
        context = self._context(model)
        examples, labels = split_batch(data)
        loss: Tensor = self._begun(context, strategy).compute_loss(forward(model, examples), labels, context)
        return loss


class OptimizerStrategyContract(_StrategyContract):
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
        """No trainable parameter is left out or given twice, and none is of another model."""
        model = self.make_model()
        next(model.parameters()).requires_grad_(False)
        optimizer = self.make().create_optimizer(model, self._context(model))
        given = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        assert len(given) == len(set(given)), "a parameter is in the optimizer twice"
        assert set(given) <= set(names), "the optimizer has a parameter that the model has not"
        missing = [names[id(parameter)] for parameter in _trainable(model) if id(parameter) not in given]
        assert not missing, f"the optimizer does not have {', '.join(missing)}"

    def test_frozen_parameters_stay(self) -> None:
        """A parameter without a gradient is not moved."""
        model = self.make_model()
        frozen = next(model.parameters()).requires_grad_(False)
        before = frozen.clone()
        self._fit(self._trainer(self.make(), model), _EPOCHS)
        _assert_same(frozen, before, "a frozen parameter")

    def test_on_optimizer_step_follows_every_real_step(self) -> None:
        """Under accumulation the optimizer steps, and the hook hears it, once per window."""
        watched = _WatchedOptimizer(self.make())
        trainer = self._trained(watched, accumulation_steps=2)
        windows = _EPOCHS * math.ceil(_BATCHES / 2)
        counts = (watched.steps, watched.heard, trainer.context.progress.updates)
        assert counts == (windows,) * 3, (
            f"{windows} windows: expected as many steps, calls of on_optimizer_step and updates, got {counts}"
        )


class TrainingStepStrategyContract(_StrategyContract):
    """Tests of a `TrainingStepStrategy`.

    Attributes:
        changes_gradients: Whether its gradients are meant to differ from those of a plain backward pass over the
            batches of a window, as clipped or rounded ones do.

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
        """Every update sees the gradient of its window's batches as one, unless the step says otherwise."""
        gradients = _Gradients(compares=not self.changes_gradients)
        trainer = self._trainer(self.make())
        trainer.callbacks.add(gradients)
        self._fit(trainer, _EPOCHS)
        assert gradients.seen, "no update went through context.step, so clipping and scaling would miss it"

    def test_updates_are_real_steps(self) -> None:
        """The trainer counts exactly the steps that the optimizer made."""
        watched = _WatchedOptimizer(SGDOptimizerStrategy(lr=0.1))
        trainer = self._trained(self.make(), optimizer_strategy=watched)
        assert watched.steps == trainer.context.progress.updates > 0, (
            f"the optimizer made {watched.steps} steps, and the trainer knows of {trainer.context.progress.updates}"
        )

    def test_accumulation_is_inherited(self) -> None:
        """Inside a window of the trainer's the step defers the optimizer."""
        strategy, context = self.make(), self._context(self.make_model())
        strategy.setup(context)
        size = context.window.size
        strategy.teardown(context)
        # One that accumulates itself refuses a second window.
        size = 3 if size == 1 else size
        watched = _WatchedOptimizer(SGDOptimizerStrategy(lr=0.1))
        self._trained(self.make(), accumulation_steps=size, optimizer_strategy=watched)
        expected = _EPOCHS * math.ceil(_BATCHES / size)
        assert watched.steps == expected, f"windows of {size} make {expected} updates, got {watched.steps}"


class LRSchedulerStrategyContract(_StrategyContract):
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
        """The trainer knows when to step."""
        strategy = self.make()
        strategy.create_scheduler(_optimizer(), self._context(self.make_model()))
        assert strategy.interval in ("epoch", "update", "batch"), f"interval is {strategy.interval!r}"
        assert strategy.frequency >= 1, f"frequency is {strategy.frequency!r}"

    def test_rates_are_finite_and_not_negative(self) -> None:
        """Twelve steps of the scheduler give rates that an optimizer can use."""
        rates = _Walk(self.make(), self._context(self.make_model())).rates(12)
        assert all(math.isfinite(rate) and rate >= 0 for group in rates for rate in group), f"the rates are {rates}"

    def test_state_continues_exactly(self) -> None:
        """A new scheduler with the old one's state gives the rates that the old one would have given."""
        whole = _Walk(self.make(), self._context(self.make_model()))
        whole.rates(5)
        state = copy.deepcopy(whole.state_dict())
        expected = whole.rates(7)
        resumed = _Walk(self.make(), self._context(self.make_model()))
        resumed.load_state_dict(state)
        _assert_same(resumed.rates(7), expected, "the rates after a round trip of the state")


class ModelUpdateStrategyContract(_StrategyContract):
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
        """What goes to the server does not change when training goes on."""
        strategy = self.make()
        trainer = self._trainer(strategy)
        self._fit(trainer, 1)
        payload = strategy.get_update_payload(trainer.context)
        assert isinstance(payload, dict), f"get_update_payload returned {payload!r}, which is no dict"
        before = copy.deepcopy(payload)
        self._fit(trainer, _EPOCHS)
        _assert_same(payload, before, "the payload after further training")

    def test_payload_leaves_the_weights_their_name(self) -> None:
        """`model_update` is the key of the weights themselves."""
        strategy = self.make()
        trainer = self._trained(strategy)
        assert "model_update" not in strategy.get_update_payload(trainer.context), "the payload hides the weights"

    def _outcome(self, trainer: ComposableTrainer, part: Any) -> dict[str, Any]:
        return {**super()._outcome(trainer, part), "payload": part.get_update_payload(trainer.context)}


class DataLoaderStrategyContract(_StrategyContract):
    """Tests of a `DataLoaderStrategy`.

    Attributes:
        changes_samples: Whether samples are meant to be dropped, repeated or changed on their way into batches.

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
        """An epoch holds all samples, in whatever order, unless the strategy says otherwise."""
        batches = self._batches(None)
        assert batches, "the loader is empty"
        if not self.changes_samples:
            _assert_same(_rows(batches), _rows([self.make_data()]), "the samples of an epoch")

    def test_a_sampler_chooses_the_samples(self) -> None:
        """With indices for a sampler an epoch holds these samples and no others."""
        chosen = [0, 3, 5, 6, 7, 11, 13]
        batches = self._batches(chosen)
        assert batches, "the loader is empty"
        if not self.changes_samples:
            _assert_same(_rows(batches), _rows([_picked(self.make_data(), chosen)]), "the samples of a sampler")

    def test_length_is_true(self) -> None:
        """A loader with a length has that many batches; accumulation closes its last window by it."""
        loader = self.make().create_train_loader(self.make_data(), None, _BATCH_SIZE, self._context(self.make_model()))
        length = num_batches(loader)
        assert length in (None, actual := len(list(loader))), f"the loader says {length} batches and has {actual}"

    def test_order_follows_the_seed(self) -> None:
        """Two loaders of the same `order_seed` give the same batches."""
        _assert_same(self._batches(None), self._batches(None), "the batches of one seed")

    def _batches(self, sampler: Sequence[int] | None) -> list[Any]:
        context = self._context(self.make_model())
        strategy = self.make()
        strategy.setup(context)
        return list(strategy.create_train_loader(self.make_data(), sampler, _BATCH_SIZE, context))


class TestingStrategyContract(_StrategyContract):
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
        """`test_model` returns a number, and the same one when it is asked again."""
        trainer = self._trained(self.make())
        result = self._judge(trainer)
        assert isinstance(result, (int, float)), f"test_model returned {result!r}, which is no number"
        assert math.isfinite(result), f"the result is {result}"
        _assert_same(self._judge(trainer), result, "a second test")

    def test_testing_leaves_the_model_alone(self) -> None:
        """Weights, modes and gradients are what they were."""
        trainer = self._trained(self.make())
        model = trainer.model.train()
        before = copy.deepcopy(model.state_dict())
        trainer.test(self.make_data())
        _assert_same(model.state_dict(), before, "the weights after a test")
        assert all(module.training for module in model.modules()), "a module was left in evaluation mode"

    def test_a_sampler_chooses_the_samples(self) -> None:
        """A test on some samples is the test on a set of these."""
        chosen = [0, 3, 5, 6, 7, 11, 13]
        trainer = self._trained(self.make())
        expected = trainer.test(_picked(self.make_data(), chosen))
        _assert_same(trainer.test(self.make_data(), sampler=chosen), expected, "the result for a sampler")

    def _judge(self, trainer: ComposableTrainer) -> float:
        strategy, model = trainer.strategies.testing, trainer.model.eval()
        assert strategy is not None
        with torch.no_grad():
            return strategy.test_model(model, {"batch_size": 5}, self.make_data(), None, trainer.context)

    def _outcome(self, trainer: ComposableTrainer, part: Any) -> dict[str, Any]:
        return {**super()._outcome(trainer, part), "result": trainer.test(self.make_data())}

    def _provoke(self, trainer: ComposableTrainer) -> None:
        for _ in range(_PASSES_BEFORE_FAILURE + 1):
            trainer.test(self.make_data())


class CallbackContract(_Contract):
    """Tests of a `Callback` or `TrainerCallback`; make one that does not end training within two epochs.

    Attributes:
        changes_training: Whether the weights are meant to differ from those without the callback.

    Example:
        >>> from dovetail.callbacks import LRMonitor
        >>> class TestMyCallback(CallbackContract):
        ...     def make(self):
        ...         return LRMonitor()
        >>> TestMyCallback().test_watching_changes_nothing()
    """

    kind = (Callback, TrainerCallback)
    changes_training: ClassVar[bool] = False

    def test_watching_changes_nothing(self) -> None:
        """Training with the callback is training without it, unless it says otherwise."""
        watched = self._trained(self.make())
        alone = self._trainer(None)
        self._fit(alone, _EPOCHS)
        is_same = _difference(watched.model.state_dict(), alone.model.state_dict(), "the model") is None
        assert is_same or self.changes_training, "training with the callback differs from training without it"

    def test_serves_a_second_run(self) -> None:
        """The same object can watch another run of its trainer."""
        trainer = self._trained(self.make())
        trainer.reset()
        self._fit(trainer, 1)
        assert trainer.context.progress.epoch == 1, f"the second run ended after {trainer.context.progress}"

    def _arguments(self, part: Any) -> dict[str, Any]:
        return {} if part is None else {"callbacks": [part]}


# ---------------------------------------------------------------------- pieces of the tests


class _ProvokedError(Exception):
    """An error that no strategy can know."""


def _failing(model: nn.Module) -> nn.Module:
    """Let a model fail in its third forward pass."""
    calls = []

    def count(module: nn.Module, inputs: Any) -> None:
        calls.append(1)
        if len(calls) > _PASSES_BEFORE_FAILURE:
            raise _ProvokedError

    model.register_forward_pre_hook(count)
    return model


class _Saved(Callback):
    """Notes every checkpoint."""

    def __init__(self) -> None:
        self.paths: list[Path] = []

    def on_checkpoint(self, context: TrainingContext, path: Path) -> None:
        self.paths.append(path)


class _Gradients(Callback):
    """Compares what the optimizer is given with the gradient of the window's batches as one."""

    def __init__(self, compares: bool) -> None:
        self._compares = compares
        self._batches: list[Any] = []
        self.seen = 0

    def on_step_start(self, context: TrainingContext, batch: Any) -> None:
        self._batches.append(batch)

    def on_gradients(self, context: TrainingContext, optimizer: Optimizer) -> None:
        if optimizer not in context.optimizers:
            # One that a strategy has for parameters of its own.
            return
        self.seen += 1
        batches, self._batches = self._batches, []
        trainer, model = context.trainer, copy.deepcopy(context.model)
        assert isinstance(trainer, ComposableTrainer)
        assert model is not None
        model.zero_grad()
        examples, labels = split_batch(_joined(batches))
        with _randomness_kept(), torch.enable_grad():
            trainer.criterion(forward(model, examples), labels).backward()
        for (name, expected), actual in zip(model.named_parameters(), trainer.model.parameters(), strict=True):
            if actual.grad is None or expected.grad is None or not self._compares:
                assert actual.grad is None or actual.grad.isfinite().all(), f"the gradient of {name} is not finite"
                continue
            assert torch.allclose(actual.grad, expected.grad, rtol=1e-4, atol=1e-6), (
                f"the gradient of {name} is not that of a plain backward; if that is meant, set changes_gradients"
            )


@dataclass(eq=False, repr=False)
class _WatchedOptimizer(Nesting, OptimizerStrategy):
    """Another strategy, with its optimizer's real steps counted."""

    base_strategy: OptimizerStrategy
    steps: int = field(default=0, init=False)
    heard: int = field(default=0, init=False)

    @property
    def parts(self) -> Sequence[Strategy]:
        return (self.base_strategy,)

    def create_optimizer(self, model: nn.Module, context: TrainingContext) -> Optimizer:
        optimizer = self.base_strategy.create_optimizer(model, context)
        optimizer.register_step_post_hook(self._count)
        return optimizer

    def on_optimizer_step(self, optimizer: Optimizer, context: TrainingContext) -> None:
        self.heard += 1
        self.base_strategy.on_optimizer_step(optimizer, context)

    def _count(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.steps += 1


class _Walk:
    """A scheduler outside of a trainer, in a run whose every interval is one update and whose metric stands still."""

    def __init__(self, strategy: Any, context: TrainingContext) -> None:
        self.strategy, self.context, self.optimizer = strategy, context, _optimizer()
        strategy.setup(context)
        self.scheduler = strategy.create_scheduler(self.optimizer, context)

    def rates(self, steps: int) -> list[list[float]]:
        """Step, and return the rates of all groups after every step."""
        found = []
        context, progress = self.context, self.context.progress
        for _ in range(steps):
            self.optimizer.step()
            progress.updates, progress.batches, progress.epoch = [progress.updates + 1] * 3
            context.state["last_loss"] = torch.tensor(1.0)
            context.validation = {"valid_loss": 1.0, "valid_accuracy": 0.5}
            context.validated_at = progress.batches
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


@contextmanager
def _randomness_kept() -> Iterator[None]:
    state = rng_state()
    try:
        yield
    finally:
        set_rng_state(state)


def _trainable(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _shifted(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(-0.5).add_(0.1)
    return model


def _state_of(part: Any) -> Any:
    return part.state_dict() if isinstance(part, (Strategy, Callback)) else {}


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
    """The samples of batches, in an order that does not depend on theirs."""
    joined = _joined(batches)
    columns = [joined] if isinstance(joined, Tensor) else joined
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return sorted(map(repr, rows))


def _assert_same(one: Any, other: Any, what: str) -> None:
    difference = _difference(one, other, what)
    assert difference is None, difference


def _difference(one: Any, other: Any, what: str) -> str | None:
    """Return a sentence about the first difference between two nested values, or None if they are equal."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        is_same = one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
        return None if is_same else f"{what}: {one} is not {other}"
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        if set(one) != set(other):
            return f"{what}: the keys {list(one)} are not {list(other)}"
        pairs = [(f"{what}, {key!r}", one[key], other[key]) for key in one]
    elif isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        if len(one) != len(other):
            return f"{what}: {len(one)} values are not {len(other)}"
        pairs = [(f"{what}, {place}", *pair) for place, pair in enumerate(zip(one, other, strict=True))]
    else:
        is_nan = isinstance(one, float) and isinstance(other, float) and math.isnan(one) and math.isnan(other)
        return None if is_nan or one == other else f"{what}: {one!r} is not {other!r}"
    return next((found for where, a, b in pairs if (found := _difference(a, b, where))), None)
