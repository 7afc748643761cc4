"""Whether this machine has what Dovetail needs: one `Check` for each thing that was looked at.

Everything is tried, not guessed: files are written and renamed, a group of two meets on the loopback, the store is
opened. Nothing is left behind.
"""

from __future__ import annotations

from dovetail.cli.checkup.check import Check
from dovetail.cli.checkup.everything import checkup
from dovetail.cli.checkup.files import check_descriptors, check_disk, check_folder, check_shared_memory
from dovetail.cli.checkup.packages import (
    PURPOSES,
    Requirement,
    check_extras,
    check_packages,
    check_python,
    read_requirements,
)
from dovetail.cli.checkup.store import check_store
from dovetail.cli.checkup.torch_build import TESTED_TORCH, check_torch

__all__ = [
    "PURPOSES",
    "TESTED_TORCH",
    "Check",
    "Requirement",
    "check_descriptors",
    "check_disk",
    "check_extras",
    "check_folder",
    "check_packages",
    "check_python",
    "check_shared_memory",
    "check_store",
    "check_torch",
    "checkup",
    "read_requirements",
]
