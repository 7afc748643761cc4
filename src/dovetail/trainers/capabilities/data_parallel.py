"""Data-parallel training in several processes, with gradients averaged over samples."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import repeat
from math import inf
from operator import attrgetter, is_, itemgetter
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from dovetail.data import Share
from dovetail.distributed import Group, PeerError, is_launched
from dovetail.errors import ConfigError
from dovetail.runtime.seeds import derive_seed
from dovetail.trainers.base import Launcher
from dovetail.trainers.capabilities.core import Capability
from dovetail.trainers.context import Stage
from dovetail.trainers.devices import check_device
from dovetail.trainers.fitting import check_kind, restoring
from dovetail.trainers.metrics import Meter
from dovetail.trainers.randomness import rng_state, seed_everything, set_rng_state
from dovetail.trainers.reading import join_positions


class DataParallel(Capability):
    """Trains in several processes that share the batches of every epoch and average their gradients.

    In every step each process computes one batch: n processes with batches of b samples make the updates of one process
    with batches of n·b. Gradients are averaged over samples (or items, if `train_step` counts them) just before they
    are clipped. So nothing is sent inside an accumulation window, and any number of optimizers and backward passes
    works. A process without a batch in the last step takes part with weight zero. Validation reads every sample once.

    With `torchrun` the processes already exist. In a plain script or a notebook, `num_processes` starts them, and
    weights, history and metrics are copied into the caller's objects.

    Args:
        num_processes: The number of processes to start; None means those that `torchrun` started, or only this one.
        max_restarts: How often a group that lost a process is restarted; it continues from the newest checkpoint.
        bucket_size: Bytes of gradients per message.

    Example:
        >>> import torch
        >>> from dovetail.trainers import Trainer
        >>> trainer = Trainer.add_on(DataParallel)(torch.nn.Linear(4, 2), "cpu", num_epochs=1, verbose=False)
        >>> history = trainer.fit((torch.randn(64, 4), torch.zeros(64, dtype=torch.long)))  # still one process
    """

    kind = "data parallel"

    num_processes: int | None
    max_restarts: int
    _bucket_size: int
    _devices: list[torch.device]
    _group: Group | None
    _turn: _StepState
    _layouts: dict[int, _Layout]

    def __init__(
        self,
        *args: Any,
        num_processes: int | None = None,
        max_restarts: int = 0,
        bucket_size: int = 25 * 2**20,
        **kwargs: Any,
    ) -> None:
        for name, value, least in (("num_processes", num_processes, 1), ("max_restarts", max_restarts, 0)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
                raise ConfigError(f"{name}: expected a whole number that is at least {least}, got {value!r}")
        self.num_processes = num_processes
        if max_restarts and num_processes is None:
            raise ConfigError("max_restarts: only processes that the trainer starts are restarted; give num_processes")
        self.max_restarts = max_restarts
        self._bucket_size = bucket_size
        self._devices = []
        self._group = None
        self._turn = _StepState()
        self._layouts = {}
        super().__init__(*args, **kwargs)

    # ------------------------------------------------------------------ once per run

    def launcher(self) -> Launcher | None:
        """Return a launcher if processes were requested and this is not one of them."""
        inner = super().launcher()
        if inner is not None or is_launched() or self.num_processes in (None, 1) or self.context.process.stays_here:
            return inner
        # Imported here, because it imports trainers.
        from dovetail.trainers.launching import ProcessLauncher

        assert self.num_processes is not None
        return ProcessLauncher(self.num_processes, self.max_restarts)

    def setup(self) -> None:
        """Join the group of processes, and copy the weights of the first process."""
        context = self.context
        if not is_launched():
            super().setup()
            return
        if context.device.type != "cpu":
            number = int(os.environ.get("LOCAL_RANK", "0"))
            context.device = self._devices[number] if self._devices else torch.device(context.device.type, number)
            check_device(context.device)
            torch.accelerator.set_device_index(context.device)
        group = self._group = Group.join(context.device)
        context.process.share = replace(context.process.share, num_replicas=group.size, rank=group.rank)
        context.process.is_main, context.process.has_peers = group.rank == 0, group.size > 1
        context.callbacks.mute(is_main=context.process.is_main)
        is_fresh = context.progress.batches == 0
        self._divide(group)
        # Before an inner layer builds a loader, whose order must be the same in all processes.
        context.state["order_seed"] = group.exchange({"seed": context.state["order_seed"]})[0]["seed"]
        super().setup()
        self._start_alike(group)
        if is_fresh and group.rank:
            # Dropout and augmentation must draw different numbers in every process.
            seed_everything(derive_seed(context.state["order_seed"], 0, group.rank, rule="rank"))
        # Drop the state of a step that an error interrupted.
        self._layouts.clear()
        self._turn, context.run.batch.is_idle = _StepState(), False

    def teardown(self, error: BaseException | None) -> None:
        """Leave the group; after an error, report it to the other processes."""
        group, context = self._group, self.context
        try:
            if group is not None and isinstance(error, Exception) and not isinstance(error, PeerError):
                group.tell_failure(error)
            super().teardown(error)
        finally:
            if group is not None:
                if isinstance(error, Exception):
                    group.leave()
                self._group = None
                done = context.progress.batch
                context.process.share = Share(start_step=done, used=context.process.share.position(done))
                # `is_main` stays: after a run, only one process writes, in `save_model` for example.
                context.process.has_peers = False

    def state_dict(self) -> dict[str, Any]:
        """Add the state that differs between processes: RNG, means of the running epoch, position in the data."""
        group = self._group
        if group is not None:
            self._copy_buffers(group)
        state = super().state_dict()
        own = {"rng": rng_state(), **{name: state[name] for name in _OWN_PARTS}}
        all_ranks = [own] if group is None else group.exchange(own)
        by_rank = {name: [each[name] for each in all_ranks] for name in own}
        return {**state, "epoch_start": join_positions(by_rank["epoch_start"]), "data_parallel": by_rank}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore this process's state; another number of processes seeds again and shares the rest of the epoch."""
        group, saved = self._group, state.get("data_parallel", {})
        check_kind({"rng": []}, {"rng": saved.get("rng", [])}, "data_parallel")
        size, rank = (1, 0) if group is None else (group.size, group.rank)
        own: dict[str, Any] = {}
        if len(saved.get("rng", ())) == size:
            own = {name: saved[name][rank] for name in _OWN_PARTS if name in saved}
        elif "meter" in saved:
            # The first process continues the sums of all, so that the mean of the epoch counts every sample once.
            own = {"meter": _sum_of(saved["meter"]) if rank == 0 else Meter().state_dict()}
        super().load_state_dict({**state, **own})
        if group is None:
            return
        if len(saved.get("rng", ())) == size:
            with restoring("data_parallel.rng"):
                set_rng_state(saved["rng"][rank])
        elif rank:
            seeds = self.context.state["order_seed"], self.context.progress.batches, rank
            seed_everything(derive_seed(*seeds, rule="rank"))

    def settle(self) -> None:
        """Exchange stop requests, so that all processes stop after the same update."""
        super().settle()
        if self._group is not None and self.context.process.has_peers:
            flags = torch.tensor(self._flags(), dtype=torch.float64)
            self._group.sum(flags)
            self._apply_stop_request(flags.tolist())

    # ------------------------------------------------------------------ once per pass

    def batches(self, stage: Stage) -> Iterable[Any]:
        """Return this process's batches; in training, as many as every other process has."""
        own, group, context = super().batches(stage), self._group, self.context
        if group is None or not context.process.has_peers:
            return own
        if stage != "train":
            self._copy_buffers(group)
            return own
        self._turn.own = inf
        return self._padded(group, own, super().num_batches(stage))

    def reduce(self, meter: Meter) -> Meter:
        """Return the sums over all processes."""
        meter = super().reduce(meter)
        if self._group is None or not self.context.process.has_peers:
            return meter
        meter.flush()
        total = Meter()
        total.load_state_dict(_sum_of(self._group.exchange({"sums": meter.sums, "counts": meter.counts})))
        return total

    def gather(self, parts: list[Any]) -> list[Any]:
        """Return the parts of all processes in the order of the batches."""
        parts = super().gather(parts)
        if self._group is None or not self.context.process.has_peers:
            return parts
        all_ranks = [each["parts"] for each in self._group.exchange({"parts": parts})]
        return [each[step] for step in range(len(all_ranks[0])) for each in all_ranks if step < len(each)]

    # ------------------------------------------------------------------ once per batch

    def to_device(self, batch: Any) -> Any:
        """Mark the batch as idle if this process has no batch left."""
        if self.context.progress.batch >= self._turn.own and self.context.stage == "train":
            self._turn.randomness = rng_state()
            self.context.run.batch.is_idle = True
            if not self.context.run.window.closes:
                self._store_gradients()
        return super().to_device(batch)

    def clip_gradients(self, optimizer: Optimizer) -> None:
        """Average the gradients over all processes, then clip."""
        group = self._group
        if group is not None:
            self._average(group, optimizer)
        super().clip_gradients(optimizer)

    def after_step(self, output: Mapping[str, Any]) -> None:
        """Count the samples of all processes, and stop if any of them received a stop request."""
        super().after_step(output)
        group = self._group
        if group is None:
            return
        context, turn = self.context, self._turn
        notes = context.run.batch
        if context.progress.batch >= turn.own:
            notes.num_samples, notes.is_idle = 0, False
            # Restore the RNG: an idle batch must not consume random numbers.
            set_rng_state(turn.randomness)
        if not context.run.window.closes:
            turn.samples += notes.num_samples
            notes.num_records = 0
            return
        if turn.extras is None:
            # No optimizer stepped, in any process.
            extras = torch.tensor([turn.samples + notes.num_samples, *self._flags()], dtype=torch.float64)
            group.sum(extras)
            turn.extras = extras.tolist()
        records, *flags = turn.extras
        turn.samples, turn.extras, turn.gradients = 0, None, None
        notes.num_records = round(records)
        if flags[0]:
            self._apply_stop_request(flags)

    # ------------------------------------------------------------------ private

    def _padded(self, group: Group, own: Iterable[Any], total: int | None) -> Iterator[Any]:
        """Yield this process's batches, and while others have more, the last batch again, with weight zero."""
        batches, step, turn = iter(own), self.context.progress.batch, self._turn
        batch = next(batches, _END)
        # If all processes agreed on the number of steps, and more than one is left, each still has a batch.
        knows_total = total is not None and total == turn.agreed and total - step > 1
        if not knows_total:
            all_ranks = group.exchange({"has": batch is not _END, "total": total})
            if not all_ranks[0]["has"]:
                return
            if not all(each["has"] for each in all_ranks):
                # Fewer batches than processes: a process without one computes with the first process's batch.
                lent = group.exchange({"batch": batch if group.rank == 0 else None})[0]["batch"]
                if batch is _END:
                    turn.own, batch = step, lent
            knows_total = total is not None and all(each["total"] == total for each in all_ranks)
            turn.agreed = total if knows_total else None
        while True:
            yield batch
            step += 1
            fresh = next(batches, _END)
            if fresh is _END:
                turn.own = min(turn.own, step)
            else:
                batch = fresh
            if step == total if knows_total else not _any(group, fresh is not _END):
                return

    def _divide(self, group: Group) -> None:
        """Give every process its part of the model, before optimizers are built. Here each process has all of it."""

    def _start_alike(self, group: Group) -> None:
        """Copy the weights of the first process to all others."""
        model = self.context.model
        assert model is not None
        with torch.no_grad():
            group.copy_first([*model.parameters(), *model.buffers()])

    def _store_gradients(self) -> None:
        """Store the gradients of the running window, before an idle batch with weight zero adds to them."""
        window, turn = self.context.run.window, self._turn
        if turn.gradients is None:
            trained = [it for each in self.context.optimizers for group in each.param_groups for it in group["params"]]
            # The same division as at the end of the window, by the items that count.
            factor = window.correction
            turn.gradients = [(it, None if it.grad is None else it.grad * factor) for it in trained]
            turn.items = window.items

    def _copy_buffers(self, group: Group) -> None:
        model = self.context.model
        if model is not None:
            with torch.no_grad():
                group.copy_first(model.buffers())

    def _average(self, group: Group, optimizer: Optimizer) -> None:
        """Average an optimizer's gradients over all processes; counts and stop flags are sent in the same message."""
        context, turn = self.context, self._turn
        layout = self._layouts.get(id(optimizer))
        if layout is None or layout.optimizer is not optimizer or not layout.is_whole:
            layout = self._layouts[id(optimizer)] = _Layout(optimizer, self._bucket_size)
        if context.progress.batch >= turn.own:
            weight, samples = 0, turn.samples
            if turn.gradients is not None:
                weight = turn.items
                for parameter, gradient in turn.gradients:
                    parameter.grad = gradient
        else:
            weight = context.run.window.items if context.run.window.size > 1 else context.run.num_items
            samples = turn.samples + context.run.batch.num_samples
        flags = _NO_STOP_REQUEST if context.run.stop_request is None else self._flags()
        extras = layout.average(group, weight, [samples, *flags])
        context.run.batch.num_averaged = layout.weight
        if turn.extras is None:
            turn.extras = extras

    def _flags(self) -> list[float]:
        """Return whether this process received a stop request, by SIGINT, by SIGTERM, as numbers."""
        request = self.context.run.stop_request
        number = None if request is None else request[1]
        return [request is not None, number == signal.SIGINT, number == signal.SIGTERM]

    def _apply_stop_request(self, flags: Sequence[float]) -> None:
        """End training in every process, with the reason of the first process that has one."""
        context, group = self.context, self._group
        if not flags[0] or context.run.stop_reason is not None:
            return
        assert group is not None
        requests = [each["request"] for each in group.exchange({"request": context.run.stop_request})]
        reason = next(request[0] for request in requests if request is not None)
        number = signal.SIGINT if flags[1] else signal.SIGTERM if flags[2] else None
        context.run.end(reason, None if number is None else int(number))


