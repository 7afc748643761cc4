"""Base class of callbacks, and the list of callbacks that the loop calls."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from dovetail.errors import ConfigError, UnknownNameError, misspelled_methods

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from dovetail.trainers.context import TrainingContext


@dataclass(frozen=True)
class Report:
    """The numbers that the loop copies to the host at every reporting period.

    Attributes:
        metrics: Sample-weighted means over the batches of the running epoch, by name (`loss`, …).
        losses: The loss of each batch since the last report.
        first_batch: The number of the first of these batches, counted from 0 since the start of training.
    """

    metrics: Mapping[str, float]
    losses: Sequence[float]
    first_batch: int


class Callback:
    """Base class of callbacks. Override the hooks you need; the loop never calls the others.

    Every hook gets the training context, which has the progress (`context.progress`), the history, the model, and a
    method to end training (`context.stop(reason)`).

    Example:
        >>> class Announce(Callback):
        ...     def on_epoch_end(self, context, metrics):
        ...         print(f"epoch {context.progress.epoch}: loss {metrics['train_loss']:.3f}")
    """

    # Whether only the main process calls the callback, because it shows or writes values that all processes have.
    main_rank_only: ClassVar[bool] = False
    # The weights that a validation measures because of this callback, for displays; empty for the trained weights.
    validated_weights: str = ""
    # Whether it calls hooks of the trainer's class or strategies, and therefore is part of the computation.
    is_part_of_trainer: ClassVar[bool] = False

    def on_train_start(self, context: TrainingContext) -> None:
        """Called once, after setup and before the first batch."""

    def on_epoch_start(self, context: TrainingContext) -> None:
        """Called before the first batch of an epoch, but not if an epoch is resumed in its middle."""

    def on_step_start(self, context: TrainingContext, batch: Any) -> None:
        """Called before every training batch; its index in the epoch is `context.progress.batch`."""

    def on_gradients(self, context: TrainingContext, optimizer: Optimizer) -> None:
        """Called before an optimizer steps: its gradients are complete, unscaled and clipped by the trainer."""

    def on_update(self, context: TrainingContext) -> None:
        """Called after every real optimizer step, which `context.progress.updates` already counts."""

    def on_step_end(self, context: TrainingContext, output: Mapping[str, Any]) -> None:
        """Called after every training batch, with the output of `train_step`."""

    def on_report(self, context: TrainingContext, report: Report) -> None:
        """Called every reporting period, with numbers that are already on the host."""

    def on_validation_start(self, context: TrainingContext) -> None:
        """Called before every validation pass."""

    def on_test_step_end(self, context: TrainingContext, output: Mapping[str, Any]) -> None:
        """Called after every batch of validation, test or `inference`, with the output of `test_step`."""

    def on_validation_end(self, context: TrainingContext, metrics: Mapping[str, float]) -> None:
        """Called after every validation pass, with names such as `valid_loss`."""

    def on_epoch_end(self, context: TrainingContext, metrics: Mapping[str, float]) -> None:
        """Called after an epoch and its validation, with names such as `train_loss` and `valid_loss`."""

    def on_checkpoint(self, context: TrainingContext, path: Path) -> None:
        """Called after a checkpoint was written."""

    def on_exception(self, context: TrainingContext, error: BaseException) -> None:
        """Called when training ends with an error, before the error is raised to the caller."""

    def on_train_end(self, context: TrainingContext) -> None:
        """Called once, after the last batch, if no error was raised."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a checkpoint stores for this callback; empty by default."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by `state_dict`."""


# In the order in which the loop first calls them.
HOOKS = tuple(name for name in vars(Callback) if name.startswith("on_"))


class Callbacks:
    """An ordered list of callbacks and, for each hook, the bound methods that override it.

    The loop calls the tuples (`callbacks.on_step_end`, …), so a hook that no callback overrides costs nothing.

    Example:
        >>> class Count(Callback):
        ...     def on_step_end(self, context, output): ...
        >>> callbacks = Callbacks([Count])
        >>> len(callbacks.on_step_end), len(callbacks.on_step_start)
        (1, 0)
    """

    on_train_start: tuple[Callable[[TrainingContext], None], ...]
    on_epoch_start: tuple[Callable[[TrainingContext], None], ...]
    on_step_start: tuple[Callable[[TrainingContext, Any], None], ...]
    on_gradients: tuple[Callable[[TrainingContext, Optimizer], None], ...]
    on_update: tuple[Callable[[TrainingContext], None], ...]
    on_step_end: tuple[Callable[[TrainingContext, Mapping[str, Any]], None], ...]
    on_report: tuple[Callable[[TrainingContext, Report], None], ...]
    on_validation_start: tuple[Callable[[TrainingContext], None], ...]
    on_test_step_end: tuple[Callable[[TrainingContext, Mapping[str, Any]], None], ...]
    on_validation_end: tuple[Callable[[TrainingContext, Mapping[str, float]], None], ...]
    on_epoch_end: tuple[Callable[[TrainingContext, Mapping[str, float]], None], ...]
    on_checkpoint: tuple[Callable[[TrainingContext, Path], None], ...]
    on_exception: tuple[Callable[[TrainingContext, BaseException], None], ...]
    on_train_end: tuple[Callable[[TrainingContext], None], ...]

    def __init__(self, callbacks: Iterable[Any] = ()) -> None:
        self._callbacks: list[Callback] = []
        self._is_main = True
        self._bind()
        self.add(*callbacks)

    def __iter__(self) -> Iterator[Callback]:
        return iter(self._callbacks)

    def __len__(self) -> int:
        return len(self._callbacks)

    def add(self, *callbacks: Any, first: bool = False) -> None:
        """Append callbacks, given as instances or as classes that need no argument.

        Objects with plato's hook names (`TrainerCallback`) are adapted.

        Args:
            callbacks: The callbacks to add, in order.
            first: Whether to put them before the existing ones.
        """
        made = [_as_callback(callback) for callback in callbacks]
        self._callbacks = made + self._callbacks if first else self._callbacks + made
        self._bind()

    def remove(self, *callbacks: Callback) -> None:
        """Remove callbacks from the list; those that are not on it are ignored."""
        # By identity: two equal callbacks are still two callbacks.
        self._callbacks = [callback for callback in self._callbacks if all(callback is not it for it in callbacks)]
        self._bind()

    def mute(self, *, is_main: bool) -> None:
        """Call all callbacks in the main process of a run, and only those that every process needs in the others."""
        self._is_main = is_main
        self._bind()

    def __getstate__(self) -> dict[str, Any]:
        # Pickle finds bound methods by name, which fails for classes that were created at run time.
        return {name: value for name, value in self.__dict__.items() if name not in HOOKS}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._bind()

    def _bind(self) -> None:
        """Collect, for each hook, the methods of the callbacks that override it in this process."""
        for hook in HOOKS:
            # Methods of the class: a hook that is set on an instance is never called, and `add` warns of it.
            overridden = (
                getattr(callback, hook)
                for callback in self._callbacks
                if getattr(type(callback), hook) is not getattr(Callback, hook)
                and (self._is_main or not callback.main_rank_only)
            )
            setattr(self, hook, tuple(overridden))

    def state_dict(self) -> list[dict[str, Any]]:
        """Return the state of every callback that has one, with its class name and its index within that class."""
        return [{"name": name, "state": state} for name, callback in self._named() if (state := callback.state_dict())]

    def load_state_dict(
        self,
        states: Sequence[Mapping[str, Any]],
        load: Callable[[str, Callback, Any], None] = lambda name, callback, state: callback.load_state_dict(state),
    ) -> list[str]:
        """Restore the state of every callback.

        Args:
            states: The result of `state_dict`.
            load: A function of the name of a callback, the callback and its state, which restores it.

        Returns:
            The names in `states` without a callback.
        """
        present = dict(self._named())
        unclaimed = []
        for entry in states:
            callback = present.get(entry["name"])
            if callback is None:
                unclaimed.append(str(entry["name"]))
            else:
                load(str(entry["name"]), callback, entry["state"])
        return unclaimed

    def _named(self) -> Iterator[tuple[str, Callback]]:
        seen: dict[str, int] = {}
        for callback in self._callbacks:
            kind = type(callback).__name__
            # A checkpoint finds a callback by this name, so the second one of a class needs a number.
            seen[kind] = number = seen.get(kind, 0) + 1
            yield (kind if number == 1 else f"{kind}#{number}"), callback


def is_new_run(context: TrainingContext) -> bool:
    """Return whether the run that starts is new, so that callbacks must reset the state of an earlier run."""
    # A run that resumes after its first validation has trained no batch, but is not new.
    return context.progress.batches == 0 and context.run.validated_at < 0


# The names of these hooks in Lightning, Keras and Transformers.
FOREIGN_HOOKS: Mapping[str, str] = {
    "on_fit_start": "on_train_start",
    "on_fit_end": "on_train_end",
    "on_train_begin": "on_train_start",
    "on_train_epoch_start": "on_epoch_start",
    "on_train_epoch_end": "on_epoch_end",
    "on_epoch_begin": "on_epoch_start",
    "on_train_batch_start": "on_step_start",
    "on_train_batch_begin": "on_step_start",
    "on_batch_begin": "on_step_start",
    "on_batch_start": "on_step_start",
    "on_step_begin": "on_step_start",
    "on_train_batch_end": "on_step_end",
    "on_batch_end": "on_step_end",
    "on_before_optimizer_step": "on_gradients",
    "on_pre_optimizer_step": "on_gradients",
    "on_optimizer_step": "on_update",
    "on_log": "on_report",
    "on_validation_epoch_start": "on_validation_start",
    "on_validation_epoch_end": "on_validation_end",
    "on_evaluate": "on_validation_end",
    "on_test_begin": "on_validation_start",
    "on_test_end": "on_validation_end",
    "on_validation_batch_end": "on_test_step_end",
    "on_test_batch_end": "on_test_step_end",
    "on_save": "on_checkpoint",
    "on_save_checkpoint": "on_checkpoint",
}


def _as_callback(candidate: Any) -> Callback:
    """Return a callback from a class, an instance or an object with plato's hooks; warn of parts without effect."""
    # Imported here, because that module imports this one.
    from dovetail.callbacks.trainer import PlatoAdapter, TrainerCallback

    made = candidate() if isinstance(candidate, type) else candidate
    if isinstance(made, Callback):
        for sentence in _unused_parts(made):
            warnings.warn(sentence, UserWarning, stacklevel=3)
        return made
    if isinstance(made, TrainerCallback):
        for sentence in _unused_events(type(made), TrainerCallback):
            warnings.warn(sentence, UserWarning, stacklevel=3)
        return PlatoAdapter(made)
    raise ConfigError(
        f"callbacks: expected a dovetail.callbacks.Callback or TrainerCallback (class or instance), got {candidate!r}"
    )


