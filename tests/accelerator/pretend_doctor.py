"""The checks of `dovetail doctor --accelerator` on the pretend device: `python -m pretend_doctor`."""

from __future__ import annotations

import os
import sys
from functools import partial

from pretend_device import PretendDevice

from dovetail.accelerator_checks import CHECKS, _memory, main

if __name__ == "__main__":
    if os.environ.get("CRASH"):
        CHECKS["equal to the CPU"] = lambda device: os.abort()
    # The CPU computes for the device, whose memory contains only tensors.
    CHECKS["memory"] = partial(_memory, rows=64)
    with PretendDevice():
        sys.exit(main())
