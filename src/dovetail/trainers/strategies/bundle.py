"""Bundle of the strategies of one trainer: setup, hooks as a callback, state for checkpoints, and teardown."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from dovetail.callbacks import Callback
from dovetail.errors import ConfigError, UnknownNameError
from dovetail.trainers.strategies.base import (
    DataLoaderStrategy,
    LossCriterionStrategy,
    LRSchedulerStrategy,
    ModelUpdateStrategy,
    OptimizerStrategy,
    Phase,
    Strategy,
    TestingStrategy,
    TrainingStepStrategy,
)
from dovetail.trainers.strategies.nesting import Nesting

if TYPE_CHECKING:
    from dovetail.trainers.context import TrainingContext


@dataclass
class Strategies:
    """One strategy of each role, in the order in which they are set up and called.

    Attributes:
        testing: None means that the trainer evaluates with its metrics. The loop never uses this role.
        given: The roles that the user gave as strategies. Options decide the others.
        is_set_up: True between `setup` and `teardown`.
    """

    loss: LossCriterionStrategy
    optimizer: OptimizerStrategy
    training_step: TrainingStepStrategy
    lr_scheduler: LRSchedulerStrategy
    model_update: ModelUpdateStrategy
    data_loader: DataLoaderStrategy
    testing: TestingStrategy | None = None
    given: frozenset[str] = frozenset()
    is_set_up: bool = field(default=False, init=False)

    def __iter__(self) -> Iterator[Strategy]:
        for each in fields(self):
            strategy = getattr(self, each.name)
            if isinstance(strategy, Strategy):
                yield strategy

    def setup(self, context: TrainingContext) -> None:
        """Set up every strategy; if one of them fails, the earlier ones are torn down."""
        with ExitStack() as done:
            for strategy in self:
                strategy.setup(context)
                done.callback(strategy.teardown, context)
            # All succeeded: keep them set up until `teardown`.
            done.pop_all()
        self.is_set_up = True

    def teardown(self, context: TrainingContext) -> None:
        """Tear down every strategy, even if one of them fails; later calls do nothing."""
        if not self.is_set_up:
            return
        # Before the calls, so that a teardown which fails is not repeated.
        self.is_set_up = False
        failure: BaseException | None = None
        for strategy in self:
            try:
                strategy.teardown(context)
            except Exception as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def state_dict(self) -> dict[str, Any]:
        """Return the states by role, without empty ones."""
        return {strategy.role: state for strategy in self if (state := strategy.state_dict())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of every strategy."""
        for strategy in self:
            if strategy.role in state:
                strategy.load_state_dict(state[strategy.role])

    def as_callback(self) -> Callback | None:
        """Return a callback that calls the hooks which these strategies override, or None if they override none."""
        # Only hooks that a strategy overrides: the loop then calls nothing for the others.
        events: dict[str, Any] = {}
        if listeners := [*self._hooks("on_prepare"), *self._hooks("on_train_start")]:
            events["on_train_start"] = _calling(listeners)
        # The update strategy first: it may restore the weights of the model, which the other strategies then read.
        in_order = sorted(self.overriding("on_train_end"), key=lambda strategy: strategy is not self.model_update)
        endings: list[Callable[..., None]] = [it.on_train_end for it in in_order]
        if endings:
            events["on_train_end"] = _calling(endings)
        if listeners := [*self._phase_starts(), *self._hooks("on_epoch_start")]:
            events["on_epoch_start"] = _calling(listeners)
        if listeners := self._hooks("on_epoch_end"):
            epoch_listeners = listeners

            def on_epoch_end(self: Callback, context: TrainingContext, metrics: Mapping[str, float]) -> None:
                for listener in epoch_listeners:
                    listener(context)

            events["on_epoch_end"] = on_epoch_end
        if touching := self._hooks("on_gradients"):

            def on_gradients(self: Callback, context: TrainingContext, optimizer: Any) -> None:
                for touch in touching:
                    touch(optimizer, context)

            events["on_gradients"] = on_gradients
        self._add_update_events(events)
        # Pickle cannot find a class that is built here, so it rebuilds the callback from the strategies.
        events["__reduce__"] = lambda hooks: (Strategies.as_callback, (self,))
        is_empty = len(events) == 1
        return None if is_empty else type("StrategyHooks", (Callback,), {**events, "is_part_of_trainer": True})()

    def _add_update_events(self, events: dict[str, Any]) -> None:
        """Add the hooks that count updates: `before_step`, `on_optimizer_step` and `after_step` of the strategies."""
        update, optimizer_strategy = self.model_update, self.optimizer
        if _overrides(update, "before_step", ModelUpdateStrategy):

            def on_step_start(self: Callback, context: TrainingContext, batch: Any) -> None:
                # The window still describes the last batch: if that batch closed it, this batch opens the next one.
                if context.run.window.closes:
                    update.before_step(context)

            events["on_step_start"] = on_step_start
        on_optimizer_step = after_step = None
        if _overrides(optimizer_strategy, "on_optimizer_step", OptimizerStrategy):
            on_optimizer_step = optimizer_strategy.on_optimizer_step
        if _overrides(update, "after_step", ModelUpdateStrategy):
            after_step = update.after_step
        if on_optimizer_step is not None or after_step is not None:

            def on_update(self: Callback, context: TrainingContext) -> None:
                if on_optimizer_step is not None:
                    for optimizer in context.run.batch.stepped:
                        on_optimizer_step(optimizer, context)
                if after_step is not None:
                    after_step(context)

            events["on_update"] = on_update

    def phases(self, epochs: int, context: TrainingContext) -> tuple[Phase, ...]:
        """Return the phases of a run of `epochs` epochs, without empty phases."""
        update = self.model_update
        if not _overrides(update, "phases", ModelUpdateStrategy):
            return (Phase(epochs),)
        return tuple(phase for phase in update.phases(epochs, context) if phase.epochs) or (Phase(0),)

    def prepare(self, context: TrainingContext) -> None:
        """Call `on_prepare` of every strategy, as at the start of a run."""
        for prepare in self._hooks("on_prepare"):
            prepare(context)

    def overriding(self, hook: str) -> list[Strategy]:
        """Return the given strategies that override a hook which all strategies have.

        Strategies that are built from options need no hook, so a plain trainer has no callback for them.
        """
        return [strategy for strategy in self if strategy.role in self.given and _overrides_hook(strategy, hook)]

    def _phase_starts(self) -> list[Callable[..., None]]:
        """Return the hook that announces the phase of an epoch, if the update strategy has phases."""
        update = self.model_update
        if not _overrides(update, "phases", ModelUpdateStrategy):
            return []
        on_phase_start = update.on_phase_start

        def begin(context: TrainingContext) -> None:
            run, epoch = context.run, context.progress.epoch
            phase = run.phase_at(epoch)
            # In every epoch, not only in the first of a phase: a resumed run may start in the middle of one.
            run.is_detached = phase.is_detached
            if run.starts_phase(epoch):
                on_phase_start(phase, context)

        return [begin]

    def _hooks(self, hook: str) -> list[Callable[..., None]]:
        return [getattr(strategy, hook) for strategy in self.overriding(hook)]


