"""Add-ons: capabilities that `Trainer.add_on` mounts on a trainer class."""

from dovetail.trainers.addons.core import AddOnBase
from dovetail.trainers.addons.signal_handler import SignalHandlerAddon
from dovetail.trainers.addons.state_manager import StateManagerAddon

__all__ = ["AddOnBase", "SignalHandlerAddon", "StateManagerAddon"]
