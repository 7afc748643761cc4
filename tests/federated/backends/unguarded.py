"""A script without `if __name__ == "__main__":` that runs clients in two processes.

`unguarded.py FOLDER` writes their answers to FOLDER/answers; `unguarded.py FOLDER wait` has clients that write the
numbers of their processes to FOLDER and never end.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch

from dovetail.federated.backends import Done, Process
from dovetail.federated.messages import Task, Update
from dovetail.federated.states import ClientState

FOLDER = Path(sys.argv[1])
WAITS = sys.argv[2:] == ["wait"]
FACTOR = 3


class Client:
    def work(self, task: Task, state: ClientState) -> tuple[Update, ClientState]:
        if WAITS:
            # Renamed when it is complete, because the test reads it as soon as it exists.
            unfinished = FOLDER / f"unfinished-{task.client_id}"
            unfinished.write_text(f"{os.getpid()} {os.getppid()}")
            unfinished.replace(FOLDER / f"worker-{task.client_id}")
            while True:
                signal.pause()
        return Update(task.client_id, 1, 1, delta={"w": task.weights["w"] * FACTOR * task.client_id}), state


backend = Process(num_workers=2)
backend.start(Client())
try:
    weights = {"w": torch.tensor(2.0)}
    found = list(backend.run([(Task(1, client, weights), {}) for client in (1, 2)]))
    answers = {done.update.client_id: done.update.delta["w"].item() for done in found if isinstance(done, Done)}
    (FOLDER / "answers").write_text(str(sorted(answers.items())))
finally:
    backend.close()
