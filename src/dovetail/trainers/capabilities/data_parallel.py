"""Data-parallel training in several processes, with gradients averaged over samples."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from math import inf
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from dovetail.accelerators import device_of_process
from dovetail.data import Share
from dovetail.distributed import Group, PeerError, is_launched, own_part
from dovetail.errors import ConfigError
from dovetail.runtime.seeds import derive_seed
from dovetail.trainers.base import Launcher
from dovetail.trainers.capabilities.auto_batch import AutoBatch
from dovetail.trainers.capabilities.compression import Compression, as_compression
from dovetail.trainers.capabilities.core import Capability
from dovetail.trainers.capabilities.exchanges import Exchanges
from dovetail.trainers.capabilities.idle import IdleBatch, IdleWindow, different_lengths, is_set_anywhere, lent_batch
from dovetail.trainers.capabilities.metric_groups import MetricGroups
from dovetail.trainers.capabilities.outside import copy_criterion, copy_trained
from dovetail.trainers.capabilities.step_state import StepState
from dovetail.trainers.capabilities.timed import Timed
from dovetail.trainers.capabilities.trainable import check_weights
from dovetail.trainers.context import Stage
from dovetail.trainers.counts import TOKEN_UNIT, join_on_device, whole_number
from dovetail.trainers.devices import check_device
from dovetail.trainers.fitting import check_kind, restoring
from dovetail.trainers.metrics import Meter
from dovetail.trainers.preserve_state import layers
from dovetail.trainers.randomness import rng_state, seed_everything, set_rng_state
from dovetail.trainers.reading import join_positions
from dovetail.trainers.synced_norm import NormSync
from dovetail.units import Tokens


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
        bucket_size: The largest number of bytes of gradients in a message.
        compression: The form in which gradients are sent: None (in full), "bf16", "fp16", "powersgd", or
            `PowerSGD(rank, warm_up)`.
        sync_batchnorm: True to normalise by the batches of all processes in `nn.BatchNorm`, in training, on any device.

    Example:
        >>> import torch
        >>> from dovetail.trainers import Trainer
        >>> trainer = Trainer.add_on(DataParallel)(torch.nn.Linear(4, 2), "cpu", num_epochs=1, verbose=False)
        >>> history = trainer.fit((torch.randn(64, 4), torch.zeros(64, dtype=torch.long)))  # still one process
    """

    kind = "data parallel"

    num_processes: int | None
    max_restarts: int
    _syncs_norms: bool
    _norm_sync: NormSync | None
    _is_compressed: bool
    _devices: list[torch.device]
    _group: Group | None
    _turn: StepState
    _exchanges: Exchanges
    _metric_groups: MetricGroups

    def __init__(
        self,
        *args: Any,
        num_processes: int | None = None,
        max_restarts: int = 0,
        bucket_size: int = 25 * 2**20,
        compression: str | Compression | None = None,
        sync_batchnorm: bool = False,
        **kwargs: Any,
    ) -> None:
        for name in sorted({"mesh", "parallelize"} & kwargs.keys()):
            raise ConfigError(
                f"{name}: {type(self).__name__} copies the whole model into every process; FSDPTrainer divides it, "
                'with mesh={"replicate": 2, "shard": 1, "tensor": 2} for copies of a tensor-parallel model'
            )
        for name, value, least in (("num_processes", num_processes, 1), ("max_restarts", max_restarts, 0)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
                raise ConfigError(f"{name}: expected a whole number that is at least {least}, got {value!r}")
        self.num_processes = num_processes
        if max_restarts and num_processes is None:
            raise ConfigError("max_restarts: only processes that the trainer starts are restarted; give num_processes")
        self.max_restarts = max_restarts
        if not isinstance(sync_batchnorm, bool):
            raise ConfigError(f"sync_batchnorm: expected True or False, got {sync_batchnorm!r}")
        self._syncs_norms, self._norm_sync = sync_batchnorm, None
        form = as_compression(compression)
        self._is_compressed = form is not None
        self._devices = []
        self._group = None
        self._turn = StepState()
        super().__init__(*args, **kwargs)
        self._exchanges = Exchanges(self.context, bucket_size, form)
        self._metric_groups = MetricGroups()

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
            own = self._devices[number] if self._devices else device_of_process(context.device.type, number)
            check_device(own, number)
            context.device = own
            torch.accelerator.set_device_index(context.device)
        group = self._group = self._data_group(Group.join(context.device))
        everyone = group.everyone
        context.process.share = replace(context.process.share, num_replicas=group.size, rank=group.rank)
        context.process.is_main, context.process.has_peers = everyone.rank == 0, everyone.size > 1
        context.process.num_processes = everyone.size
        context.callbacks.mute(is_main=context.process.is_main)
        is_fresh = context.progress.batches == 0
        check_weights(context.model)
        self._divide(group)
        # Before an inner layer builds a loader, whose order must be the same in all processes.
        context.state["order_seed"] = group.exchange({"seed": context.state["order_seed"]})[0]["seed"]
        super().setup()
        self._metric_groups.set(group, context.run.metrics.values())
        self._start_alike(group)
        copy_criterion(group, context.model, self.criterion)
        if self._syncs_norms and group.size > 1 and context.model is not None:
            assert context.run.trainer is not None
            if any(isinstance(layer, AutoBatch) for layer in layers(context.run.trainer)):
                raise ConfigError(
                    "sync_batchnorm: a process whose AutoBatch layer cuts a batch would compute more often than the "
                    "others, and all would wait for each other; leave out one of the two"
                )
            self._norm_sync = NormSync(group, context, self._loss_weight)
            self._norm_sync.install(context.model)
        if is_fresh and group.rank:
            # Dropout and augmentation must draw different numbers in every process.
            seed_everything(derive_seed(context.state["order_seed"], 0, group.rank, rule="rank"))
        # Drop the state of a step that an error interrupted.
        self._exchanges.start_run(is_fresh=is_fresh)
        self._turn, context.run.batch.is_idle = StepState(), False

    def teardown(self, error: BaseException | None) -> None:
        """Leave the group; after an error, report it to the other processes."""
        group, context = self._group, self.context
        try:
            if group is not None and isinstance(error, Exception) and not isinstance(error, PeerError):
                group.tell_failure(error)
            super().teardown(error)
        finally:
            if self._norm_sync is not None:
                self._norm_sync.remove()
                self._norm_sync = None
            self._metric_groups.restore()
            if group is not None:
                self._exchanges.leave()
                if isinstance(error, Exception):
                    group.leave()
                self._group = None
                done = context.progress.batch
                context.process.share = Share(start_step=done, used=context.process.share.position(done))
                # `is_main` stays: after a run, only one process writes, in `save_model` for example.
                context.process.has_peers, context.process.num_processes = False, 1

    def state_dict(self) -> dict[str, Any]:
        """Add the state that differs between processes: RNG, means of the running epoch, position in the data."""
        group = self._group
        if group is not None:
            self._copy_buffers(group)
        state = super().state_dict()
        own = {"rng": rng_state(), **{name: state[name] for name in _OWN_PARTS}}
        if self._is_compressed:
            own["compression"] = self._exchanges.compression_state()
        all_ranks = [own] if group is None else group.exchange(own)
        by_rank = {name: [each[name] for each in all_ranks] for name in own}
        # For a trainer without this layer, which continues the epoch of all processes.
        meter = {**_sum_of(by_rank["meter"]), "values": state["meter"]["values"]}
        epoch_start = join_positions(by_rank["epoch_start"])
        return {**state, "meter": meter, "epoch_start": epoch_start, "data_parallel": by_rank}

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
        if self._is_compressed and "compression" in saved:
            with restoring("data_parallel.compression"):
                self._exchanges.load_compression_state(saved["compression"], rank, size)
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
        group = self._group
        if group is not None and self.context.process.has_peers:
            # Everything that reads the model after the run reads it in the first process.
            is_behind = self.context.process.is_main and self._turn.was_idle
            *flags, has_old_buffers = group.sum_with_events([], [*self._flags(), is_behind])[1]
            if has_old_buffers:
                self._copy_buffers(group)
            self._apply_stop_request(flags)

    # ------------------------------------------------------------------ once per pass

    def batches(self, stage: Stage) -> Iterable[Any]:
        """Return this process's batches; in training, as many as every other process has."""
        own, group, context = super().batches(stage), self._group, self.context
        if group is None or not context.process.has_peers:
            return own
        if stage != "train":
            self._copy_buffers(group)
            return own
        self._turn.own, self._turn.was_idle = inf, False
        if not self._turn.is_alike:
            # Not in `setup`, because strategies may prepare the inputs of an optimizer after it.
            copy_trained(group, context.model, context.optimizers)
            self._turn.is_alike = True
        self._prepare_exchanges(group)
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
        # With a stream, any process may have the most batches. Divided data has one batch for each process in turn.
        num_steps = max(map(len, all_ranks))
        return [each[step] for step in range(num_steps) for each in all_ranks if step < len(each)]

    # ------------------------------------------------------------------ once per batch

    def to_device(self, batch: Any) -> Any:
        """Mark the batch as idle if this process has no batch left."""
        if self.context.progress.batch >= self._turn.own and self.context.stage == "train":
            # The processes update the statistics of synchronised norms alike.
            kinds = () if self._norm_sync is None else _BatchNorm
            modules = (it for root in self._modules() for it in root.modules() if not isinstance(it, kinds))
            self._turn.before = IdleBatch(modules)
            self.context.run.batch.is_idle = True
            # The loop has not started the batch yet: if the last window is closed, this batch opens one.
            if self.context.run.window.closes:
                self._turn.is_empty = True
            elif not self._turn.is_empty:
                self._store_gradients()
        return super().to_device(batch)

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Compute the gradients; in the loop's own backward pass of an update, send those that are complete."""
        run, turn = self.context.run, self._turn
        window = run.window
        exchanges = self._exchanges
        # Not before the last backward pass: a step by hand may call it several times, and a window has several batches.
        is_last = window.closes and not run.batch.optimized
        if turn.idle is not None:
            with turn.idle.dropping():
                super().backward(loss, **kwargs)
            return
        if not exchanges.overlapping or kwargs or not is_last:
            super().backward(loss, **kwargs)
            return
        weight, factor = window.items if window.size > 1 else run.num_items, None
        if window.size > 1 and (isinstance(window.correction, Tensor) or window.correction != 1.0):
            factor = window.correction
        if turn.is_empty:
            weight = None
        exchanges.open(weight, factor)
        try:
            super().backward(loss)
        finally:
            exchanges.close()

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
            notes.num_samples, notes.num_tokens, notes.is_idle, turn.was_idle = 0, 0, False, True
            if turn.before is not None:
                turn.before.restore()
        if not context.run.window.closes:
            turn.samples += notes.num_samples
            turn.tokens = turn.tokens + whole_number(notes.num_tokens)
            notes.num_records = notes.num_tokens = 0
            return
        # A step that calls `context.backward` returns its tokens after the gradients were sent.
        late = whole_number(notes.num_tokens) if notes.optimized and turn.extras is not None else 0
        if turn.extras is None:
            # No optimizer stepped, in any process.
            counts = turn.samples + notes.num_samples, int(turn.tokens) + int(notes.num_tokens)
            (samples, tokens), flags = group.sum_with_events(counts, self._flags())
            turn.extras = [samples, *flags, 0, tokens]
        records, *flags, high, low = turn.extras
        turn.samples, turn.tokens, turn.extras, turn.idle, turn.is_empty = 0, late, None, None, False
        notes.num_records, on_device = round(records), isinstance(high, Tensor)
        notes.num_tokens = join_on_device(high, low) if on_device else round(high) * TOKEN_UNIT + round(low)
        if notes.optimized and self._plans_by_tokens():
            # Otherwise these tokens are sent with the next update.
            sums = torch.tensor([int(late)], dtype=torch.int64)
            group.sum(sums)
            turn.tokens, notes.num_tokens = 0, notes.num_tokens + int(sums)
        # The loop does not stop at the end of its data, and all processes must stop together.
        if flags[0] and context.progress.batch + 1 not in turn.ends:
            self._apply_stop_request(flags)

    # ------------------------------------------------------------------ private

    def _padded(self, group: Group, own: Iterable[Any], total: int | None) -> Iterator[Any]:
        """Yield this process's batches, and while others have more, the last batch again, with weight zero."""
        batches, step, turn = iter(own), self.context.progress.batch, self._turn
        batch = next(batches, _END)
        # If all processes agreed on the number of steps, and more than one is left, each still has a batch.
        knows_total = total is not None and total == turn.agreed and total - step > 1
        # Compared in every epoch: a sampler may have another length in each, and in one process only.
        if turn.agreed is None or is_set_anywhere(group, not knows_total):
            all_ranks = group.exchange({"has": batch is not _END, "total": total})
            turn.ends = different_lengths(self.context, [each["total"] for each in all_ranks])
            have = [each["has"] for each in all_ranks]
            if not any(have):
                return
            if not all(have):
                # Fewer batches than processes: a process without one computes with another one's batch.
                lent = lent_batch(group, batch, have)
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
            if step == total if knows_total else not is_set_anywhere(group, fresh is not _END):
                return

    def _data_group(self, group: Group) -> Group:
        """Return the group whose ranks divide the data. Here every process has its own batches."""
        return group

    def _divide(self, group: Group) -> None:
        """Give every process its part of the model, before optimizers are built. Here each process has all of it."""

    def _start_alike(self, group: Group) -> None:
        """Copy the weights of the first process to all others."""
        model = self.context.model
        assert model is not None
        with torch.no_grad():
            group.copy_first([*model.parameters(), *model.buffers()])

    def _loss_weight(self) -> Any:
        """Return the weight of the loss of this process in the average of the gradients, up to a common factor."""
        window = self.context.run.window
        return window.expected if window.size > 1 else self.context.run.num_items

    def _store_gradients(self) -> None:
        """Store the gradients of the running window, before an idle batch with weight zero adds to them."""
        if self._turn.idle is None:
            self._turn.idle = IdleWindow(self.context.run.window, self.context.optimizers)

    def _modules(self) -> list[nn.Module]:
        """Return the model, and the criterion if it is a module."""
        return [it for it in (self.context.model, self.criterion) if isinstance(it, nn.Module)]

    def _copy_buffers(self, group: Group) -> None:
        """Copy the buffers of the first process that had a batch in the last step: they count the most batches."""
        buffers = [own_part(it) for module in self._modules() for it in module.buffers()]
        if buffers:
            are_idle = [each["idle"] for each in group.everyone.exchange({"idle": self._turn.was_idle})]
            with torch.no_grad():
                group.copy_from(are_idle.index(False), buffers)
        self._turn.was_idle = False

    def _average(self, group: Group, optimizer: Optimizer) -> None:
        """Average an optimizer's gradients over all processes; counts and stop flags are sent in the same message."""
        context, turn = self.context, self._turn
        weight: Any = None
        if context.progress.batch >= turn.own:
            samples, tokens = turn.samples, turn.tokens
            if turn.idle is not None:
                weight = turn.idle.items
                turn.idle.restore(optimizer)
        else:
            weight = context.run.window.items if context.run.window.size > 1 else context.run.num_items
            samples = turn.samples + context.run.batch.num_samples
            own = context.run.batch.num_tokens
            # Without a call in the usual case, because calls count in the step of a small model.
            tokens = turn.tokens + (own if type(own) is int else whole_number(own))
        flags = _NO_STOP_REQUEST if context.run.stop_request is None else self._flags()
        counts = [samples, *flags, tokens // TOKEN_UNIT, tokens % TOKEN_UNIT]
        exchanges, extras = self._exchanges, None
        exchange = exchanges.by_optimizer.get(id(optimizer))
        if exchange is not None and exchange.optimizer is optimizer and not self._is_compressed:
            # Without the call below, which counts in the step of a small model.
            extras, context.run.batch.num_averaged = exchange.average(group, weight, counts), exchange.weight
        if extras is None:
            extras, context.run.batch.num_averaged = exchanges.average(
                group, optimizer, weight, counts, self._can_overlap
            )
        if turn.extras is None:
            turn.extras = extras

    def _plans_by_tokens(self) -> bool:
        """Return whether the length or a period of the run is in tokens."""
        plan = self.context.run.plan
        return plan is not None and any(isinstance(it, Tokens) for it in (plan.max_length, plan.validate, plan.save))

    def _prepare_exchanges(self, group: Group) -> None:
        """Let the gradients of the first batch travel in its backward pass."""
        self._exchanges.prepare(group, self._can_overlap)

    def _can_overlap(self) -> bool:
        """Return whether only the library's code runs between the end of a gradient and its average."""
        trainer = self.context.run.trainer
        assert trainer is not None
        # Verbs outside of this layer run before the average; a backward pass of the user may change its gradients.
        outside = takewhile(lambda it: not issubclass(it, DataParallel), trainer._customized_by("clip_gradients"))
        changing = {*trainer._customized_by("backward"), *outside} - {DataParallel, Timed}
        replaced = [it for it in layers(trainer) if vars(it).keys() & {"backward", "clip_gradients"}]
        return not changing and not replaced

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
        requests = [each["request"] for each in group.everyone.exchange({"request": context.run.stop_request})]
        reason = next(request[0] for request in requests if request is not None)
        number = signal.SIGINT if flags[1] else signal.SIGTERM if flags[2] else None
        context.run.end(reason, None if number is None else int(number))


_NO_STOP_REQUEST = (0.0, 0.0, 0.0)


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
