"""One process of a run that a `ProcessLauncher` started: `python -m dovetail.trainers.worker FOLDER THREADS`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

__all__: list[str] = []

if __name__ == "__main__":
    folder, threads = Path(sys.argv[1]), sys.argv[2]
    # Before torch is imported, which reads them once. More threads than cores wait for each other, spinning.
    os.environ["OMP_NUM_THREADS"] = threads
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

    from dovetail.trainers.launching import work

    work(folder)