def _unused_parts(callback: Callback) -> Iterator[str]:
    """Yield a sentence about each part of a callback that the loop never uses."""
    kind = type(callback)
    for cls in kind.__mro__:
        # The methods of a class that is not a callback may have other callers.
        for name in vars(cls) if issubclass(cls, Callback) else ():
            # Otherwise a misspelled hook, or a hook of another library, would have no effect.
            if name.startswith("on_") and name not in HOOKS and callable(getattr(kind, name)):
                unknown = UnknownNameError(f"hook of {cls.__name__}", name, HOOKS, FOREIGN_HOOKS)
                yield f"the loop never calls an {unknown}"
    inherited = {name for name, value in vars(Callback).items() if callable(value) and getattr(kind, name) is value}
    for name in HOOKS:
        # `_bind` reads hooks from the class.
        if name in inherited and name in getattr(callback, "__dict__", ()):
            yield (
                f"{kind.__name__}.{name} is never called, because it was set on the instance: "
                f"define it in the class, or use LambdaCallback({name}=…)"
            )
    if "state_dict" not in inherited and "load_state_dict" in inherited:
        yield f"{kind.__name__} defines state_dict without load_state_dict: its state is saved and never restored"
    if "load_state_dict" not in inherited and "state_dict" in inherited:
        yield f"{kind.__name__} defines load_state_dict without state_dict: checkpoints have no state for it"


def _unused_events(kind: type, base: type) -> Iterator[str]:
    """Yield a sentence about each method of a plato callback that looks like an event but is not one."""
    # Other names may be events that `CallbackHandler.call_event` calls.
    for name, nearest in misspelled_methods(kind, base):
        if name not in HOOKS:
            yield f"{kind.__name__}.{name} is never called: did you mean {nearest}?"
    known = ", ".join(sorted(name for name in vars(base) if name.startswith("on_")))
    for name in HOOKS:
        if hasattr(kind, name):
            yield (
                f"{kind.__name__}.{name} is never called: it is a hook of dovetail.callbacks.Callback, "
                f"and {kind.__name__} derives from {base.__name__} (known: {known})"
            )
