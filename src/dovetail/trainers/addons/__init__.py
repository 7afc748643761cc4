"""Add-ons: capabilities that `Trainer.add_on` mixes into a trainer class."""

from dovetail.trainers.addons.core import AddOnBase
from dovetail.trainers.addons.mpu import MultiGPUAddon
from dovetail.trainers.addons.precision import PrecisionMixerAddon
from dovetail.trainers.addons.signal_handler import SignalHandlerAddon
from dovetail.trainers.addons.state_manager import StateManagerAddon
from dovetail.trainers.addons.web_logger import NeptuneLoggerAddon, WandBLoggerAddon

__all__ = [
    "AddOnBase",
    "MultiGPUAddon",
    "NeptuneLoggerAddon",
    "PrecisionMixerAddon",
    "SignalHandlerAddon",
    "StateManagerAddon",
    "WandBLoggerAddon",
]
