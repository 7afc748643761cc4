"""Ray backend: clients run in actors on a Ray cluster."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dovetail.errors import ConfigError
from dovetail.federated.backends.base import Work, Worker
from dovetail.federated.backends.pool import LostWorker, Pool, WorkerHandle, WorkerReport
from dovetail.federated.backends.sequential import fault, run_client
from dovetail.federated.backends.shared_memory import copy_aligned, pack, unpack
from dovetail.federated.messages import Weights
from dovetail.runtime.ray_cluster import connect
from dovetail.runtime.relay import arithmetic, describe_error, rebuild_error, set_arithmetic

# Pickled content, and the memory of its tensors as arrays, which Ray shares within a node without a copy.
_Packed = tuple[bytes, list[Any]]


@dataclass(eq=False, kw_only=True)
class _ActorHandle(WorkerHandle):
    """An actor and its last request."""

    actor: Any
    request: Any


class Ray(Pool[_ActorHandle]):
    """Runs clients in actors on the nodes of a Ray cluster, one slot each: a graphics card if there are any, or a core.

    Code and Python's packages are the same on all nodes. A process that is connected to a cluster stays with that one.

    Args:
        num_workers: The number of actors, at most one per slot. None means one per slot.
        timeout: Seconds after which a client without an answer is left out. None means no limit.
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

    # ------------------------------------------------------------------ methods of the pool

    def _open(self, worker: Worker) -> None:
        self._ray = connect(self.address)
        try:
            packed = _to_ray(worker)
        except Exception as error:
            raise ConfigError(f"the client or its data cannot be sent to other processes: {error}") from error
        self._packed_worker = self._ray.put(packed)
        available = self._ray.cluster_resources()
        self._resource = "GPU" if available.get("GPU") else "CPU"
        self._slots = int(available.get(self._resource, 0))
        if self._slots == 0:
            raise ConfigError(f"cluster: expected a core or a graphics card for clients, {self.address!r} has none")
        self._new_actor = self._ray.remote(_Actor)

    def _size(self) -> int:
        return min(self.num_workers or self._slots, self._slots)

    def _start_worker(self) -> _ActorHandle:
        wanted = {"num_cpus": 1} if self._resource == "CPU" else {"num_cpus": 0, "num_gpus": 1}
        actor = self._new_actor.options(**wanted).remote(self._packed_worker, arithmetic())
        return _ActorHandle(actor=actor, request=actor.is_ready.remote())

    def _pack(self, work: Sequence[Work]) -> None:
        self._work = work
        # By identity, because all tasks of a round share the weights.
        distinct = {id(task.weights): task.weights for task, _ in work}
        self._weights = {key: self._ray.put(_to_ray(dict(weights))) for key, weights in distinct.items()}
        # Otherwise an actor that has died since would fail its first client.
        for handle in self._handles:
            if handle.is_ready:
                handle.is_ready, handle.request = False, handle.actor.is_ready.remote()

    def _send_task(self, handle: _ActorHandle, position: int) -> bool:
        task, state = self._work[position]
        packed = _to_ray((replace(task, weights={}), state))
        # In a list, because Ray replaces a reference that is a direct argument by a new copy for every call.
        handle.request = handle.actor.work.remote([self._weights[id(task.weights)]], packed)
        return True

    def _receive_reports(self, timeout: float | None) -> Iterator[tuple[_ActorHandle, WorkerReport]]:
        by_request = {handle.request: handle for handle in self._handles if handle.request is not None}
        requests = list(by_request)
        # Waits for one answer, and then takes all others that are complete without waiting.
        found, _ = self._ray.wait(requests, num_returns=1, timeout=timeout)
        found, _ = self._ray.wait(requests, num_returns=len(requests), timeout=0) if found else ([], [])
        for request in found:
            handle = by_request[request]
            handle.request = None
            # An error in the constructor of an actor would end the actor, so `is_ready` reports it.
            try:
                report = _from_ray(self._ray.get(request))
            except self._ray.exceptions.RayError as error:
                yield handle, LostWorker(_reason(error))
                continue
            if isinstance(report, Mapping):
                cause = rebuild_error(report)
                raise ConfigError(f"the client cannot be received by an actor: {cause}") from cause
            yield handle, report

    def _stop_worker(self, handle: _ActorHandle) -> None:
        self._ray.kill(handle.actor)


class _Actor:
    """Does the work of clients in turn."""

    def __init__(self, packed: _Packed, settings: dict[str, Any]) -> None:
        set_arithmetic(settings, num_threads=1)
        # The reference and the weights of the last round; all clients of a round share them.
        self._known: tuple[Any, Weights] = None, {}
        self._readiness: Any = "ready"
        try:
            self._worker: Worker = _from_ray(packed)
        except Exception as error:
            self._readiness = describe_error(error)

    def is_ready(self) -> _Packed:
        """Return `ready`, or the error of the constructor."""
        return _to_ray(self._readiness)

    def work(self, weights: list[Any], packed: _Packed) -> _Packed:
        """Return the outcome. The weights are a reference, which is resolved once per round."""
        import ray

        (reference,) = weights
        if reference != self._known[0]:
            self._known = reference, _from_ray(ray.get(reference))
        task, state = _from_ray(packed)
        task = replace(task, weights=self._known[1])
        outcome = run_client(self._worker, (task, state))
        try:
            return _to_ray(outcome)
        except Exception as error:
            return _to_ray(fault(task, error))


def _to_ray(content: Any) -> _Packed:
    import numpy as np

    message = pack(content)
    return message.content, [np.asarray(part) for part in message.bulk]


def _from_ray(packed: _Packed) -> Any:
    # Ray returns read-only memory that all processes of a node share.
    return unpack(packed[0], map(copy_aligned, packed[1]))


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    why = next((line for line in lines if " because " in line), lines[-1])
    return f"its actor was lost ({why.partition(' because ')[2].partition('. ')[0] or why})"
