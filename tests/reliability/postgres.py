"""A real PostgreSQL server for tests."""

from __future__ import annotations

import glob
import os
import secrets
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


@contextmanager
def start_postgres() -> Iterator[str]:
    """Yield the URL of a PostgreSQL server that listens on the loopback only, and is gone afterwards."""
    programs = [shutil.which("initdb"), *sorted(glob.glob("/usr/lib/postgresql/*/bin/initdb"))]
    found = next((Path(program).resolve().parent for program in programs if program), None)
    if found is None:
        pytest.skip("NOT TESTED: PostgreSQL is not installed: apt-get install postgresql")
    pytest.importorskip("psycopg", reason="pip install 'psycopg[binary]'")
    # The server refuses to run as root.
    owner: dict[str, Any] = {"user": "postgres"} if os.getuid() == 0 else {}
    password = secrets.token_hex(16)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    folder = Path(tempfile.mkdtemp(prefix="dovetail-postgres-"))
    try:
        (folder / "password").write_text(password)
        if owner:
            for path in (folder, folder / "password"):
                shutil.chown(path, "postgres")
        cluster: list[str | Path] = ["-D", folder / "data"]
        made: list[str | Path] = [
            found / "initdb",
            *cluster,
            "-U",
            "dovetail",
            "-A",
            "scram-sha-256",
            "--pwfile",
            folder / "password",
        ]
        subprocess.run([*made, "--no-sync"], check=True, stdout=subprocess.DEVNULL, cwd=folder, **owner)
        options: list[str | Path] = ["-h", "127.0.0.1", "-p", str(port), "-k", folder, "-c", "fsync=off"]
        with open(folder / "log", "w") as log:
            process = subprocess.Popen([found / "postgres", *cluster, *options], stderr=log, cwd=folder, **owner)
        try:
            while b"ready to accept connections" not in (folder / "log").read_bytes():
                assert process.poll() is None, (folder / "log").read_text()
            yield f"postgresql://dovetail:{password}@127.0.0.1:{port}/postgres"
        finally:
            process.terminate()
            process.wait()
    finally:
        shutil.rmtree(folder)
