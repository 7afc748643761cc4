"""Random number generators: one seed for all of them, and their joint state."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from dovetail import accelerators


def seed_everything(seed: int) -> None:
    """Seed python, numpy and torch (every device) with one number.

    Example:
        >>> seed_everything(7); first = torch.rand(1)
        >>> seed_everything(7); bool(torch.rand(1) == first)
        True
    """
    random.seed(seed)
    # NumPy accepts 32 bits only.
    np.random.seed(seed % 2**32)
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:
        # The same effect without the stack traces that torch stores in case an accelerator is used later: they take
        # longer than the rest of the setup of a short run.
        torch.default_generator.manual_seed(seed)


def rng_state() -> dict[str, Any]:
    """Return the state of every generator that training may use: python, numpy, torch, and those of the accelerator."""
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=True),
        "torch": torch.get_rng_state(),
    }
    if (found := accelerators.random_states()) is not None:
        state[found[0]] = found[1]
    return state


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Restore the generators' states returned by `rng_state`."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    accelerator = accelerators.current_accelerator()
    # A run that continues on another kind of device starts its generators with the seed.
    if accelerator is not None and accelerator.type in state:
        accelerators.set_random_states(accelerator.type, state[accelerator.type])
