"""zae-engine's add-ons, which any trainer class can mount."""

from dovetail.trainers.addons import (
    AddOnBase,
    MultiGPUAddon,
    NeptuneLoggerAddon,
    PrecisionMixerAddon,
    SignalHandlerAddon,
    StateManagerAddon,
    WandBLoggerAddon,
)

__all__ = [
    "AddOnBase",
    "MultiGPUAddon",
    "NeptuneLoggerAddon",
    "PrecisionMixerAddon",
    "SignalHandlerAddon",
    "StateManagerAddon",
    "WandBLoggerAddon",
]
