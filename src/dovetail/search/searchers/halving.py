"""Asynchronous successive halving: of the trials that reach a rung, only the best continue."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

from dovetail.search.records import TrialState
from dovetail.search.searchers.base import WORST, StoppingRule


class Bracket(NamedTuple):
    """A group of trials that are compared only with each other.

    Attributes:
        num_rungs: How often they are compared.
        max_trials: The number of trials.
        max_concurrent_trials: The number of trials at the same time, if there are enough.
    """

    num_rungs: int
    max_trials: int
    max_concurrent_trials: int


def rung_units(num_rungs: int, max_time: int, divisor: int) -> list[int]:
    """Return the times at which trials are compared.

    Example:
        >>> rung_units(4, 100, 4)
        [1, 6, 25, 100]
    """
    return [max(max_time // divisor**above, 1) for above in reversed(range(num_rungs))]


def adaptive_brackets(
    max_trials: int,
    max_time: int,
    *,
    mode: Literal["aggressive", "standard", "conservative"] = "standard",
    divisor: int = 4,
    max_rungs: int = 5,
    max_concurrent_trials: int = 16,
    bracket_rungs: Sequence[int] = (),
) -> list[Bracket]:
    """Return the brackets of adaptive ASHA: with more rungs, a bracket has more trials, and most of them end earlier.

    Args:
        max_trials: The number of trials of all brackets.
        max_time: The time of the last rung.
        mode: From one bracket of many rungs (`aggressive`) to brackets of every number of rungs.
        divisor: One of this number of trials continues at each rung.
        max_rungs: The largest number of rungs.
        max_concurrent_trials: The number of trials at the same time, of all brackets; 0 gives each bracket as many as
            the last one has trials, and at least `divisor`, as in Determined.
        bracket_rungs: The numbers of rungs, instead of the numbers of the mode.

    Example:
        >>> [tuple(bracket) for bracket in adaptive_brackets(64, 100)]
        [(4, 45, 6), (3, 14, 5), (2, 5, 5)]
    """
    top = min(max_rungs, _log(max_time, divisor) + 1, _log(max_trials, divisor) + 1)
    lowest = {"aggressive": top, "standard": (top - 1) // 2 + 1, "conservative": 1}[mode]
    # There are no brackets without trials.
    rungs = (sorted(bracket_rungs, reverse=True) or list(range(top, lowest - 1, -1)))[:max_trials]
    # Hyperband's shares: a bracket with more rungs stops most trials early, so it can afford more of them.
    weights = [divisor ** (count - 1) / count for count in rungs]
    trials = [max(int(weight / sum(weights) * max_trials), 1) for weight in weights]
    # Rounding down leaves some trials over, and the minimum of 1 may exceed the total.
    trials[0] += max(max_trials - sum(trials), 0)
    while sum(trials) > max_trials:
        trials[trials.index(max(trials))] -= 1
    share, rest = divmod(max_concurrent_trials, len(rungs))
    if max_concurrent_trials == 0:
        share = max(trials[-1], divisor)
    return [
        Bracket(count, number, max(share + (index < rest), 1))
        for index, (count, number) in enumerate(zip(rungs, trials, strict=True))
    ]


@dataclass
class _Trial:
    """The progress of a trial: the next rung of its bracket, whether it was stopped, and whether it has ended."""

    bracket: int
    rung: int = 0
    is_stopped: bool = False
    has_left: bool = False


class AsyncHalving(StoppingRule):
    """Stops a trial at a rung unless it is among the best 1/divisor of those before it; the first one continues.

    Args:
        brackets: The brackets; trials of different brackets are not compared.
        max_time: The time of the last rung, at which every trial ends.
        divisor: One of this number of trials continues at each rung.

    Example:
        >>> rule = AsyncHalving([Bracket(2, 3, 1)], max_time=8, divisor=2)
        >>> [rule.report(number, time=4, value=loss) for number, loss in enumerate([0.5, 0.9, 0.3])]
        [True, False, True]
        >>> rule.report(2, time=8, value=0.2)
        False
    """

    def __init__(self, brackets: Sequence[Bracket], max_time: int, divisor: int) -> None:
        self._brackets = list(brackets)
        self._divisor = divisor
        # Merge rungs of the same time: a second comparison of the same values would stop nearly all trials there.
        self._units = [sorted(set(rung_units(bracket.num_rungs, max_time, divisor))) for bracket in brackets]
        # For every rung of every bracket, the sorted values, each with the number of its trial.
        self._rungs: list[list[list[list[float]]]] = [[[] for _ in units] for units in self._units]
        self._trials: dict[int, _Trial] = {}

    def admit(self, number: int) -> dict[str, Any]:
        """Add a trial to the first bracket with free capacity, or else to one that lacks trials."""
        if number not in self._trials:
            self._trials[number] = _Trial(self._open_bracket())
        return {"bracket": self._trials[number].bracket}

    def report(self, number: int, time: int, value: float) -> bool:
        """Compare a trial at every rung that it has reached."""
        trial = self._trial(number)
        units = self._units[trial.bracket]
        while not trial.is_stopped and time >= units[trial.rung]:
            position, count = self._enter(number, trial, value)
            trial.rung += 1
            trial.is_stopped = trial.rung == len(units) or position >= max(count // self._divisor, 1)
        return not trial.is_stopped

    def leave(self, number: int, state: TrialState) -> None:
        """Count a failed trial as the worst at all rungs that it has not reached, and remove an invalid one."""
        trial = self._trial(number)
        # Another trial replaces it, so it must not take a place in its bracket.
        if state == "INVALID_HP":
            for rung in self._rungs[trial.bracket]:
                rung[:] = [entry for entry in rung if entry[1] != number]
            del self._trials[number]
            return
        if state == "ERROR" and not trial.is_stopped:
            while trial.rung < len(self._units[trial.bracket]):
                self._enter(number, trial, WORST)
                trial.rung += 1
        trial.is_stopped = trial.has_left = True

    def state_dict(self) -> dict[str, Any]:
        return {
            "rungs": [[[list(entry) for entry in rung] for rung in rungs] for rungs in self._rungs],
            "trials": {str(number): asdict(trial) for number, trial in self._trials.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._rungs = [[[list(entry) for entry in rung] for rung in rungs] for rungs in state["rungs"]]
        self._trials = {int(number): _Trial(**trial) for number, trial in state["trials"].items()}

    def _trial(self, number: int) -> _Trial:
        self.admit(number)
        return self._trials[number]

    def _open_bracket(self) -> int:
        members = [[trial for trial in self._trials.values() if trial.bracket == b] for b in range(len(self._brackets))]
        lacking = [b for b, bracket in enumerate(self._brackets) if len(members[b]) < bracket.max_trials]
        # A bracket that has all its trials leaves its share of the capacity to the others.
        for b in lacking:
            if sum(not trial.has_left for trial in members[b]) < self._brackets[b].max_concurrent_trials:
                return b
        return lacking[0] if lacking else 0

    def _enter(self, number: int, trial: _Trial, value: float) -> tuple[int, int]:
        """Insert a value into the next rung of a trial; return its position there and the number of values."""
        rung = self._rungs[trial.bracket][trial.rung]
        # Of equal values the newer one is better, as in Determined. A failed trial, or a metric that is not a number,
        # is sorted last: otherwise a trial with NaN would continue if all others have failed.
        place = bisect_right if value >= WORST else bisect_left
        position = place(rung, value, key=lambda entry: entry[0])
        rung.insert(position, [value, number])
        return position, len(rung)


def _log(value: int, base: int) -> int:
    """Return the integer part of a logarithm, exactly."""
    count = 0
    while base ** (count + 1) <= value:
        count += 1
    return count
