"""Abstract trainer: the methods (verbs) that the training loop calls, and the entry points that start the loop."""

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
    """Runs an entry point of a trainer in other processes and copies the results into the caller's objects."""

    def __call__(self, trainer: Trainer, entry: str, arguments: Mapping[str, Any]) -> Any:
        """Run the entry point (`fit`, `evaluate` or `predict`) and return its result."""


class Trainer(ABC):
    """Abstract base of all trainers: the verbs, in the order in which the loop calls them.

    The loop calls the verbs on the layer on which `fit` was called, so that the outermost decorator receives every
    call. No verb calls another verb. User code reaches the layers through `self.context`.
    """

    context: TrainingContext

    # Set in the body of a class if its methods, including the inherited ones, are the library's defaults.
    _has_defaults: ClassVar[bool] = True

    @property
    def core(self) -> Trainer:
        """The innermost trainer: this one, unless it decorates another trainer."""
        return self

    def _customized_by(self, name: str) -> tuple[type[Any], ...]:
        """Return the classes that override the library's default of a verb or another method; empty if none does.

        The outermost layer comes first. Subclasses, add-ons and layers count, both the user's and the library's.

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
        """Move the model to its device and, for training, build optimizers and schedulers. Called first."""

    @abstractmethod
    def plan(self, **requested: TrainUnit | Mapping[str, int] | None) -> Plan:
        """Return the plan of a call of `fit`: the requested lengths and periods, completed by the trainer's options."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by `state_dict`; each layer reads its own key."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return all state that an exact resume needs; each layer adds its own key."""

    @abstractmethod
    def teardown(self, error: BaseException | None) -> None:
        """Release the resources of `setup`. Always called, with the error that ended the run or None."""

    # Once per pass over the data.

    @abstractmethod
    def batches(self, stage: Stage) -> Iterable[Any]:
        """Return the batches of a stage; in training, the rest of the running epoch from `context.progress.batch`."""

    @abstractmethod
    def num_batches(self, stage: Stage) -> int | None:
        """Return the number of batches of a whole pass, or None if it is unknown before the end of the pass."""

    @abstractmethod
    def train_epoch(self) -> Mapping[str, float] | None:
        """Run one pass over the training data. The default is the pass of the training loop."""

    @abstractmethod
    def val_epoch(self) -> Mapping[str, float] | None:
        """Run one validation pass. The default is the pass of the training loop."""

    @abstractmethod
    def reduce(self, meter: Meter) -> Meter:
        """Return the sums over all ranks; in a single process, the same meter."""

    # Once per batch.

    @abstractmethod
    def to_device(self, batch: Any) -> Any:
        """Return the batch on the device of the model."""

    @abstractmethod
    def train_step(self, batch: Any) -> Mapping[str, Any]:
        """Return `{"loss": …, …}`: compute forward and loss, or make the whole update through the context."""

    @abstractmethod
    def test_step(self, batch: Any) -> Mapping[str, Any]:
        """Return the loss and other outputs of one batch of validation or test."""

    @abstractmethod
    def predict_step(self, batch: Any) -> Any:
        """Return the predictions for one batch."""

    @abstractmethod
    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Compute the gradients of the loss."""

    @abstractmethod
    def clip_gradients(self, optimizer: Optimizer) -> None:
        """Clip the gradients. They are complete and unscaled after this call."""

    @abstractmethod
    def optimizer_step(self, optimizer: Optimizer) -> bool:
        """Step one optimizer and return whether it made a real step (a gradient scaler may skip one)."""

    @abstractmethod
    def scheduler_step(self, interval: str, metrics: Mapping[str, float] | None = None) -> None:
        """Advance the schedulers: after every update, and with the metrics after every epoch."""

    @abstractmethod
    def after_step(self, output: Mapping[str, Any]) -> None:
        """Finish a batch. Called also if the batch made no update; see `context.run.updated`."""

    # Entry points run the loop on *this* layer: do not override them, do not delegate them.

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
                None means the data that the trainer already has.
            val_data: The same, for validation. A dictionary of loaders, datasets or tuples, `{"clean": a, "noisy": b}`,
                has several sets, whose metrics are called `valid_clean_loss`, `valid_noisy_loss` and so on.
            max_length: The length of training *since the trainer's first epoch*, such as `Epochs(10)`; None means
                `num_epochs`.
            validation_period: How often to validate; every epoch by default.
            checkpoint_period: How often to write a checkpoint; None means the trainer's own setting.
            resume: `"auto"` continues from the newest intact checkpoint of the trainer's directory, if there is one;
                a path continues from that checkpoint.
            dry_run: Only try one update, one validation batch and one checkpoint, report what was found, and restore
                the trainer. The returned history is the history of the trial.
            unknown: Rejected. The error suggests the right argument if the name is one of another library.
        """
        for name in unknown:
            raise UnknownNameError("keyword of fit", name, _FIT_KEYWORDS, other_libraries.FIT)
        if dry_run:
            # Imported here, because `dry_run.py` imports this module.
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
        """Return the parts of this trainer and the plan of its next epoch as a tree; nothing changes."""
        # Imported here, because `explain.py` imports this module.
        from dovetail.trainers.explain import explain

        return explain(self._run_layer)

    def evaluate(self, data: Any = None, stage: Stage = "test") -> dict[str, float]:
        """Return the metrics over `data`; module modes, RNG state, counters and logs are restored afterwards.

        A dictionary of loaders, datasets or tuples has several sets: `evaluate({"a": …, "b": …})` returns `a_loss`,
        `b_loss` and so on.
        """
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
        """Write all state that an exact resume needs into the directory `path`."""
        return saving.save(self._run_layer, Path(path))

    def load_checkpoint(self, path: str | Path) -> None:
        """Restore all state from a checkpoint; the next `fit` continues from there."""
        saving.load(self._run_layer, Path(path))

    # Verbs whose default is right for a run in one process.

    def settle(self) -> None:  # noqa: B027 - nothing to do in a single process
        """Exchange pending requests, such as a stop, with the other processes of the run. Called between updates."""

    def gather(self, parts: list[Any]) -> list[Any]:
        """Return the parts that all processes computed from their batches, in the order of the batches."""
        return parts

    def launcher(self) -> Launcher | None:
        """Return the launcher that runs an entry point in other processes, or None to run it in this one."""
        return None

    # Override it, as a method, for batches of another form. A static function saves one Python call per step.
    batch_length = staticmethod(batch_length)

    @classmethod
    def add_on(cls, *add_ons: type[Any]) -> type[Any]:
        """Return this class with add-ons mixed in, from left to right: the last one is the outermost.

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
        # A launcher runs the same function of the loop in other processes and copies the result into this trainer.
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
    """Return the classes of one layer that override the library's default of a method, in lookup order."""
    # A class that sets `_has_defaults` in its body also declares the methods of its base classes as defaults.
    defaults = {it for cls in kind.__mro__ if "_has_defaults" in vars(cls) for it in cls.__mro__}
    return tuple(cls for cls in kind.__mro__ if name in vars(cls) and cls not in defaults)