class _StepState:
    """State of this process in the running step."""

    __slots__ = ("agreed", "extras", "gradients", "items", "own", "randomness", "samples")

    def __init__(self) -> None:
        # The steps of an epoch, if all processes reported the same number.
        self.agreed: int | None = None
        # Number of steps for which this process has batches.
        self.own: float = inf
        # Samples of the batches of the running accumulation window before this one.
        self.samples = 0
        # Gradients and items of the running window, if this process has batches for only a part of it.
        self.gradients: list[tuple[Tensor, Tensor | None]] | None = None
        self.items: Any = 0
        # The RNG state before an idle batch.
        self.randomness: Any = None
        # Sums of the numbers that were sent with the first gradients of the running step.
        self.extras: list[float] | None = None


class _Layout:
    """The positions of an optimizer's gradients in the few flat tensors that are summed.

    Optimized for the step of a small model, in which every Python call counts: `map` and `operator` make none.
    """

    def __init__(self, optimizer: Optimizer, bucket_size: int, num_extras: int = 4) -> None:
        self.optimizer = optimizer
        self.parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self.num_trained = sum(map(_REQUIRES_GRAD, self.parameters))
        # The weight of all processes in the last average.
        self.weight = 0.0
        kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for parameter in self.parameters:
            if parameter.requires_grad:
                kinds.setdefault((parameter.dtype, parameter.device), []).append(parameter)
        buckets: list[list[Tensor]] = []
        for parameters in kinds.values():
            room = 0
            for parameter in parameters:
                if room < parameter.nbytes:
                    buckets.append([])
                    room = bucket_size
                buckets[-1].append(parameter)
                room -= parameter.nbytes
        self.buckets = [_Bucket(parameters, num_extras) for parameters in buckets]

    @property
    def is_whole(self) -> bool:
        """True if no parameter was frozen, unfrozen or added since the layout was built."""
        groups = self.optimizer.param_groups
        return sum(map(len, map(_PARAMS, groups))) == len(self.parameters) and self.num_trained == sum(
            map(_REQUIRES_GRAD, self.parameters)
        )

    def average(self, group: Group, weight: Any, extras: list[float]) -> list[float]:
        """Replace every gradient by the mean over all processes, and return the sums of `extras`."""
        sums = []
        for bucket in self.buckets:
            gradients, has = list(map(_GRAD, bucket.parameters)), bucket.has_all
            if any(map(is_, gradients, repeat(None))) or any(map(_IS_SPARSE, gradients)):
                has = [float(gradient is not None) for gradient in gradients]
                gradients = [_dense(gradient, part) for gradient, part in zip(gradients, bucket.parts, strict=True)]
            if not isinstance(weight, Tensor) and weight == 0:
                # Not multiplied by zero: a gradient of an idle process may be infinite.
                bucket.flat.zero_()
            elif bucket.is_exact:
                for gradient, part in zip(gradients, bucket.parts, strict=True):
                    torch.mul(gradient, weight, out=part)
            else:
                for gradient, part in zip(gradients, bucket.parts, strict=True):
                    part.copy_(gradient).mul_(weight)
            bucket.tail.copy_(torch.tensor([*has, *extras, 0.0], dtype=bucket.tail.dtype))
            bucket.tail[-1] = weight
            sums += bucket.sums
        if not sums:
            summed = torch.tensor(extras, dtype=torch.float64)
            group.sum(summed)
            return cast("list[float]", summed.tolist())
        group.sum(*sums)
        numbers: list[float] = []
        for bucket in self.buckets:
            *numbers, self.weight = bucket.tail.tolist()
            bucket.gradients.div_(self.weight or 1.0)
            for parameter, part, count in zip(bucket.parameters, bucket.parts, numbers, strict=False):
                # A parameter that no process used has no gradient, as in a single process.
                parameter.grad = (part if bucket.is_exact else part.to(parameter.dtype)) if count else None
            numbers = numbers[len(bucket.parameters) :]
        return numbers


