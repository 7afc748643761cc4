"""The checks of `dovetail doctor --accelerator` on the pretend device: `python -m pretend_doctor`."""

from __future__ import annotations

import os
import sys

from pretend_device import PretendDevice

from dovetail.accelerator_checks import CHECKS, main

if __name__ == "__main__":
    if os.environ.get("CRASH"):
        CHECKS["equal to the CPU"] = lambda device: os.abort()
    with PretendDevice():
        sys.exit(main())
