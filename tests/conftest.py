"""Settings for all tests."""

from __future__ import annotations

import os

# Two test processes on two cores: torch's second thread would only spin. Set before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
