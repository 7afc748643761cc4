"""Where the time of a run goes, verb by verb."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from time import perf_counter
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from dovetail.trainers.capabilities.core import Capability
from dovetail.trainers.context import Stage

__all__ = ["Spent", "Timed"]


class Spent(NamedTuple):
    """Time that was spent on something.

    Attributes:
        seconds: In all, without what was spent inside of it on something else that is measured.
        calls: In how many calls.
    """

    seconds: float = 0.0
    calls: int = 0


class Timed(Capability):
    """Measures how long each verb takes, for `verb_times` and for `trainer.explain()` after a run.

    Mount it last, as the outermost layer: it measures the layers inside of it, too. Seconds are those of the caller:
    a device that computes on its own is waited for only where a verb waits for it (the `Profiler` callback sees both).

    Example:
        >>> import torch
        >>> from dovetail.trainers import Trainer
        >>> trainer = Trainer.add_on(Timed)(torch.nn.Linear(4, 2), "cpu", num_epochs=3, verbose=False)
        >>> history = trainer.fit((torch.randn(64, 4), torch.zeros(64, dtype=torch.long)))
        >>> trainer.verb_times["train_step"].calls, trainer.verb_times["backward"].seconds > 0
        (3, True)
    """

    kind = "timing"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._spent: dict[str, Spent] = {}
        self._inside = 0.0
        self._began: float | None = None
        self._total = 0.0
        super().__init__(*args, **kwargs)

    @property
    def verb_times(self) -> dict[str, Spent]:
        """What the last run, or the running one so far, spent on each verb, in their order.

        Under `data` is the time of waiting for batches, by the number of batches; under `rest` all other time from the
        start of `setup` to the start of `teardown`: validation and checkpoints beyond their verbs, callbacks, the loop.
        Empty before the first run.
        """
        if not self._spent:
            return {}
        ordered = {name: self._spent[name] for name in _ORDER if name in self._spent}
        total = self._total if self._began is None else perf_counter() - self._began
        rest = total - sum(spent.seconds for spent in ordered.values())
        return {**ordered, "rest": Spent(rest, 1)}

    def setup(self) -> None:
        """Begin to measure a run."""
        self._spent, self._inside, self._began = {}, 0.0, perf_counter()
        with _Watch(self, "setup"):
            super().setup()

    def teardown(self, error: BaseException | None) -> None:
        """End the measurement."""
        if self._began is not None:
            self._total, self._began = perf_counter() - self._began, None
        super().teardown(error)

    def state_dict(self) -> dict[str, Any]:
        """Measure."""
        with _Watch(self, "state_dict"):
            return super().state_dict()

    def batches(self, stage: Stage) -> Iterable[Any]:
        """Measure how long each batch is waited for."""
        return self._awaited(super().batches(stage))

    def to_device(self, batch: Any) -> Any:
        """Measure."""
        with _Watch(self, "to_device"):
            return super().to_device(batch)

    def train_step(self, batch: Any) -> Mapping[str, Any]:
        """Measure."""
        with _Watch(self, "train_step"):
            return super().train_step(batch)

    def test_step(self, batch: Any) -> Mapping[str, Any]:
        """Measure."""
        with _Watch(self, "test_step"):
            return super().test_step(batch)

    def predict_step(self, batch: Any) -> Any:
        """Measure."""
        with _Watch(self, "predict_step"):
            return super().predict_step(batch)

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Measure."""
        with _Watch(self, "backward"):
            super().backward(loss, **kwargs)

    def clip_gradients(self, optimizer: Optimizer) -> None:
        """Measure."""
        with _Watch(self, "clip_gradients"):
            super().clip_gradients(optimizer)

    def optimizer_step(self, optimizer: Optimizer) -> bool:
        """Measure."""
        with _Watch(self, "optimizer_step"):
            return super().optimizer_step(optimizer)

    def scheduler_step(self, interval: str, metrics: Mapping[str, float] | None = None) -> None:
        """Measure."""
        with _Watch(self, "scheduler_step"):
            super().scheduler_step(interval, metrics)

    def after_step(self, output: Mapping[str, Any]) -> None:
        """Measure."""
        with _Watch(self, "after_step"):
            super().after_step(output)

    def _awaited(self, batches: Iterable[Any]) -> Iterator[Any]:
        iterator = iter(batches)
        while True:
            with _Watch(self, "data"):
                batch = next(iterator, _END)
            if batch is _END:
                seconds, calls = self._spent["data"]
                self._spent["data"] = Spent(seconds, calls - 1)
                return
            yield batch


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


class _Watch:
    """Adds the time of a block to a trainer's times. What other blocks inside of it take is theirs alone."""

    __slots__ = ("_began", "_inside_before", "_name", "_timed")

    def __init__(self, timed: Timed, name: str) -> None:
        self._timed, self._name = timed, name

    def __enter__(self) -> None:
        self._inside_before, self._timed._inside = self._timed._inside, 0.0
        self._began = perf_counter()

    def __exit__(self, *error: object) -> None:
        seconds = perf_counter() - self._began
        timed, name = self._timed, self._name
        before, calls = timed._spent.get(name, Spent())
        timed._spent[name] = Spent(before + seconds - timed._inside, calls + 1)
        timed._inside = self._inside_before + seconds
