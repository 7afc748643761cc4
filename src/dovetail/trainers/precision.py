"""Mixed precision: autocast, and the loss scaling for float16."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal
from weakref import WeakSet

import torch
from torch import Tensor
from torch.optim import Optimizer

from dovetail import distributed
from dovetail.accelerators import supports_bfloat16, to_host
from dovetail.distributed import is_part, whole
from dovetail.errors import ConfigError
from dovetail.trainers import other_libraries

PrecisionName = Literal["auto", "fp32", "fp16", "bf16"]

_DTYPES: dict[PrecisionName, torch.dtype] = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class Precision:
    """Autocast for the forward pass and, in float16, a gradient scaler around backward and step.

    A layer or a strategy sets `context.precision`. The loop computes every step under its autocast, and the verbs of
    the trainer scale, unscale and step through it.

    The order is always: scale the loss, backward, unscale, clip, step. The scaler is updated once per batch, even when
    several optimizers stepped: a new scale between them would unscale the second one's gradients by the wrong factor.

    Args:
        name: `fp32` changes nothing; `bf16` needs no scaling; `fp16` scales; `auto` is `bf16` if the accelerator
            supports it, `fp16` on older CUDA devices, and `fp32` on Apple's GPUs and the CPU. On a CPU, `AMPTrainer`
            and the add-on choose `bf16` instead.
        device_type: The type of the device, such as `cpu` or `cuda`.
        init_scale: The initial loss scale.

    Example:
        >>> Precision("bf16", "cpu").dtype
        torch.bfloat16
    """

    def __init__(self, name: PrecisionName = "auto", device_type: str = "cpu", init_scale: float = 65536.0) -> None:
        if name != "auto" and name not in _DTYPES:
            hint = other_libraries.did_you_mean(name, other_libraries.PRECISIONS)
            raise ConfigError(f"precision: expected 'auto', 'fp32', 'fp16' or 'bf16', got {name!r}{hint}")
        self.dtype = _best_dtype(device_type) if name == "auto" else _DTYPES[name]
        self.device_type = device_type
        self._init_scale = init_scale
        self.scaler = self._new_scaler() if self.dtype is torch.float16 else None
        self._stepped = False
        self._is_used = False
        # The scale that was read last, and the number of updates that do not change it unless gradients overflow.
        self._scale, self._num_known = init_scale, 0
        # By reference, not by id: another optimizer may get the id of one that was deleted.
        self._watched: WeakSet[Optimizer] = WeakSet()

    def for_device(self, device_type: str) -> Precision:
        """Return a new precision with the same dtype for another type of device."""
        name: PrecisionName = next(it for it, dtype in _DTYPES.items() if dtype is self.dtype)
        return Precision(name, device_type, self._init_scale)

    def start_run(self, *, is_new_run: bool) -> None:
        """Start a run: a new run with the initial scale, a continued one with the current scale."""
        if self.scaler is None or not (is_new_run or self._is_used):
            return
        # A new scaler: an error between unscaling and the update of the scale leaves the old one unusable.
        state, self.scaler, self._is_used, self._num_known = self.scaler.state_dict(), self._new_scaler(), False, 0
        if not is_new_run:
            self.scaler.load_state_dict(state)

    def autocast(self) -> torch.autocast:
        """Return the context manager for the forward pass and the loss."""
        return torch.autocast(self.device_type, self.dtype, enabled=self.dtype is not torch.float32)

    def applied_to(self, verb: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return a verb of a batch that computes under autocast; in full precision, the verb itself."""
        if self.dtype is torch.float32:
            return verb

        def call(batch: Any) -> Any:
            with self.autocast():
                return verb(batch)

        return call

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss for the backward pass."""
        return loss if self.scaler is None else self.scaler.scale(loss)

    def unscale(self, optimizer: Optimizer) -> None:
        """Divide an optimizer's gradients by the scale; call it once per update, before clipping."""
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)
            gradients = (it.grad for group in optimizer.param_groups for it in group["params"])
            distributed.share_overflow(gradients, self.scaler._found_inf_per_device(optimizer).values())
            # `GradScaler.update` fails if no optimizer was unscaled since its last call.
            self._is_used = True

    def step(self, optimizer: Optimizer) -> bool:
        """Step the optimizer unless its gradients overflowed, and return whether it stepped."""
        if self.scaler is None:
            optimizer.step()
            return True
        if optimizer not in self._watched:
            # The scaler does not return whether it skipped the step, so a hook of the optimizer records a step.
            optimizer.register_step_post_hook(self._note)
            self._watched.add(optimizer)
        self._stepped = False
        self.scaler.step(optimizer)
        if self._stepped and getattr(optimizer, "_step_supports_amp_scaling", False):
            # The kernel of a fused optimizer skips the update itself, and the hook is called in any case.
            self._stepped = not any(to_host(list(self.scaler._found_inf_per_device(optimizer).values())))
        if not self._stepped:
            self._num_known = 0
        return self._stepped

    def update(self) -> None:
        """Update the scale if an optimizer used it since the last call; call it once per batch."""
        if self.scaler is not None and self._is_used:
            self._is_used = False
            self._num_known = max(self._num_known - 1, 0)
            self.scaler.update()

    def known_scale(self, device: torch.device) -> float:
        """Return the loss scale as a number; in full precision, 1. Read from the device only if it may have changed."""
        if self.scaler is None:
            return 1.0
        if self._num_known == 0:
            # The first call of `scale` creates the scale on the device.
            self._scale = float(self.scaler.scale(torch.ones((), device=device)))
            state = self.scaler.state_dict()
            # It grows after so many updates without an overflow.
            self._num_known = state["growth_interval"] - state["_growth_tracker"]
        return self._scale

    def state_dict(self) -> dict[str, Any]:
        """Return the scaler's state."""
        return {} if self.scaler is None else self.scaler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by `state_dict`."""
        if self.scaler is not None and state:
            self._num_known = 0
            self.scaler.load_state_dict(dict(state))

    def __getstate__(self) -> dict[str, Any]:
        # A copy registers its own hooks.
        return {**self.__dict__, "_watched": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _watched=WeakSet())

    def _new_scaler(self) -> torch.amp.GradScaler:
        return _Scaler(self.device_type, init_scale=self._init_scale)

    def _note(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._stepped = True


class _Scaler(torch.amp.GradScaler):
    """A scaler for models of which only some parameters are divided among processes.

    Torch's operation for a list of gradients accepts either divided ones or plain ones.
    """

    def _unscale_grads_(self, optimizer: Any, *args: Any) -> dict[torch.device, Tensor]:
        gradients = [it.grad for group in optimizer.param_groups for it in group["params"] if it.grad is not None]
        # `map` makes no Python call; in the usual case all have one type.
        if len(set(map(type, gradients))) < 2:
            return super()._unscale_grads_(optimizer, *args)
        found: dict[torch.device, Tensor] = {}
        for is_divided in (True, False):
            chosen: Any = _Some(optimizer, is_divided)
            for device, overflow in super()._unscale_grads_(chosen, *args).items():
                # The overflow of a divided gradient is that of all parts: torch exchanges it.
                found[device] = whole(overflow) + found.get(device, 0.0)
        return found


class _Some:
    """The divided or the other parameters of an optimizer.

    Args:
        optimizer: The optimizer.
        is_divided: Which of them.
    """

    def __init__(self, optimizer: Optimizer, is_divided: bool) -> None:
        chosen = [it for group in optimizer.param_groups for it in group["params"] if is_part(it.grad) == is_divided]
        self.param_groups = [{"params": chosen}]


def _best_dtype(device_type: str) -> torch.dtype:
    if device_type in ("cpu", "mps"):
        return torch.float32
    return torch.bfloat16 if supports_bfloat16(device_type) else torch.float16
