"""Lower precision where it is safe, and the loss scaling that float16 needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal
from weakref import WeakSet

import torch
from torch import Tensor
from torch.optim import Optimizer

from dovetail.errors import ConfigError
from dovetail.trainers import other_libraries

PrecisionName = Literal["auto", "fp32", "fp16", "bf16"]

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class Precision:
    """Autocast for the forward pass and, in float16, a gradient scaler around backward and step.

    A layer or a strategy sets `context.precision`. The loop computes every step under its autocast, and the verbs of
    the trainer scale, unscale and step through it.

    The order is always: scale the loss, differentiate, unscale, clip, step. The scaler is updated once per batch, even
    when several optimizers stepped: a new scale between them would unscale the second one's gradients by the wrong
    factor.

    Args:
        name: `fp32` changes nothing; `bf16` needs no scaling; `fp16` scales; `auto` is `bf16` where the device computes
            in it, `fp16` on older CUDA devices, and `fp32` elsewhere. Where it is a CPU, `AMPTrainer` and the add-on
            say `bf16` instead.
        device_type: `cpu` or `cuda`.
        init_scale: Where the scaler starts.

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
        # By reference, not by id: an id is given to another optimizer once its owner is gone.
        self._watched: WeakSet[Optimizer] = WeakSet()

    def begin(self, *, anew: bool) -> None:
        """Begin a run: with the first scale if it is a new one, else with the scale there is."""
        if self.scaler is None or not (anew or self._is_used):
            return
        # What an error has cut short between unscaling and the update of the scale is forgotten with the old scaler.
        state, self.scaler, self._is_used = self.scaler.state_dict(), self._new_scaler(), False
        if not anew:
            self.scaler.load_state_dict(state)

    def autocast(self) -> torch.autocast:
        """Return the context in which the forward pass and the loss are computed."""
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
        """Return the loss to differentiate."""
        return loss if self.scaler is None else self.scaler.scale(loss)

    def unscale(self, optimizer: Optimizer) -> None:
        """Make an optimizer's gradients those of the loss; call it once per update, before clipping."""
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)
            self._is_used = True

    def step(self, optimizer: Optimizer) -> bool:
        """Step the optimizer unless its gradients overflowed, and return whether it stepped."""
        if self.scaler is None:
            optimizer.step()
            return True
        if optimizer not in self._watched:
            # The scaler does not say whether it skipped; the optimizer says when it stepped.
            optimizer.register_step_post_hook(self._note)
            self._watched.add(optimizer)
        self._stepped = False
        self.scaler.step(optimizer)
        return self._stepped

    def update(self) -> None:
        """Adapt the scale, if any optimizer was to step since the last time; call it once per batch."""
        if self.scaler is not None and self._is_used:
            self._is_used = False
            self.scaler.update()

    def state_dict(self) -> dict[str, Any]:
        """Return the scaler's state."""
        return {} if self.scaler is None else self.scaler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave."""
        if self.scaler is not None and state:
            self.scaler.load_state_dict(dict(state))

    def __getstate__(self) -> dict[str, Any]:
        # A copy watches optimizers of its own.
        return {**self.__dict__, "_watched": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _watched=WeakSet())

    def _new_scaler(self) -> torch.amp.GradScaler:
        return torch.amp.GradScaler(self.device_type, init_scale=self._init_scale)

    def _note(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._stepped = True


def _best_dtype(device_type: str) -> torch.dtype:
    if device_type != "cuda":
        return torch.float32
    return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
