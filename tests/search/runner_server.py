"""Runners in processes of their own that begin with everything imported, which takes a second in a new interpreter.

A line `[home, experiment, folder]` on stdin forks one. In the folder, the file `pid` names it, and `code` its end.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

from dovetail.search.runner import main
from dovetail.search.store import Store


def write(path: Path, number: int) -> None:
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(str(number))
    unfinished.replace(path)


def become_runner(home: str, experiment: str) -> None:
    os.setsid()
    with open(Path(home, "experiments", experiment, "runner.log"), "ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    code = 70
    try:
        code = main([home, experiment])
    finally:
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    # What opens a database is imported when the first one is opened.
    with tempfile.TemporaryDirectory() as first:
        Store.open(first).experiments()
    for line in sys.stdin:
        home, experiment, folder = json.loads(line)
        if os.fork():
            os.wait()
            continue
        # The server waits for nobody but this one, which does not take long.
        if os.fork():
            os._exit(0)
        if (pid := os.fork()) == 0:
            become_runner(home, experiment)
        write(Path(folder, "pid"), pid)
        write(Path(folder, "code"), os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        os._exit(0)
