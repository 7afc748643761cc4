"""Connection of this process to a Ray cluster."""

from __future__ import annotations

import os
import signal
from types import ModuleType
from typing import Any

from dovetail.errors import ConfigError
from dovetail.extras import require
from dovetail.runtime.cores import graphics_cards, num_cores
from dovetail.runtime.signals import preserved_handlers

NAMESPACE = "dovetail"
"""The namespace of all actors."""


def connect(address: str) -> ModuleType:
    """Connect this process to a Ray cluster, or start one on this machine for `local`, and return the module `ray`.

    Raises:
        ConfigError: There is no cluster at the address.
        MissingExtraError: Ray is not installed.
    """
    # Otherwise Ray sends usage reports.
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # Ray replaces the signal handlers. Its own would end a runner at SIGTERM, before the trials have saved.
    with preserved_handlers(signal.SIGINT, signal.SIGTERM):
        ray = require("ray", "ray")
        if ray.is_initialized():
            return ray
        options: dict[str, Any] = {"namespace": NAMESPACE, "log_to_driver": False, "logging_level": "ERROR"}
        if address == "local":
            options |= {"include_dashboard": False, "num_cpus": len(graphics_cards().names) or num_cores()}
        try:
            ray.init(address=address, **options)
        except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
            problem = str(error).strip().partition("\n")[0]
            raise ConfigError(f"cluster: no Ray cluster can be reached at {address!r}: {problem}") from error
    return ray
