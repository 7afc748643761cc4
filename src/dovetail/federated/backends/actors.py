"""Clients in actors on a Ray cluster."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dovetail.errors import ConfigError
from dovetail.federated.backends.base import Work, Worker
from dovetail.federated.backends.parcels import copied, opened, packed
from dovetail.federated.backends.pool import Lost, News, Pool, Seat
from dovetail.federated.backends.sequential import attempted, fault
from dovetail.federated.messages import Weights
from dovetail.runtime.ray_cluster import connect
from dovetail.runtime.relay import arithmetic, described, rebuilt, set_arithmetic

# Content and its bulk as Ray transfers them, without a copy within a node.
_Cargo = tuple[bytes, list[Any]]


@dataclass(eq=False, kw_only=True)
class _ActorSeat(Seat):
    """An actor and its last request."""

    actor: Any
    asked: Any


class Ray(Pool[_ActorSeat]):
    """Runs clients in actors on the nodes of a Ray cluster, one slot each: a graphics card if there are any, or a core.

    Code and Python's packages are the same on all nodes. A process that is connected to a cluster stays with that one.

    Args:
        num_workers: How many actors; None for one per slot, and never more than these.
        timeout: Seconds that a client has; None for no limit.
        address: `local` starts a cluster on this machine that ends with this process, `auto` is the one that this
            machine is a node of, and `host:port` or `ray://host:port` names one; None for the variable `RAY_ADDRESS`,
            or `local` without it.

    Example:
        >>> Ray(num_workers=8, address="auto").address
        'auto'
    """

    def __init__(
        self, num_workers: int | None = None, timeout: float | None = None, *, address: str | None = None
    ) -> None:
        super().__init__(num_workers, timeout)
        self.address = address or os.environ.get("RAY_ADDRESS") or "local"

    # ------------------------------------------------------------------ what a pool asks for

    def _open(self, worker: Worker) -> None:
        self._ray = connect(self.address)
        try:
            cargo = _sent(worker)
        except Exception as error:
            raise ConfigError(f"the client or its data cannot be sent to other processes: {error}") from error
        self._cargo = self._ray.put(cargo)
        available = self._ray.cluster_resources()
        self._resource = "GPU" if available.get("GPU") else "CPU"
        self._slots = int(available.get(self._resource, 0))
        if self._slots == 0:
            raise ConfigError(f"cluster: expected a core or a graphics card for clients, {self.address!r} has none")
        self._new_actor = self._ray.remote(_Actor)

    def _size(self) -> int:
        return min(self.num_workers or self._slots, self._slots)

    def _begin(self) -> _ActorSeat:
        wanted = {"num_cpus": 1} if self._resource == "CPU" else {"num_cpus": 0, "num_gpus": 1}
        actor = self._new_actor.options(**wanted).remote(self._cargo, arithmetic())
        return _ActorSeat(actor=actor, asked=actor.is_ready.remote())

    def _pack(self, work: Sequence[Work]) -> None:
        self._work = work
        # By identity, because all tasks of a round share the weights.
        distinct = {id(task.weights): task.weights for task, _ in work}
        self._weights = {key: self._ray.put(_sent(dict(weights))) for key, weights in distinct.items()}
        # Otherwise an actor that has died since would fail its first client.
        for seat in self._seats:
            if seat.is_ready:
                seat.is_ready, seat.asked = False, seat.actor.is_ready.remote()

    def _give(self, seat: _ActorSeat, position: int) -> bool:
        task, state = self._work[position]
        cargo = _sent((replace(task, weights={}), state))
        seat.asked = seat.actor.work.remote([self._weights[id(task.weights)]], cargo)
        return True

    def _listen(self, timeout: float | None) -> Iterator[tuple[_ActorSeat, News]]:
        by_request = {seat.asked: seat for seat in self._seats if seat.asked is not None}
        requests = list(by_request)
        found, _ = self._ray.wait(requests, num_returns=1, timeout=timeout)
        found, _ = self._ray.wait(requests, num_returns=len(requests), timeout=0) if found else ([], [])
        for request in found:
            seat = by_request[request]
            seat.asked = None
            try:
                news = _received(self._ray.get(request))
            except self._ray.exceptions.RayError as error:
                yield seat, Lost(_reason(error))
                continue
            if isinstance(news, Mapping):
                cause = rebuilt(news)
                raise ConfigError(f"the client cannot be received by an actor: {cause}") from cause
            yield seat, news

    def _end(self, seat: _ActorSeat) -> None:
        self._ray.kill(seat.actor)


class _Actor:
    """Does the work of clients in turn."""

    def __init__(self, cargo: _Cargo, settings: dict[str, Any]) -> None:
        set_arithmetic(settings, num_threads=1)
        self._known: tuple[Any, Weights] = None, {}
        self._readiness: Any = "ready"
        try:
            self._worker: Worker = _received(cargo)
        except Exception as error:
            self._readiness = described(error)

    def is_ready(self) -> _Cargo:
        """Return `ready`, or the error of the constructor."""
        return _sent(self._readiness)

    def work(self, weights: list[Any], cargo: _Cargo) -> _Cargo:
        """Return the outcome. The weights are a reference, which is resolved once per round."""
        import ray

        (reference,) = weights
        if reference != self._known[0]:
            self._known = reference, _received(ray.get(reference))
        task, state = _received(cargo)
        task = replace(task, weights=self._known[1])
        outcome = attempted(self._worker, (task, state))
        try:
            return _sent(outcome)
        except Exception as error:
            return _sent(fault(task, error))


def _sent(content: Any) -> _Cargo:
    import numpy as np

    parcel = packed(content)
    return parcel.content, [np.asarray(part) for part in parcel.bulk]


def _received(cargo: _Cargo) -> Any:
    # Ray returns read-only memory that all processes of a node share.
    return opened(cargo[0], map(copied, cargo[1]))


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    why = next((line for line in lines if " because " in line), lines[-1])
    return f"its actor was lost ({why.partition(' because ')[2].partition('. ')[0] or why})"
