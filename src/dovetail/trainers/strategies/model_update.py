"""Model-update strategies: actions before and after updates, and the payload that is sent with the weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dovetail.errors import ConfigError
from dovetail.trainers.strategies.base import ModelUpdateStrategy, Phase, Strategy
from dovetail.trainers.strategies.nesting import Described, Nesting

if TYPE_CHECKING:
    from dovetail.trainers.context import TrainingContext


@dataclass(frozen=True, eq=False, repr=False)
class NoOpUpdateStrategy(Described, ModelUpdateStrategy):
    """Does nothing; the payload is empty.

    Example:
        >>> NoOpUpdateStrategy().get_update_payload(context=None)
        {}
    """

    vectorizes = True


@dataclass(eq=False, repr=False)
class StateTrackingUpdateStrategy(Described, ModelUpdateStrategy):
    """Counts runs and real updates, both in total and in the running epoch.

    plato's users read the number of the run as `round_number`; a resumed run keeps its number.

    Attributes:
        total_steps: Updates since the trainer was built.
        epoch_steps: Updates of the running epoch, or of the last one between epochs.
        round_number: `context.current_round` if it is set, else the number of runs of this trainer.

    Example:
        >>> strategy = StateTrackingUpdateStrategy()
        >>> strategy.after_step(context=None)
        >>> strategy.get_update_payload(context=None)
        {'total_steps': 1, 'epoch_steps': 1, 'round_number': 0}
    """

    total_steps: int = field(default=0, init=False)
    epoch_steps: int = field(default=0, init=False)
    round_number: int = field(default=0, init=False)
    _run_id: str = field(default="", init=False)

    def on_train_start(self, context: TrainingContext) -> None:
        """Count the run."""
        if context.current_round:
            self.round_number = context.current_round
        # A resumed run has the identifier that was restored with the counts.
        elif not context.run.id or context.run.id != self._run_id:
            self.round_number += 1
        self._run_id = context.run.id

    def on_epoch_start(self, context: TrainingContext) -> None:
        """Reset the count of the epoch's updates."""
        self.epoch_steps = 0

    def after_step(self, context: TrainingContext) -> None:
        """Count an update."""
        self.total_steps += 1
        self.epoch_steps += 1

    def get_update_payload(self, context: TrainingContext) -> dict[str, Any]:
        """Return the counts."""
        return {
            "total_steps": self.total_steps,
            "epoch_steps": self.epoch_steps,
            "round_number": self.round_number,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the counts and the identifier of the run."""
        return {
            "total_steps": self.total_steps,
            "epoch_steps": self.epoch_steps,
            "round_number": self.round_number,
            "run_id": self._run_id,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by `state_dict`."""
        self.total_steps, self.epoch_steps = state["total_steps"], state["epoch_steps"]
        self.round_number, self._run_id = state["round_number"], state["run_id"]


@dataclass(frozen=True, eq=False, repr=False)
class CompositeUpdateStrategy(Nesting, ModelUpdateStrategy):
    """Several update strategies, called in sequence.

    Args:
        strategies: The strategies, in call order.

    Example:
        >>> CompositeUpdateStrategy([StateTrackingUpdateStrategy()]).get_update_payload(context=None)["total_steps"]
        0
    """

    strategies: Sequence[ModelUpdateStrategy]

    @property
    def parts(self) -> Sequence[Strategy]:
        """The strategies."""
        return self.strategies

    def before_step(self, context: TrainingContext) -> None:
        """Call `before_step` of every strategy."""
        for strategy in self.strategies:
            strategy.before_step(context)

    def after_step(self, context: TrainingContext) -> None:
        """Call `after_step` of every strategy."""
        for strategy in self.strategies:
            strategy.after_step(context)

    def on_train_end(self, context: TrainingContext) -> None:
        """Call `on_train_end` of every strategy; the one with phases first, because it sets the final weights."""
        for strategy in sorted(self.strategies, key=_has_phases, reverse=True):
            strategy.on_train_end(context)

    def on_phase_start(self, phase: Phase, context: TrainingContext) -> None:
        """Call `on_phase_start` of the strategy that has phases."""
        for strategy in self.strategies:
            if _has_phases(strategy):
                strategy.on_phase_start(phase, context)

    def phases(self, epochs: int, context: TrainingContext) -> Sequence[Phase]:
        """Return the phases of the strategy that has some.

        Raises:
            ConfigError: Two strategies have phases.
        """
        phased = [strategy for strategy in self.strategies if _has_phases(strategy)]
        if len(phased) > 1:
            raise ConfigError(f"phases: {phased[0]!r} and {phased[1]!r} both divide a run into phases; use one of them")
        return phased[0].phases(epochs, context) if phased else (Phase(epochs),)

    def get_update_payload(self, context: TrainingContext) -> dict[str, Any]:
        """Return the payloads of all strategies in one dictionary.

        Raises:
            ConfigError: Two strategies use the same key.
        """
        payload: dict[str, Any] = {}
        senders: dict[str, ModelUpdateStrategy] = {}
        for strategy in self.strategies:
            for key, value in strategy.get_update_payload(context).items():
                if key in payload:
                    raise ConfigError(
                        f"update payload: both {senders[key]!r} and {strategy!r} send {key!r}; one would be lost"
                    )
                payload[key], senders[key] = value, strategy
        return payload


def combine_update_strategies(added: ModelUpdateStrategy, present: ModelUpdateStrategy | None) -> ModelUpdateStrategy:
    """Return an update strategy combined with the present one, unless that does nothing; the added one comes first.

    Example:
        >>> combine_update_strategies(StateTrackingUpdateStrategy(), NoOpUpdateStrategy())
        StateTrackingUpdateStrategy()
    """
    # The exact class, because a subclass may do something.
    if present is None or type(present) is NoOpUpdateStrategy:
        return added
    return CompositeUpdateStrategy([added, present])


def _has_phases(strategy: ModelUpdateStrategy) -> bool:
    if isinstance(strategy, CompositeUpdateStrategy):
        return any(_has_phases(part) for part in strategy.strategies)
    return type(strategy).phases is not ModelUpdateStrategy.phases