ROLES = tuple(each.name for each in fields(Strategies) if each.name not in ("given", "is_set_up"))


def check_roles(strategies: Mapping[str, Any]) -> None:
    """Raise if a name is not a role, or if a strategy has another role."""
    for role, strategy in strategies.items():
        if role not in ROLES:
            raise UnknownNameError("role of a strategy", role, ROLES)
        if not isinstance(strategy, Strategy) or strategy.role != role:
            raise ConfigError(f"{role}: expected a strategy of this role, got {strategy!r}")


def _overrides_hook(strategy: Strategy, hook: str) -> bool:
    """Return whether a strategy, or a strategy inside it, overrides a hook."""
    # A nesting strategy defines every hook in order to forward it, so its parts decide.
    if isinstance(strategy, Nesting) and getattr(type(strategy), hook) is getattr(Nesting, hook):
        return any(_overrides_hook(part, hook) for part in strategy.parts)
    return _overrides(strategy, hook, Strategy)


def _overrides(strategy: Strategy, name: str, base: type[Strategy]) -> bool:
    return getattr(type(strategy), name) is not getattr(base, name)


def _calling(listeners: list[Callable[..., None]]) -> Callable[[Callback, TrainingContext], None]:
    def call(self: Callback, context: TrainingContext) -> None:
        for listener in listeners:
            listener(context)

    return call