def _mount(add_on: type[Any], base: type[Any]) -> type[Any]:
    """Return a class that looks up names in `add_on` first, then in `base`; cached, so equal arguments share it."""
    names = {"__module__": add_on.__module__, "__parts__": (add_on, base), "__reduce_ex__": _reduce_mounted}
    return type(f"{add_on.__name__}{base.__name__}", (add_on, base), names)


# Cached, so that mounting the same add-on twice, or after unpickling, gives the same class.
mount = cast("Callable[[type[Any], type[Any]], type[Any]]", cache(_mount))


def _reduce_mounted(trainer: Any, protocol: Any) -> Any:
    """Pickle an instance of a mounted class by its parts, because no module contains the class itself."""
    base, add_ons = _split_mounted(type(trainer))
    # A class that the user derived from a mounted class has a name in a module: pickle it as usual.
    if not add_ons:
        return object.__reduce_ex__(trainer, protocol)
    return _build_mounted, (base, *add_ons), trainer.__getstate__()


def _split_mounted(cls: type[Any]) -> tuple[type[Any], tuple[type[Any], ...]]:
    if "__parts__" not in vars(cls):
        return cls, ()
    add_on, base = vars(cls)["__parts__"]
    base, add_ons = _split_mounted(base)
    return base, (*add_ons, add_on)


def _build_mounted(base: type[Any], *add_ons: type[Any]) -> Any:
    mounted: Any = reduce(lambda built, add_on: mount(add_on, built), add_ons, base)
    return mounted.__new__(mounted)
