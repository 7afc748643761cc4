"""Processes on this machine that are started, watched and restarted together, by torch's own elastic agent."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import RunResult, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from dovetail.printing import quiet
from dovetail.runtime.signals import preserved_handlers

__all__ = ["RunResult", "run_workers"]

# Seconds that workers have to finish what they are doing and to save when they are told to leave.
_GRACE = 30


def run_workers(
    arguments: Sequence[str], num_processes: int, folder: str | os.PathLike[str], max_restarts: int = 0
) -> RunResult | int:
    """Run Python in several processes that form one group, to their end.

    They meet on the loopback. When one fails, all are ended, and started again as often as is allowed. Signals that
    end this process go to all of them.

    Args:
        arguments: What Python is given: a script and its arguments, or `-m`, a module and its arguments.
        num_processes: How many processes.
        folder: A temporary folder of this run; its name names the group.
        max_restarts: How often a group that lost a process is started again.

    Returns:
        What became of them, or the signal that ended them.
    """
    spec = WorkerSpec(
        role="dovetail",
        local_world_size=num_processes,
        rdzv_handler=_Loopback(Path(folder).name),
        entrypoint=sys.executable,
        args=tuple(arguments),
        max_restarts=max_restarts,
        monitor_interval=0.1,
    )
    agent = LocalElasticAgent(spec, DefaultLogsSpecs(log_dir=os.fspath(folder)), shutdown_timeout=_GRACE)
    with _quiet_elastic():
        try:
            return cast(RunResult, agent.run())
        except SignalException as error:
            # A second signal comes while the agent waits for the workers: they are told again, to leave at once. After
            # the first one alone there is nobody left to tell.
            with suppress(SignalException):
                agent._shutdown(error.sigval, timeout=_GRACE)
            return int(error.sigval)


class _Loopback(RendezvousHandler):
    """A meeting point on this machine alone, a new one for every attempt."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._store: Any = None

    def get_backend(self) -> str:
        return "loopback"

    @property
    def use_agent_store(self) -> bool:
        """Workers meet at the launcher's store, which outlives any of them."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Open a store for the next attempt: the one before holds the addresses of the dead."""
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        self._store = dist.TCPStore(  # type: ignore[attr-defined]  # torch exports it, but not to mypy
            "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        return RendezvousInfo(self._store, 0, 1, RendezvousStoreInfo("127.0.0.1", port))

    def is_closed(self) -> bool:
        """Never: nobody else comes."""
        return False

    def set_closed(self) -> None:
        """Nothing to tell anybody."""

    def num_nodes_waiting(self) -> int:
        """None: there is one machine."""
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        self._store = None
        return True


@contextmanager
def _quiet_elastic() -> Iterator[None]:
    """Keep the agent's log lines from the terminal, and put back the signal handlers that it replaces."""
    # Each of its modules has a logger with a level of its own.
    names = [name for name in logging.root.manager.loggerDict if name.startswith("torch.distributed.elastic")]
    signals = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    with quiet(*names, level=logging.CRITICAL), preserved_handlers(*signals):
        yield
