"""Fork server of federated workers, which start with torch imported."""

from __future__ import annotations

import sys

from dovetail.errors import ConfigError
from dovetail.runtime.fork_server import ForkServer, shared_fork_server

_TARGET = "dovetail.federated.backends.processes:run_worker"
# Optimizers import the second one, which takes half of the start of a script.
_PRELOADED = ("torch", "torch._dynamo", "dovetail.trainers")
# The environment of workers. They set torch's number of threads; other libraries have one thread. Freed memory is kept,
# because otherwise glibc may return it to the system and request it again in every step of a small CNN.
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20),
    "MALLOC_TRIM_THRESHOLD_": str(256 * 2**20),
}


def fork_server() -> ForkServer:
    """Return the fork server of this process for federated workers; start one if there is none.

    Raises:
        ConfigError: Processes cannot be forked on this system.
    """
    if not sys.platform.startswith(("linux", "darwin")):
        raise ConfigError(f"backend: 'process' needs Linux or macOS, and this is {sys.platform}; use 'sequential'")
    return shared_fork_server(_TARGET, _PRELOADED, _ENVIRONMENT)
