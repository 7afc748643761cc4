"""Two processes of one script, which meet over the loopback."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

__all__ = ["run_pair"]


def run_pair(script: str, option: str, quick: bool, *more: str) -> Any:
    """Start a script twice, as torchrun would, and return what it has written as JSON to the file that it is given.

    Args:
        script: Its path.
        option: What the file is given with.
        quick: Whether it is told to be quick.
        more: Further arguments of the script.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, "found.json")
        command = [sys.executable, script, option, str(target), *(["--quick"] if quick else []), *more]
        processes = [
            subprocess.Popen(
                command,
                # One core each: two processes with two threads each would wait for each other, spinning.
                env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"},
            )
            for rank in range(2)
        ]
        codes = [process.wait() for process in processes]
        if any(codes):
            raise RuntimeError("one of the two processes has failed")
        return json.loads(target.read_text())
