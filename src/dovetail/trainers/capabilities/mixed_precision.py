"""Mixed precision for any trainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dovetail.accelerators import supports_bfloat16
from dovetail.errors import ConfigError
from dovetail.trainers.capabilities.core import Capability
from dovetail.trainers.fitting import restore
from dovetail.trainers.precision import Precision, PrecisionName

_INIT_SCALE = 65536.0


class MixedPrecision(Capability):
    """Computes forward and loss in lower precision for operations where this is safe, and scales a float16 loss.

    The order is scale, backward, unscale, clip, step. A step with overflow is skipped and does not count. The scaler
    is updated once per batch, for any number of optimizers, and its state is in every checkpoint.

    Args:
        precision: `bf16`, `fp16` or `fp32`; `auto` for the best of the device, which is `bf16` on a CPU; or a list, of
            which the first that the device supports is used.
        init_scale: The initial loss scale for float16.

    Example:
        >>> import torch
        >>> from dovetail.trainers import Trainer
        >>> trainer = Trainer.add_on(MixedPrecision)(torch.nn.Linear(4, 2), "cpu", precision="bf16", verbose=False)
        >>> trainer.predict(torch.zeros(1, 4)).dtype
        torch.bfloat16
    """

    kind = "mixed precision"

    _precision_names: list[PrecisionName]
    _init_scale: float
    _precision: Precision | None

    def __init__(
        self,
        *args: Any,
        precision: PrecisionName | Sequence[PrecisionName] = "auto",
        init_scale: float = _INIT_SCALE,
        **kwargs: Any,
    ) -> None:
        names = [precision] if isinstance(precision, str) else list(precision)
        if not names:
            raise ConfigError("precision: expected at least one of 'auto', 'fp32', 'fp16' and 'bf16', got none")
        # Raises for an unknown name now, and not in the first run.
        for name in names:
            Precision(name)
        if init_scale != _INIT_SCALE and not {"auto", "fp16"} & set(names):
            raise ConfigError(f"init_scale: only float16 is scaled, got precision={precision!r}")
        self._precision_names = names
        self._init_scale = init_scale
        self._precision = None
        super().__init__(*args, **kwargs)

    def setup(self) -> None:
        """Set the precision of the context."""
        precision = self._get_precision()
        if self.context.precision not in (None, precision):
            raise ConfigError("mixed precision twice: leave out the layer, or the MixedPrecisionStepStrategy")
        # Before the inner layers are set up: they prepare the scaler of the context's precision.
        self.context.precision = precision
        super().setup()

    def teardown(self, error: BaseException | None) -> None:
        """Remove the precision from the context."""
        super().teardown(error)
        # Not if `setup` has rejected the precision of another part.
        if self.context.precision is self._precision:
            self.context.precision = None

    def state_dict(self) -> dict[str, Any]:
        """Add the scaler's state."""
        return {**super().state_dict(), "mixed_precision": self._get_precision().state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the scaler's state; without one the scaler starts with its initial scale."""
        super().load_state_dict(state)
        restore({"mixed_precision": {}, **state}, "mixed_precision", self._get_precision().load_state_dict, {})

    def _get_precision(self) -> Precision:
        if self._precision is None:
            # Late: the device is final when the trainer is set up.
            kind = self.context.device.type
            self._precision = Precision(_first_possible(self._precision_names, kind), kind, self._init_scale)
        return self._precision


def _first_possible(names: Sequence[PrecisionName], device_type: str) -> PrecisionName:
    has_bf16 = device_type == "cpu" or supports_bfloat16(device_type)
    chosen = next((name for name in names if name != "bf16" or has_bf16), names[-1])
    return "bf16" if chosen == "auto" and device_type == "cpu" else chosen
