"""plato's `processors.base`: changes of a payload that a client's hooks put into its pipelines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

__all__ = ["Pipeline", "Processor"]


class Processor:
    """Changes the payload that a client receives or sends; override `process`.

    Args:
        name: A name, for messages.
        trainer: The trainer of the client.
        kwargs: Anything else; a subclass may use it.
    """

    def __init__(self, name: str | None = None, trainer: Any = None, **kwargs: Any) -> None:
        self.name = name
        self.trainer = trainer

    def process(self, data: Any) -> Any:
        """Return the changed payload."""
        return data

    def process_iterable(self, data: Iterable[Any]) -> Iterator[Any]:
        """Return the changed payloads, one by one."""
        return map(self.process, data)


class Pipeline:
    """The processors of one payload, in order; `inbound_received` and `outbound_ready` may change `processors`.

    Example:
        >>> class Doubling(Processor):
        ...     def process(self, data):
        ...         return 2 * data
        >>> pipeline = Pipeline()
        >>> pipeline.processors.append(Doubling())
        >>> pipeline.process(3)
        6
    """

    def __init__(self) -> None:
        self.processors: list[Any] = []

    def process(self, data: Any) -> Any:
        """Return the payload as the last processor returns it."""
        for processor in self.processors:
            data = processor.process(data)
        return data
