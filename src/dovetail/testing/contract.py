"""Tests that strategies and callbacks share: training, reproducibility, resuming, and isolation of trainers."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from dovetail.callbacks import Callback
from dovetail.trainers.composable import ComposableTrainer
from dovetail.trainers.context import TrainingContext
from dovetail.trainers.randomness import rng_state, seed_everything, set_rng_state
from dovetail.trainers.strategies.base import Strategy
from dovetail.trainers.strategies.optimizer import SGDOptimizerStrategy
from dovetail.units import Batches, Epochs

# Not a multiple of the batch size, so that the last batch of an epoch is smaller than the others.
_SAMPLES = 18
BATCH_SIZE = 4
BATCHES = math.ceil(_SAMPLES / BATCH_SIZE)
EPOCHS = 2
PASSES_BEFORE_FAILURE = 2


class Contract:
    """Base class of contracts: training works, is reproducible and resumable, and two trainers share no state."""

    # Contracts are not tests themselves; `__init_subclass__` sets this to True for subclasses that define `make`.
    __test__: ClassVar[bool] = False
    kind: ClassVar[type[Any] | tuple[type[Any], ...]] = object
    # Whether the trainer can validate on the data: False for data without labels.
    validates: ClassVar[bool] = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # A subclass may set `__test__` itself, for example a base class of several tests.
        if "__test__" not in vars(cls):
            cls.__test__ = cls.make is not Contract.make

    # ------------------------------------------------------------------ methods for subclasses

    def make(self) -> Any:
        """Return a new object to test, with the same settings in every call."""
        raise NotImplementedError(f"{type(self).__name__}.make: return the object to test")

    def make_model(self) -> nn.Module:
        """Return a new model with the same weights in every call; by default a classifier of 4 numbers in 3 classes."""
        # A fixed seed inside, and no effect on the random numbers of the trainer that gets the model.
        with preserve_rng():
            seed_everything(0)
            return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))

    def make_data(self) -> Any:
        """Return 18 samples in a form that `fit` accepts; by default for the classifier."""
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(_SAMPLES, 4, generator=generator)
        return x, x[:, :3].argmax(dim=1)

    def make_options(self) -> dict[str, Any]:
        """Return further arguments of the `ComposableTrainer`, such as the loss for the data."""
        return {}

    # ------------------------------------------------------------------ tests

    def test_is_of_its_kind(self) -> None:
        """`make` returns a new object of the right kind."""
        one, other = self.make(), self.make()
        assert isinstance(one, self.kind), f"make() returned {one!r}, which is not a {self.kind}"
        assert one is not other, "make() returned the same object twice"

    def test_trains_two_epochs(self) -> None:
        """Training for two epochs succeeds, with finite losses and weights."""
        trainer = self._trained(self.make())
        # A strategy such as Ditto adds epochs for a personal model.
        planned = max(EPOCHS, sum(phase.epochs for phase in trainer.context.run.phases))
        assert trainer.context.progress.epoch == planned, f"training ended after {trainer.context.progress}"
        assert all(map(math.isfinite, trainer.history.losses)), f"a loss is not finite: {trainer.history.losses}"
        assert all(value.isfinite().all() for value in trainer.model.state_dict().values()), "a weight is not finite"

    def test_training_is_reproducible(self) -> None:
        """Two runs with the same seed give the same weights, bit for bit."""
        one, other = self.make(), self.make()
        assert_same(
            self._outcome(self._trained(one), one), self._outcome(self._trained(other), other), "two runs of one seed"
        )

    def test_training_resumes_bit_for_bit(self) -> None:
        """A new trainer that resumes from any checkpoint gives the same result as the uninterrupted run."""
        with TemporaryDirectory() as folder:
            part, saved = self.make(), _Saved()
            # Only the checkpoints of `checkpoint_period` are written: every third batch, also in the middle of an
            # epoch.
            whole = self._trainer(part, checkpoint_dir=folder, save_hist=False, save_every=0)
            whole.context.callbacks.add(saved)
            self._fit(whole, EPOCHS, checkpoint_period=Batches(3))
            expected = {**self._outcome(whole, part), **self._resumed_outcome(part)}
            assert len(saved.paths) > 1, "no checkpoint was written before the end"
            # From every checkpoint, because a state may be complete at the end of an epoch and incomplete in its
            # middle.
            for path in saved.paths:
                part = self.make()
                # Everything is new, so that nothing can survive outside of the checkpoint.
                resumed = self._trainer(part)
                self._fit(resumed, EPOCHS, resume=path)
                assert_same(
                    {**self._outcome(resumed, part), **self._resumed_outcome(part)},
                    expected,
                    f"resumed from {path.name}",
                )

    def test_state_survives_a_round_trip(self) -> None:
        """After `load_state_dict`, `state_dict` returns the same state."""
        part, other = self.make(), self.make()
        trainer, reader = self._trained(part), self._trainer(other)
        # Copies on both ways: otherwise a state that shares tensors with the object would be compared with itself.
        state = copy.deepcopy(_state_of(part))
        if state:
            other.load_state_dict(copy.deepcopy(state))
        assert_same(_state_of(other), state, "the state after a round trip")
        trainer.close()
        reader.close()

    def test_two_trainers_share_nothing(self) -> None:
        """A second trainer with another object, run between two runs of the first, does not change the first."""
        outcomes = []
        for is_disturbed in (False, True):
            part = self.make()
            trainer = self._trainer(part)
            # Built in both cases, because building a strategy may draw random numbers.
            second = self._trainer(self.make(), _shifted(self.make_model()))
            # The first trainer is interrupted after one epoch, and continues after the other one has trained.
            self._fit(trainer, 1)
            if is_disturbed:
                with preserve_rng():
                    self._fit(second, 1)
            self._fit(trainer, EPOCHS)
            outcomes.append(self._outcome(trainer, part))
        assert_same(outcomes[1], outcomes[0], "training in turns with another trainer")

    def test_errors_keep_their_type(self) -> None:
        """An error inside of the model reaches the caller unchanged, and the trainer can be closed afterwards."""
        trainer = self._trainer(self.make(), _failing(self.make_model()))
        caught: Exception | None = None
        try:
            self._provoke(trainer)
        except Exception as error:
            caught = error
        assert type(caught) is _ProvokedError, f"expected the model's error, got {caught!r}"
        trainer.close()

    # ------------------------------------------------------------------ private

    def _arguments(self, part: Any) -> dict[str, Any]:
        raise NotImplementedError

    def _trainer(self, part: Any, model: nn.Module | None = None, **options: Any) -> ComposableTrainer:
        arguments = {
            # Momentum makes a lost or doubled update visible in all later weights.
            "optimizer_strategy": SGDOptimizerStrategy(lr=0.1, momentum=0.9),
            **self.make_options(),
            **self._arguments(part),
            **options,
        }
        model = self.make_model() if model is None else model
        return ComposableTrainer(model, device="cpu", seed=0, batch_size=BATCH_SIZE, verbose=False, **arguments)

    def _fit(self, trainer: ComposableTrainer, epochs: int, **options: Any) -> None:
        data = self.make_data()
        trainer.fit(data, data if self.validates else None, max_length=Epochs(epochs), **options)

    def _trained(self, part: Any, **options: Any) -> ComposableTrainer:
        trainer = self._trainer(part, **options)
        self._fit(trainer, EPOCHS)
        return trainer

    def _outcome(self, trainer: ComposableTrainer, part: Any) -> dict[str, Any]:
        """Return the values by which two runs are compared."""
        return {
            "weights": trainer.model.state_dict(),
            "losses": list(trainer.history.losses),
            "optimizers": [optimizer.state_dict() for optimizer in trainer.context.optimizers],
            # The counters of epochs, batches and updates.
            "progress": trainer.context.progress.state_dict(),
        }

    def _resumed_outcome(self, part: Any) -> dict[str, Any]:
        """Return further values that must be the same after a resumed run."""
        return {}

    def _provoke(self, trainer: ComposableTrainer) -> None:
        self._fit(trainer, EPOCHS)


class StrategyContract(Contract):
    """Tests that all kinds of strategies share."""

    def test_setup_and_teardown_can_be_repeated(self) -> None:
        """A strategy that was set up and torn down behaves like a new one in the next trainer."""
        used, fresh = self.make(), self.make()
        for _ in range(2):
            context = self._context(self.make_model())
            used.setup(context)
            used.teardown(context)
        with self._trainer(used) as one, self._trainer(fresh) as other:
            self._fit(one, EPOCHS)
            self._fit(other, EPOCHS)
            assert_same(self._outcome(one, used), self._outcome(other, fresh), "a strategy after setup and teardown")

    def _arguments(self, part: Any) -> dict[str, Any]:
        return {f"{part.role}_strategy": part}

    def _resumed_outcome(self, part: Any) -> dict[str, Any]:
        return {"state": copy.deepcopy(part.state_dict())}

    def _context(self, model: nn.Module) -> TrainingContext:
        context = TrainingContext(model)
        context.config = {"epochs": EPOCHS, "batch_size": BATCH_SIZE}
        # Loaders read the seed of the order from here; a trainer sets it before training.
        context.state["order_seed"] = 0
        return context


@contextmanager
def preserve_rng() -> Iterator[None]:
    """Restore the global random state after the block."""
    state = rng_state()
    try:
        yield
    finally:
        set_rng_state(state)


def assert_same(one: Any, other: Any, what: str) -> None:
    """Fail with the first difference between two nested values, if they differ."""
    found = difference(one, other, what)
    assert found is None, found


def difference(one: Any, other: Any, what: str) -> str | None:
    """Return a sentence about the first difference between two nested values, or None if they are equal."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        # `torch.equal` alone accepts tensors of different types.
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
        # NaN differs from itself, but two runs that both report NaN agree.
        is_nan = isinstance(one, float) and isinstance(other, float) and math.isnan(one) and math.isnan(other)
        return None if is_nan or one == other else f"{what}: {one!r} is not {other!r}"
    return next((found for where, a, b in pairs if (found := difference(a, b, where))), None)


class _ProvokedError(Exception):
    """An error that no strategy handles."""


def _failing(model: nn.Module) -> nn.Module:
    """Make a model fail in its third forward pass, and return it."""
    calls = []

    def count(module: nn.Module, inputs: Any) -> None:
        calls.append(1)
        # Not in the first pass: strategies then already have a state that must be cleaned up.
        if len(calls) > PASSES_BEFORE_FAILURE:
            raise _ProvokedError

    model.register_forward_pre_hook(count)
    return model


class _Saved(Callback):
    """Records the path of every checkpoint."""

    def __init__(self) -> None:
        self.paths: list[Path] = []

    def on_checkpoint(self, context: TrainingContext, path: Path) -> None:
        self.paths.append(path)


def _shifted(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in model.parameters():
            # Other weights than the first trainer's, so that a shared tensor would show.
            parameter.mul_(-0.5).add_(0.1)
    return model


def _state_of(part: Any) -> Any:
    # A `TrainerCallback` has no state.
    return part.state_dict() if isinstance(part, (Strategy, Callback)) else {}
