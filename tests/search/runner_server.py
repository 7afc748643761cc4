"""Separate processes for runners and jobs that start with everything imported, which takes a second in a new one.

A line `[words, folder]` on stdin forks one: two words are passed to `dovetail.search`, three are the home, the
file and the code of a job. In the folder, the file `pid` names the process, `output` has its output, and `code` states
its end.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

from dovetail.search.jobs import run_job
from dovetail.search.runner import main
from dovetail.search.store import Store


def write(path: Path, number: int) -> None:
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(str(number))
    unfinished.replace(path)


def become(words: list[str], output: Path) -> None:
    os.setsid()
    with open(output, "ab") as messages:
        os.dup2(messages.fileno(), 1)
        os.dup2(messages.fileno(), 2)
    code = 70
    try:
        if len(words) == 2:
            code = main(words)
        else:
            home, config, context_dir = words
            code = int(run_job(Store.open(home), config, context_dir).state != "COMPLETED")
    finally:
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    # What opens a database is imported when the first one is opened.
    with tempfile.TemporaryDirectory() as first:
        Store.open(first).experiments()
    for line in sys.stdin:
        words, folder = json.loads(line)
        if os.fork():
            os.wait()
            continue
        # The server waits only for this process, which does not take long.
        if os.fork():
            os._exit(0)
        if (pid := os.fork()) == 0:
            become(words, Path(folder, "output"))
        write(Path(folder, "pid"), pid)
        write(Path(folder, "code"), os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        os._exit(0)
