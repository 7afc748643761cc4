"""Worker process of a `ProcessLauncher`: `python -m dovetail.trainers.worker FOLDER`."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

__all__: list[str] = []

if __name__ == "__main__":
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

    from dovetail.trainers.launching import work

    code = 0
    try:
        work(Path(sys.argv[1]))
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else 1
    except BaseException:
        traceback.print_exc()
        code = 1
    # All results are written. Exit at once: during a regular shutdown the threads of torch and gloo sometimes abort the
    # process.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
