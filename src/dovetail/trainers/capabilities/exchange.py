"""Exchange of gradients between processes: buckets that are summed while the backward pass still runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import chain, repeat
from operator import attrgetter, is_, is_not, itemgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from dovetail.distributed import Group
from dovetail.trainers.capabilities.compression import Codec, Compression
from dovetail.trainers.counts import put
from dovetail.trainers.window import positive

# Bytes of the first bucket: it is sent when the last layers of the model have their gradients.
_FIRST_BUCKET = 2**20
# The sums that are sent with the gradients: samples, stop request, SIGINT, SIGTERM, tokens (two parts), gradients of
# frozen parameters, and early buckets that changed.
_NUM_EXTRAS = 8
# Those of them that are tensors of the device if the batch is on one: both parts of the tokens.
_TOKENS = slice(4, 6)


class GradientExchange:
    """Averages the gradients of one optimizer over all processes, weighted by items.

    Every process sends the same buckets in the same order: the order of the parameters in the model, from the last to
    the first, which is about the order in which the backward pass completes their gradients. A bucket can be sent at
    any time, so a process sends early what it knows to be complete, and the rest in `average`:

    * between `open` and `close`, a hook of each parameter counts the gradients of a bucket, and sends the bucket when
      it and all buckets before it are complete;
    * `average` checks that no gradient or weight has changed since it was sent, and sends the remaining buckets. The
      last bucket is never sent early. It also has the number of processes in which a sent gradient changed: if there
      are any, all processes send the early buckets again, and such a process sends nothing early from then on.

    A parameter that the model has not used in this process so far is not waited for. Therefore the result does not
    depend on what was sent early.

    The code is optimized for the step of a small model, in which every Python call counts: `map` and `operator` make
    none.

    Args:
        optimizer: The optimizer of the parameters.
        order: The parameters of the model.
        bucket_size: The largest number of bytes of a message, except for a parameter that is larger.
        compression: The form in which gradients are sent, or None.
        unit: About the weight of all processes, if the compression needs it.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        order: Iterable[Tensor],
        bucket_size: int,
        compression: Compression | None = None,
        unit: float = 1.0,
    ) -> None:
        self.optimizer = optimizer
        self.parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        # Not their number: as many may be frozen as unfrozen.
        self.is_trained = list(map(_REQUIRES_GRAD, self.parameters))
        # They may have gradients: frozen after a backward pass, they are stepped once more.
        self.frozen = [parameter for parameter in self.parameters if not parameter.requires_grad]
        # The weight of all processes in the last average: a tensor if the gradients are on an accelerator.
        self.weight: Any = 0.0
        self.unit = unit
        # Set for each update: some forms of compression start later.
        self.is_compressed = False
        self.buckets = _make_buckets(_in_order(self.parameters, order), bucket_size)
        if compression is not None:
            first = 0
            for bucket in self.buckets:
                parts = [torch.view_as_real(part) if part.is_complex() else part for part in bucket.parts]
                bucket.codec = compression.codec(parts, bucket.gradients, unit, first)
                first += len(bucket.parts)
        self._channel: dist.ProcessGroup | None = None
        self._hooks: list[Any] = []
        self._is_open = False
        self._is_first = True
        # The weight of this process, the factor of an accumulation window, and the number of buckets sent so far.
        self._sent_weight: Any = 0
        self._factor: Any = None
        self._num_sent = 0
        self._failure: RuntimeError | None = None

    @property
    def is_whole(self) -> bool:
        """True if no parameter was frozen, unfrozen, added or replaced since the buckets were made."""
        present = list(chain.from_iterable(map(_PARAMS, self.optimizer.param_groups)))
        return list(map(_REQUIRES_GRAD, present)) == self.is_trained and all(map(is_, present, self.parameters))

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the compression, by parameter."""
        codecs = [bucket.codec for bucket in self.buckets if bucket.codec is not None]
        return {"unit": self.unit, "parameters": [state for codec in codecs for state in codec.state()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of the compression; the state of another number of parameters is ignored."""
        states = list(state["parameters"])
        if len(states) == sum(len(bucket.parts) for bucket in self.buckets):
            for bucket in self.buckets:
                assert bucket.codec is not None
                bucket.codec.load(states[: len(bucket.parts)])
                del states[: len(bucket.parts)]

    def continue_from(self, earlier: GradientExchange) -> None:
        """Take over the state of the compression from an exchange of the same optimizer, by parameter."""
        states: dict[Tensor, Mapping[str, Tensor]] = {}
        for bucket in earlier.buckets:
            if bucket.codec is not None:
                states.update(zip(bucket.parameters, bucket.codec.state(), strict=True))
        for bucket in self.buckets:
            if bucket.codec is not None:
                bucket.codec.load([states.get(parameter, {}) for parameter in bucket.parameters])

    @property
    def overlaps(self) -> bool:
        """True if gradients can be sent while the backward pass runs."""
        return bool(self._hooks)

    # ------------------------------------------------------------------ during the backward pass

    def prepare_overlap(self, group: Group) -> bool:
        """Register hooks if there are several buckets, and return whether there are. A collective call."""
        if len(self.buckets) < 2:
            return False
        # A separate group: collective calls of user code in a backward pass cannot get between two buckets.
        self._channel = group.new_channel()
        for bucket in self.buckets[:-1]:
            for number, parameter in enumerate(bucket.parameters):
                register: Any = parameter.register_post_accumulate_grad_hook
                self._hooks.append(register(self._hook(bucket, number)))
        return True

    def stop_overlap(self) -> None:
        """Remove the hooks: every bucket is sent after the backward pass."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._is_open = [], False

    def leave(self) -> None:
        """Remove the hooks and close the separate group."""
        self.stop_overlap()
        if self._channel is not None and dist.is_initialized():
            dist.destroy_process_group(self._channel)
        self._channel = None

    def open(self, weight: Any, factor: Any) -> None:
        """Send buckets from now on when they are complete.

        Args:
            weight: The weight of this process's gradients; None if it has no batch, and its gradients do not count.
            factor: The factor by which the accumulation window will multiply the gradients, or None.
        """
        # Buckets of an earlier pass are checked, and sent again, by `average`.
        if self._hooks and self._num_sent == 0 and self.is_whole:
            self._sent_weight, self._factor, self._is_open = weight, factor, True
            for bucket in self.buckets:
                bucket.num_missing = sum(bucket.is_used)

    def close(self) -> None:
        """Send nothing more before `average`."""
        self._is_open = False

    def _hook(self, bucket: Bucket, number: int) -> Callable[[Tensor], None]:
        def count(parameter: Tensor) -> None:
            if not bucket.is_used[number]:
                bucket.is_used[number] = True
            elif self._is_open:
                bucket.num_missing -= 1
                if bucket.num_missing == 0:
                    self._send_complete()

        return count

    def _send_complete(self) -> None:
        """Send the next buckets that are complete; the last one waits for `average`."""
        for bucket in self.buckets[self._num_sent : -1]:
            if bucket.num_missing:
                return
            if not bucket.is_plain:
                self._is_open = False
                return
            bucket.note_gradients()
            bucket.fill(self._sent_weight, self._factor, [0.0] * _NUM_EXTRAS)
            try:
                bucket.send(self._channel, self._sent_weight, is_compressed=self.is_compressed)
            except RuntimeError as error:
                # Raised by `average`: an error of a hook would be reported as an error of the user's model.
                self._failure, self._is_open = error, False
                return
            self._num_sent += 1

    # ------------------------------------------------------------------ after it

    def average(self, group: Group, weight: Any, extras: list[Any]) -> list[Any] | None:
        """Replace every gradient by the mean over all processes, and return the sums of `extras`.

        The weight is as in `open`. On an accelerator, the sums of tokens and weights are tensors, because reading them
        would wait for the device. None means that parameters were frozen, unfrozen, added or replaced, so that new
        buckets are necessary.
        """
        buckets = self.buckets
        # As `is_whole`, without its call.
        present = list(chain.from_iterable(map(_PARAMS, self.optimizer.param_groups)))
        if list(map(_REQUIRES_GRAD, present)) != self.is_trained or not all(map(is_, present, self.parameters)):
            return None
        extras = [*extras, 0.0, 0.0]
        if self.frozen and weight is not None:
            extras[-2] = float(sum(map(is_not, map(_GRAD, self.frozen), repeat(None))))
        if self._channel is None and buckets and not self.is_compressed:
            # A small model: one bucket and few calls.
            for bucket in buckets:
                bucket.fill(weight, None, extras)
                try:
                    for message in bucket.messages:
                        dist.all_reduce(message, group=group.connections)
                except RuntimeError as error:
                    raise group.lost() from error
                if bucket.device_numbers is not None:
                    self.weight = bucket.receive(divides=True)
                    continue
                *bucket.counts, self.weight = bucket.tail.tolist()
                bucket.gradients.div_(self.weight or 1.0)
        elif buckets:
            self._sum_buckets(group, weight, extras)
        else:
            summed = torch.tensor([float(it) for it in extras], dtype=torch.float64)
            group.sum(summed)
            sums: list[Any] = summed.tolist()
        if buckets:
            sums = buckets[-1].counts[-_NUM_EXTRAS:]
            if buckets[-1].device_numbers is not None:
                sums[_TOKENS] = buckets[-1].device_numbers[:-1]
        for bucket in buckets if not sums[-2] else [*buckets, *self._sum_frozen(group, weight)]:
            bucket.sent = []
            for parameter, part, number in zip(bucket.parameters, bucket.parts, bucket.counts, strict=False):
                # A parameter that no process used has no gradient, as in a single process.
                parameter.grad = (part if bucket.is_exact else part.to(parameter.dtype)) if number else None
        return sums[:-2]

    def _sum_frozen(self, group: Group, weight: Any) -> list[Bucket]:
        """Return the averages of the gradients that frozen parameters have in some process."""
        buckets = _make_buckets(self.frozen, sum(parameter.nbytes for parameter in self.frozen))
        for bucket in buckets:
            bucket.fill(weight, None, [0.0] * _NUM_EXTRAS)
        try:
            for bucket in buckets:
                bucket.send(group.connections, weight, is_compressed=False)
                self.weight = bucket.receive(divides=True)
        except RuntimeError as error:
            raise group.lost() from error
        return buckets

    def _sum_buckets(self, group: Group, weight: Any, extras: list[float]) -> None:
        """Send the remaining buckets, wait for all of them, and divide the sums."""
        num_sent, is_compressed = self._num_sent, self.is_compressed
        channel = group.connections if self._channel is None else self._channel
        if self._is_first:
            self._is_first = False
            for bucket in self.buckets:
                bucket.is_used = [parameter.grad is not None for parameter in bucket.parameters]
        if num_sent:
            extras = [*extras[:-1], self._num_changed(weight)]
        # Before anything is sent, so that an error of these lines is not taken for the loss of a process.
        for bucket in self.buckets[num_sent:]:
            bucket.separate()
            bucket.fill(weight, None, extras)
        try:
            if self._failure is not None:
                raise self._failure
            for bucket in self.buckets[num_sent:]:
                bucket.send(channel, weight, is_compressed=is_compressed)
            for bucket in self.buckets:
                self.weight = bucket.receive(divides=not is_compressed)
            if self.buckets[-1].counts[-1]:
                self._send_again(weight)
            if is_compressed:
                self._decompress(channel, weight)
        except RuntimeError as error:
            raise group.lost() from error
        self._num_sent = 0

    def _num_changed(self, weight: Any) -> float:
        """Return the number of sent gradients that are not the present ones; stop sending early if there are any."""
        sent, buckets = self._sent_weight, self.buckets[: self._num_sent]
        has_weight = weight is sent or not (isinstance(weight, Tensor) or isinstance(sent, Tensor) or weight != sent)
        # The window has multiplied the gradients in place, as the sent copy was.
        changes = [change for bucket in buckets for change in bucket.changes(0 if self._factor is None else 1)]
        # A gradient of a parameter that was never used before is a change, too, but from now on the hooks wait for it.
        if not has_weight or any(is_unused is False for is_unused in changes):
            self.stop_overlap()
        return float(len(changes) + (not has_weight))

    def _send_again(self, weight: Any) -> None:
        """Send the early buckets again, in every process."""
        for bucket in self.buckets[:-1]:
            bucket.fill(weight, None, [0.0] * _NUM_EXTRAS)
            bucket.send(self._channel, weight, is_compressed=self.is_compressed)
        for bucket in self.buckets[:-1]:
            bucket.receive(divides=not self.is_compressed)

    def _decompress(self, channel: dist.ProcessGroup | None, weight: Any) -> None:
        """Turn the sums of compressed gradients into means; some forms need a second message for this."""
        for bucket in self.buckets:
            assert bucket.codec is not None
            for message in bucket.codec.second_messages():
                bucket.works.append(dist.all_reduce(message, group=channel, async_op=True))
        for bucket in self.buckets:
            bucket.wait()
            assert bucket.codec is not None
            bucket.codec.decode(0 if weight is None else weight, self.weight, bucket.counts)
            bucket.gradients.div_(positive(self.weight))


class Bucket:
    """Gradients of some parameters in one flat tensor, followed by the numbers that are sent with them.

    After an average the gradients of the parameters are views of this tensor, which the next one overwrites, as with
    torch's `gradient_as_bucket_view`.
    """

    def __init__(self, parameters: list[Tensor]) -> None:
        first = parameters[0]
        dtype = torch.promote_types(first.dtype, torch.float32)
        # Complex gradients are sent as pairs of real numbers.
        num_reals = 2 if dtype.is_complex else 1
        sizes = [num_reals * parameter.numel() for parameter in parameters]
        num_numbers = len(parameters) + _NUM_EXTRAS + 1
        self.parameters = parameters
        # Sums in half precision would lose too much.
        self.is_exact = dtype == first.dtype
        dtype = dtype.to_real()
        self.has_all = [1.0] * len(parameters)
        # Both parts of the tokens, and the weight, on an accelerator: they may be tensors that the step computes there.
        self.device_numbers: Tensor | None = None
        if first.device.type == "cpu":
            self.flat = torch.empty(sum(sizes) + num_numbers, dtype=dtype)
            self.gradients, self.tail = torch.split(self.flat, [sum(sizes), num_numbers])
            self.messages = [self.flat]
        else:
            self.flat = torch.empty(sum(sizes) + 3, dtype=dtype, device=first.device)
            self.gradients, self.device_numbers = torch.split(self.flat, [sum(sizes), 3])
            # The host needs the other numbers: as a separate tensor they do not wait for the device.
            self.tail = torch.empty(num_numbers, dtype=dtype)
            self.messages = [self.flat, self.tail]
        parts = torch.split(self.gradients, sizes)
        if num_reals == 1:
            self.parts = [part.view_as(parameter) for part, parameter in zip(parts, parameters, strict=True)]
        else:
            pairs = [part.view(*it.shape, 2) for part, it in zip(parts, parameters, strict=True)]
            self.parts = [torch.view_as_complex(pair) for pair in pairs]
        self.codec: Codec | None = None
        # The running update: gradients that the backward pass has not completed, messages under way, the processes
        # that have a gradient of each parameter, and the gradients that were sent early, with their versions.
        self.num_missing = 0
        self.works: list[Any] = []
        self.counts: list[float] = []
        self.sent: list[tuple[Tensor | None, int]] = []
        # Whether this process has ever had a gradient of each parameter; before the first update, all are expected.
        self.is_used = [True] * len(parameters)

    @property
    def is_plain(self) -> bool:
        """True if every gradient is final and can be sent: dense, not yet a part of the bucket, no hooks to come."""
        return all(
            # A hook that the user registered may run after the hook of the exchange.
            len(parameter._post_accumulate_grad_hooks or ()) == 1
            # Not by addresses: tensors of a memory plan have none.
            and (
                gradient is None
                or (not gradient.is_sparse and gradient.untyped_storage()._cdata != part.untyped_storage()._cdata)
            )
            for parameter, gradient, part in zip(self.parameters, map(_GRAD, self.parameters), self.parts, strict=True)
        )

    def separate(self) -> None:
        """Copy gradients that are parts of this bucket, because the bucket may have to be filled a second time."""
        for parameter, part in zip(self.parameters, self.parts, strict=True):
            gradient = parameter.grad
            if gradient is None or gradient.is_sparse:
                continue
            if gradient.untyped_storage()._cdata == part.untyped_storage()._cdata:
                parameter.grad = gradient.detach().clone()

    def note_gradients(self) -> None:
        """Store the gradients and their versions, so that later changes are detected."""
        gradients = map(_GRAD, self.parameters)
        self.sent = [(gradient, 0 if gradient is None else gradient._version) for gradient in gradients]

    def changes(self, num_changes: int) -> list[bool]:
        """Return one entry for each gradient that was replaced, or changed in more operations than expected.

        An entry is True if there was no gradient when the bucket was sent.
        """
        return [
            gradient is None
            for parameter, (gradient, version) in zip(self.parameters, self.sent, strict=True)
            if parameter.grad is not gradient or (gradient is not None and gradient._version != version + num_changes)
        ]

    def fill(self, weight: Any, factor: Any, extras: list[Any]) -> None:
        """Copy the weighted gradients, and the numbers that are sent with them, into the flat tensor."""
        gradients, has = list(map(_GRAD, self.parameters)), self.has_all
        if any(map(is_, gradients, repeat(None))) or any(map(_IS_SPARSE, gradients)):
            has = [float(gradient is not None) for gradient in gradients]
            gradients = [_dense(gradient, part) for gradient, part in zip(gradients, self.parts, strict=True)]
        if weight is None:
            # Otherwise a parameter that only a batch with weight zero uses would have a gradient.
            has, weight = [0.0] * len(self.parameters), 0
        if any(map(_REQUIRES_GRAD, gradients)):
            # After a backward pass with `create_graph`: the average is not differentiated.
            gradients = [gradient.detach() for gradient in gradients]
        if not isinstance(weight, Tensor) and weight == 0:
            # Not multiplied by zero: a gradient of an idle process may be infinite.
            self.flat.zero_()
        else:
            if factor is not None:
                # Not in place, because the window will rescale the gradients, too, with the same roundings.
                gradients = [gradient.clone().mul_(factor) for gradient in gradients]
            if self.is_exact:
                for gradient, part in zip(gradients, self.parts, strict=True):
                    torch.mul(gradient, weight, out=part)
            else:
                for gradient, part in zip(gradients, self.parts, strict=True):
                    part.copy_(gradient).mul_(weight)
        if self.device_numbers is not None:
            put(self.device_numbers, [*extras[_TOKENS], weight])
            extras, weight = [*extras[:4], 0.0, 0.0, *extras[6:]], 0.0
        self.tail.copy_(torch.tensor([*has, *extras, 0.0], dtype=self.tail.dtype))
        self.tail[-1] = weight

    def send(self, channel: dist.ProcessGroup | None, weight: Any, *, is_compressed: bool) -> None:
        """Start to sum the filled bucket over all processes."""
        messages = self.messages
        if is_compressed:
            assert self.codec is not None
            messages = [*self.codec.encode(0 if weight is None else weight), self.tail]
            if self.device_numbers is not None:
                messages.append(self.device_numbers)
        for message in messages:
            self.works.append(dist.all_reduce(message, group=channel, async_op=True))

    def wait(self) -> None:
        """Wait for the sums."""
        for work in self.works:
            work.wait()
        self.works = []

    def receive(self, *, divides: bool) -> Any:
        """Wait for the sums, divide those of the gradients by the weight of all processes, and return this weight."""
        self.wait()
        *self.counts, weight = self.tail.tolist()
        if self.device_numbers is not None:
            # A copy: the next update overwrites these numbers.
            weight = self.device_numbers[-1].clone()
        if divides:
            self.gradients.div_(positive(weight))
        return weight


_GRAD, _REQUIRES_GRAD, _IS_SPARSE = attrgetter("grad"), attrgetter("requires_grad"), attrgetter("is_sparse")
_PARAMS = itemgetter("params")


def _in_order(parameters: list[Tensor], order: Iterable[Tensor]) -> list[Tensor]:
    """Return the trained parameters from the last to the first one of the model; others come at the end."""
    positions = {parameter: number for number, parameter in enumerate(order)}
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    return sorted(trained, key=lambda parameter: -positions.get(parameter, -1))


def _make_buckets(parameters: list[Tensor], bucket_size: int) -> list[Bucket]:
    """Divide parameters into buckets of one type and device each, in the order in which the buckets are full."""
    total = sum(parameter.nbytes for parameter in parameters)
    # Not less than an eighth in one message: what is sent last cannot travel while the backward pass runs.
    largest = min(bucket_size, max(_FIRST_BUCKET, total // 8))
    room = min(bucket_size, _FIRST_BUCKET)
    filling: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    buckets: list[Bucket] = []
    for parameter in parameters:
        kind = parameter.dtype, parameter.device
        chosen = filling.setdefault(kind, [])
        chosen.append(parameter)
        if sum(it.nbytes for it in chosen) >= room:
            buckets.append(Bucket(filling.pop(kind)))
            room = largest
    return [*buckets, *map(Bucket, filling.values())]


def _dense(gradient: Tensor | None, part: Tensor) -> Tensor:
    if gradient is None:
        return torch.zeros_like(part)
    return gradient.to_dense() if gradient.is_sparse else gradient
