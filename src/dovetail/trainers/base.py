"""The abstract trainer: a short list of verbs, and the entry points that run the loop over them."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from functools import cache, reduce
from pathlib import Path
from typing import Any, ClassVar, Literal, NoReturn, Protocol, cast, get_args

from torch import Tensor
from torch.optim import Optimizer

from dovetail.data import batch_length
from dovetail.errors import ConfigError, UnknownNameError
from dovetail.history import History
from dovetail.trainers import loop, other_libraries, saving
from dovetail.trainers.context import Plan, Stage, TrainingContext
from dovetail.trainers.metrics import Meter
from dovetail.units import TrainUnit


class Launcher(Protocol):
    """Runs an entry point of a trainer in other processes, and brings what it did back into the caller's objects."""

    def __call__(self, trainer: Trainer, entry: str, arguments: Mapping[str, Any]) -> Any:
        """Return what the entry point, `fit`, `evaluate` or `predict`, returns."""


class Trainer(ABC):
    """What the loop asks of a trainer, in the order in which it asks.

    The loop calls the verbs on the layer that `fit` was called on, so that the outermost decorator always sees
    the call. No verb calls another verb. User code reaches the layers through `self.context`.
    """

    context: TrainingContext

    # Set in the body of a class whose methods, with those that it inherits, are the library's defaults.
    _has_defaults: ClassVar[bool] = True

    @property
    def core(self) -> Trainer:
        """The innermost trainer: this one, unless it decorates another."""
        return self

    def _customized_by(self, name: str) -> tuple[type[Any], ...]:
        """Return the classes that define a verb or seam in place of the library's default; empty for the default.

        The outermost layer comes first. Subclasses, add-ons and layers count, of users and of the library.

        Example:
            >>> from dovetail.trainers import AMPTrainer, Trainer
            >>> class Mine(Trainer):
            ...     def setup(self): ...
            >>> [cls.__name__ for cls in AMPTrainer(Mine())._customized_by("setup")]
            ['MixedPrecision', 'Mine']
        """
        return customizers(type(self), name)

    # Once per run.

    @abstractmethod
    def setup(self) -> None:
        """Place the model and, to train, build optimizers and schedulers. Called before anything else."""

    @abstractmethod
    def plan(self, **requested: TrainUnit | Mapping[str, int] | None) -> Plan:
        """Return what a call of `fit` is to do: the caller's requested, and the trainer's settings for the rest."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave; each layer reads its own key."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return all that training needs to go on exactly; each layer adds its own key."""

    @abstractmethod
    def teardown(self, error: BaseException | None) -> None:
        """Let go of what `setup` took. Always called, with the error that ended the run or None."""

    # Once per pass over the data.

    @abstractmethod
    def batches(self, stage: Stage) -> Iterable[Any]:
        """Return the batches of a stage; for training, from `context.progress.batch` of the running epoch on."""

    @abstractmethod
    def num_batches(self, stage: Stage) -> int | None:
        """Return how many batches a whole pass has, or None where that is not known before its end."""

    @abstractmethod
    def train_epoch(self) -> Mapping[str, float] | None:
        """Run one pass over the training data: the loop's own, unless a subclass brings another."""

    @abstractmethod
    def val_epoch(self) -> Mapping[str, float] | None:
        """Run one validation pass: the loop's own, unless a subclass brings another."""

    @abstractmethod
    def reduce(self, meter: Meter) -> Meter:
        """Return the sums over all ranks; the same meter where there is one."""

    # Once per batch.

    @abstractmethod
    def to_device(self, batch: Any) -> Any:
        """Move a batch to where the model is."""

    @abstractmethod
    def train_step(self, batch: Any) -> Mapping[str, Any]:
        """Return `{"loss": …, …}`: forward and loss, or everything, through the context."""

    @abstractmethod
    def test_step(self, batch: Any) -> Mapping[str, Any]:
        """Return the numbers of one batch of validation or test."""

    @abstractmethod
    def predict_step(self, batch: Any) -> Any:
        """Return the predictions for one batch."""

    @abstractmethod
    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Differentiate the loss."""

    @abstractmethod
    def clip_gradients(self, optimizer: Optimizer) -> None:
        """Clip. Gradients are complete and unscaled after this."""

    @abstractmethod
    def optimizer_step(self, optimizer: Optimizer) -> bool:
        """Step one optimizer and return whether it really stepped."""

    @abstractmethod
    def scheduler_step(self, interval: str, metrics: Mapping[str, float] | None = None) -> None:
        """Advance the schedulers: after every update, and after every epoch with its metrics."""

    @abstractmethod
    def after_step(self, output: Mapping[str, Any]) -> None:
        """End a batch, whether or not it made an update (`context.run.updated`)."""

    # Entry points run the loop on *this* layer: never overridden, never delegated.

    def fit(
        self,
        train_data: Any = None,
        val_data: Any = None,
        *,
        max_length: TrainUnit | Mapping[str, int] | None = None,
        validation_period: TrainUnit | Mapping[str, int] | None = None,
        checkpoint_period: TrainUnit | Mapping[str, int] | None = None,
        resume: str | Path | None = None,
        dry_run: bool = False,
        **unknown: NoReturn,
    ) -> History:
        """Train, and return the history of the run.

        Args:
            train_data: A loader or any iterable of batches, a dataset, a tensor or array, or a tuple `(x, y)` of them;
                None for what the trainer was given before.
            val_data: The same, for validation.
            max_length: The length of training *since the trainer began*, such as `Epochs(10)`; None for its own.
            validation_period: How often to validate; every epoch by default.
            checkpoint_period: How often to write a checkpoint; None for the trainer's own setting.
            resume: `"auto"` goes on from the newest intact checkpoint of the trainer's directory, if there is one;
                a path goes on from that checkpoint.
            dry_run: Only try one update, one validation batch and one checkpoint, say what was found, and put
                everything back; the history is that of the trial.
            unknown: Nothing else is accepted; what other libraries call these arguments is answered with their names.
        """
        for name in unknown:
            raise UnknownNameError("keyword of fit", name, _FIT_KEYWORDS, other_libraries.FIT)
        if dry_run:
            # Imported here because it looks at trainers from outside.
            from dovetail.trainers.dry_run import dry_run as try_out

            return try_out(
                self._run_layer,
                train_data,
                val_data,
                resume=resume,
                max_length=max_length,
                validation_period=validation_period,
                checkpoint_period=checkpoint_period,
            )
        history: History = self._enter(
            "fit",
            train_data=train_data,
            val_data=val_data,
            resume=resume,
            max_length=max_length,
            validation_period=validation_period,
            checkpoint_period=checkpoint_period,
        )
        return history

    def explain(self) -> str:
        """Return, as a tree, what this trainer is made of and what its next epoch will do; nothing changes."""
        from dovetail.trainers.explain import explain

        return explain(self._run_layer)

    def evaluate(self, data: Any = None, stage: Stage = "test") -> dict[str, float]:
        """Return the metrics over `data`, leaving modes, randomness, counters and logs as they were."""
        if not isinstance(stage, str):
            raise ConfigError(
                f"stage: expected 'train', 'valid', 'test' or 'predict', got a {type(stage).__name__}; inputs and "
                "targets are a pair, evaluate((x, y))"
            )
        if stage not in get_args(Stage):
            raise UnknownNameError("stage", stage, get_args(Stage))
        return cast("dict[str, float]", self._enter("evaluate", data=data, stage=stage))

    def predict(self, data: Any = None) -> Any:
        """Return the predictions for `data`, in its order, joined over the batches."""
        return self._enter("predict", data=data)

    def save_checkpoint(self, path: str | Path) -> Path:
        """Write everything that training needs to go on exactly into the directory `path`."""
        return saving.save(self._run_layer, Path(path))

    def load_checkpoint(self, path: str | Path) -> None:
        """Take all state from a checkpoint; the next `fit` goes on from there."""
        saving.load(self._run_layer, Path(path))

    # Seams with an obvious default: one process, the whole run.

    def settle(self) -> None:  # noqa: B027 - nothing to do where there is one process
        """Let every process of the run know what any of them was told, such as to stop. Called between updates."""

    def gather(self, parts: list[Any]) -> list[Any]:
        """Return the parts that all processes made of their batches, in the order of the batches."""
        return parts

    def launcher(self) -> Launcher | None:
        """Return who runs an entry point in other processes, or None to run it in this one."""
        return None

    # Override it, as a method, for batches of another form. The function itself saves a call in every step.
    batch_length = staticmethod(batch_length)

    @classmethod
    def add_on(cls, *add_ons: type[Any]) -> type[Any]:
        """Return this class with add-ons mounted, left to right: the last one is the outermost.

        An add-on is a class written against `super()`, or one with its own `apply(base) -> type`.

        Example:
            >>> from dovetail.trainers import Trainer
            >>> class Loud:
            ...     def after_step(self, output):
            ...         super().after_step(output)
            >>> Trainer.add_on(Loud).__mro__[1:3] == (Loud, Trainer)
            True
        """
        built: type[Any] = cls
        for add_on in add_ons:
            if not isinstance(add_on, type):
                raise ConfigError(f"add_on: expected add-on classes, got {add_on!r}")
            apply = getattr(add_on, "apply", None)
            built = apply(built) if apply is not None else mount(add_on, built)
        return built

    def _enter(self, entry: Literal["fit", "evaluate", "predict"], **arguments: Any) -> Any:
        trainer = self._run_layer
        launch = trainer.launcher()
        return getattr(loop, entry)(trainer, **arguments) if launch is None else launch(trainer, entry, arguments)

    @property
    def _run_layer(self) -> Trainer:
        """The layer of the current run if there is one, else this layer."""
        return self.context.run.trainer or self


_FIT_KEYWORDS = tuple(
    name
    for name, parameter in inspect.signature(Trainer.fit).parameters.items()
    if name != "self" and parameter.kind is not parameter.VAR_KEYWORD
)


@cache
def customizers(kind: type[Trainer], name: str) -> tuple[type[Any], ...]:
    """Return the classes of one layer that define a method in place of the library's default, in order of lookup."""
    defaults = {it for cls in kind.__mro__ if "_has_defaults" in vars(cls) for it in cls.__mro__}
    return tuple(cls for cls in kind.__mro__ if name in vars(cls) and cls not in defaults)


