"""Time measurement of a run: seconds and calls of each verb, and the time of waiting for data."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from time import perf_counter
from typing import Any, NamedTuple

from dovetail.trainers.capabilities.core import Capability
from dovetail.trainers.context import Stage


class Spent(NamedTuple):
    """Time and number of calls.

    Attributes:
        seconds: The total time, without the time of other measured calls inside.
        calls: The number of calls.
    """

    seconds: float = 0.0
    calls: int = 0


def _measured(verb: str) -> Any:
    """Return a verb that calls the inner layer and measures it, for one more call and two clock readings."""

    def measured(self: Timed, *args: Any, **kwargs: Any) -> Any:
        times = self._times
        if not times.are_running:
            return getattr(super(Timed, self), verb)(*args, **kwargs)
        # A verb may cause other measured calls: a manual `train_step` calls `backward`, for example. Their time is
        # subtracted here and added to the caller's `inside`, so that every second counts once.
        outside, times.inside, started = times.inside, 0.0, perf_counter()
        try:
            return getattr(super(Timed, self), verb)(*args, **kwargs)
        finally:
            seconds, spent = perf_counter() - started, times.spent[verb]
            spent[0] += seconds - times.inside
            spent[1] += 1
            times.inside = outside + seconds

    measured.__name__, measured.__doc__ = verb, "Call the inner layer and measure the time."
    return measured


class Timed(Capability):
    """Measures the time of each verb, for `verb_times` and for `trainer.explain()` after a run.

    Make it the outermost layer: it then includes the layers inside. It measures the time of the caller: the time of an
    asynchronous device counts only when a verb waits for it (the `Profiler` callback measures both).

    Example:
        >>> import torch
        >>> from dovetail.trainers import Trainer
        >>> trainer = Trainer.add_on(Timed)(torch.nn.Linear(4, 2), "cpu", num_epochs=3, verbose=False)
        >>> history = trainer.fit((torch.randn(64, 4), torch.zeros(64, dtype=torch.long)))
        >>> trainer.verb_times["train_step"].calls, trainer.verb_times["backward"].seconds > 0
        (3, True)
    """

    kind = "timing"

    _times: _Times

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._times = _Times()
        super().__init__(*args, **kwargs)

    @property
    def verb_times(self) -> dict[str, Spent]:
        """The times of the last or running run by verb, in the order of the loop.

        `data` is the time of waiting for batches, and its calls are batches; `rest` is all other time from the start
        of `setup` to the start of `teardown`: validation and checkpoints beyond their verbs, callbacks, the loop.
        Empty before the first run.
        """
        times = self._times
        if not times.spent:
            return {}
        ordered = {name: Spent(*times.spent[name]) for name in _ORDER if name in times.spent}
        ended = perf_counter() if times.are_running else times.ended
        rest = ended - times.started - sum(spent.seconds for spent in ordered.values())
        return {**ordered, "rest": Spent(rest, 1)}

    def setup(self) -> None:
        """Start the measurement of a run."""
        self._times = _Times()
        self._times.are_running = True
        # After the new `_Times`, whose clock starts with the setup.
        _setup(self)

    def teardown(self, error: BaseException | None) -> None:
        """Stop the measurement."""
        self._times.ended, self._times.are_running = perf_counter(), False
        super().teardown(error)

    def batches(self, stage: Stage) -> Iterable[Any]:
        """Return the batches, and measure the waiting time for each."""
        batches = super().batches(stage)
        return self._measure_waiting(batches) if self._times.are_running else batches

    state_dict = _measured("state_dict")
    to_device = _measured("to_device")
    train_step = _measured("train_step")
    test_step = _measured("test_step")
    predict_step = _measured("predict_step")
    backward = _measured("backward")
    clip_gradients = _measured("clip_gradients")
    optimizer_step = _measured("optimizer_step")
    scheduler_step = _measured("scheduler_step")
    after_step = _measured("after_step")

    def _measure_waiting(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield batches, and count the time of waiting for each of them as `data`."""
        times, iterator = self._times, iter(batches)
        spent = times.spent["data"]
        while True:
            outside, times.inside, started = times.inside, 0.0, perf_counter()
            # An inner layer may call measured verbs while it reads: a sharded trainer computes along with others.
            batch = next(iterator, _END)
            seconds = perf_counter() - started
            spent[0] += seconds - times.inside
            times.inside = outside + seconds
            if batch is _END:
                return
            spent[1] += 1
            yield batch


class _Times:
    """The times of a run.

    Attributes:
        spent: Seconds and calls by name.
        inside: Seconds of measured calls inside the running call.
        started: The start time of the run.
        ended: The end time of the run.
        are_running: True during a run: calls between two runs are not counted.
    """

    __slots__ = ("are_running", "ended", "inside", "spent", "started")

    def __init__(self) -> None:
        self.spent: defaultdict[str, list[Any]] = defaultdict(_none)
        self.inside = 0.0
        self.started = self.ended = perf_counter()
        self.are_running = False


def _none() -> list[Any]:
    return [0.0, 0]


_setup = _measured("setup")

# The order of `verb_times`: the order of the calls in the loop.
_ORDER = (
    "setup",
    "data",
    "to_device",
    "train_step",
    "test_step",
    "predict_step",
    "backward",
    "clip_gradients",
    "optimizer_step",
    "scheduler_step",
    "after_step",
    "state_dict",
)

_END = object()