class _Bucket:
    """Gradients of some parameters in one flat tensor, followed by the numbers that are sent with them.

    Afterwards the gradients of the parameters are views of this tensor, which the next average overwrites, as with
    torch's `gradient_as_bucket_view`.
    """

    def __init__(self, parameters: list[Tensor], num_extras: int) -> None:
        first = parameters[0]
        dtype = torch.promote_types(first.dtype, torch.float32)
        sizes = [parameter.numel() for parameter in parameters]
        num_numbers = len(parameters) + num_extras + 1
        self.parameters = parameters
        # Sums in half precision would lose too much.
        self.is_exact = dtype == first.dtype
        self.has_all = [1.0] * len(parameters)
        if first.device.type == "cpu":
            self.flat = torch.empty(sum(sizes) + num_numbers, dtype=dtype)
            self.gradients, self.tail = torch.split(self.flat, [sum(sizes), num_numbers])
            self.sums = [self.flat]
        else:
            # The host needs these numbers: as a separate tensor they do not wait for the device.
            self.flat = self.gradients = torch.empty(sum(sizes), dtype=dtype, device=first.device)
            self.tail = torch.empty(num_numbers, dtype=dtype)
            self.sums = [self.flat, self.tail]
        parts = torch.split(self.gradients, sizes)
        self.parts = [part.view_as(parameter) for part, parameter in zip(parts, parameters, strict=True)]


_GRAD, _REQUIRES_GRAD, _IS_SPARSE = attrgetter("grad"), attrgetter("requires_grad"), attrgetter("is_sparse")
_PARAMS = itemgetter("params")
_NO_STOP_REQUEST = (0.0, 0.0, 0.0)


def _any(group: Group, holds: bool) -> bool:
    count = torch.tensor([holds], dtype=torch.float32)
    group.sum(count)
    return bool(count.item())


_END = object()

# Parts of a trainer's state that differ between the processes of a group.
_OWN_PARTS = ("meter", "epoch_start")


def _sum_of(meters: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the state of a meter with the sums and counts of several meters, without single values."""
    sums: dict[str, float] = {}
    counts: dict[str, float] = {}
    for each in meters:
        for name, value in each["sums"].items():
            sums[name] = sums.get(name, 0.0) + value
            counts[name] = counts.get(name, 0) + each["counts"][name]
    return {"sums": sums, "counts": counts, "values": {}}


def _dense(gradient: Tensor | None, part: Tensor) -> Tensor:
    if gradient is None:
        return torch.zeros_like(part)
    return gradient.to_dense() if gradient.is_sparse else gradient