def _mount(add_on: type[Any], base: type[Any]) -> type[Any]:
    """Return a class in which `add_on` answers first and `base` what it passes on; the same one for the same two."""
    names = {"__module__": add_on.__module__, "__parts__": (add_on, base), "__reduce_ex__": _reduced}
    return type(f"{add_on.__name__}{base.__name__}", (add_on, base), names)


mount = cast("Callable[[type[Any], type[Any]], type[Any]]", cache(_mount))


def _reduced(trainer: Any, protocol: Any) -> Any:
    """Pickle an instance of a mounted class, which no module has, as what it is made of."""
    base, add_ons = _taken_apart(type(trainer))
    if not add_ons:
        return object.__reduce_ex__(trainer, protocol)
    return _put_together, (base, *add_ons), trainer.__getstate__()


def _taken_apart(cls: type[Any]) -> tuple[type[Any], tuple[type[Any], ...]]:
    if "__parts__" not in vars(cls):
        return cls, ()
    add_on, base = vars(cls)["__parts__"]
    base, add_ons = _taken_apart(base)
    return base, (*add_ons, add_on)


def _put_together(base: type[Any], *add_ons: type[Any]) -> Any:
    made: Any = reduce(lambda built, add_on: mount(add_on, built), add_ons, base)
    return made.__new__(made)
