"""Worker processes on this machine that are started, monitored and restarted together by torch's elastic agent."""

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

__all__ = ["RunResult", "open_store", "run_workers"]

# Seconds in which workers finish their update and save after a stop request.
_GRACE = 30


def run_workers(
    arguments: Sequence[str], num_processes: int, folder: str | os.PathLike[str], max_restarts: int = 0
) -> RunResult | int:
    """Run Python in several worker processes that form one group, until they end.

    The workers connect over the loopback interface. When one fails, all are stopped and restarted, at most
    `max_restarts` times. Signals that end this process are sent to all workers.

    Args:
        arguments: The arguments of Python: a script and its arguments, or `-m`, a module and its arguments.
        num_processes: The number of processes.
        folder: A temporary folder of this run; its name is the name of the group.
        max_restarts: How often a group with a failed process is restarted.

    Returns:
        The result of the workers, or the signal that ended them.
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
            # A second signal arrives while the agent waits for the workers: they receive it, too, and exit at once.
            # After the first signal alone, all workers have ended by now.
            with suppress(SignalException):
                agent._shutdown(error.sigval, timeout=_GRACE)
            return int(error.sigval)


def open_store() -> tuple[Any, int]:
    """Return a new rendezvous store on the loopback interface, and its port."""
    # The store takes over a socket that is bound already, so that no other process can take the port in between.
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    store = dist.TCPStore(  # type: ignore[attr-defined]  # torch exports it, but not to mypy
        "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    return store, port


class _Loopback(RendezvousHandler):
    """A rendezvous on this machine only, with a new store for every attempt."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._store: Any = None

    def get_backend(self) -> str:
        return "loopback"

    @property
    def use_agent_store(self) -> bool:
        """True: workers connect to the launcher's store, which outlives all of them."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Open a store for the next attempt: the previous store contains the addresses of ended processes."""
        self._store, port = open_store()
        return RendezvousInfo(self._store, 0, 1, RendezvousStoreInfo("127.0.0.1", port))

    def is_closed(self) -> bool:
        """Return False: no other machine joins."""
        return False

    def set_closed(self) -> None:
        """Do nothing: there are no other machines to notify."""

    def num_nodes_waiting(self) -> int:
        """Return 0: there is only one machine."""
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        self._store = None
        return True


@contextmanager
def _quiet_elastic() -> Iterator[None]:
    """Hide the agent's log lines, and restore the signal handlers that it replaces."""
    # Each module of the agent has its own logger and level.
    names = [name for name in logging.root.manager.loggerDict if name.startswith("torch.distributed.elastic")]
    signals = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    with quiet(*names, level=logging.CRITICAL), preserved_handlers(*signals):
        yield
