"""Federation on Flower from a configuration, as `dovetail federate --flower` runs it.

Flower runs this module as its app: `serverapp` in one process, and `clientapp` in one process per task. Both read the
federation from Flower's run configuration. The server writes its rounds to a file, which `run_on_flower` reads.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from dovetail.checkpoint.encoding import decode, encode_plain
from dovetail.errors import DovetailError
from dovetail.federated.callbacks import ServerCallback
from dovetail.federated.clients.simple import Client
from dovetail.federated.config import FederatedConfig, ResultsConfig
from dovetail.federated.flower import client_app, server_app
from dovetail.federated.flower.local import LocalFlower
from dovetail.federated.records import ClientsEvaluation, RoundRecord
from dovetail.federated.servers.building import federation
from dovetail.federated.servers.fedavg import Server
from dovetail.federated.servers.journal import with_journal
from dovetail.federated.servers.results import with_results
from dovetail.runtime.cores import num_cores

__all__ = ["clientapp", "run_on_flower", "serverapp"]

_ROUNDS = "rounds.jsonl"
_POLL = 0.1


def run_on_flower(
    config: FederatedConfig, callbacks: Iterable[Any] = (), *, num_nodes: int | None = None
) -> list[RoundRecord]:
    """Run a federation on a SuperLink with SuperNodes on this machine, and return its rounds.

    The rounds equal those without Flower. The server stores the states of clients, so that a run resumes from its
    checkpoints.

    Args:
        config: The federation.
        callbacks: Callbacks of the server; they are called when a round is complete.
        num_nodes: The number of SuperNodes. None means `num_workers`, or else one per core. Never more than clients
            of a round.

    Raises:
        DovetailError: The server has failed, or one of Flower's processes.
    """
    server = config.server
    nodes = num_nodes or server.num_workers or config.trainer.max_concurrency
    nodes = min(nodes or num_cores(), config.clients.per_round, config.clients.total_clients)
    # Flower starts its processes in another folder, so relative paths would name other files there.
    paths = {"checkpoint_path": server.checkpoint_path, "states_path": server.states_path}
    config = config.with_settings(**{name: str(Path(path).absolute()) for name, path in paths.items() if path})
    view = _ServerView(config)
    listeners = with_results([it() if isinstance(it, type) else it for it in callbacks], config.results)
    # The server in Flower's process writes the journal beside its checkpoints.
    listeners = with_journal(listeners)
    # The results are written here, and not by the server in Flower's process.
    config = replace(config, results=ResultsConfig())
    with tempfile.TemporaryDirectory(prefix="dovetail-flower-") as scratch, LocalFlower(Path(scratch), nodes) as flower:
        for callback in listeners:
            callback.on_training_will_start(view)
        try:
            for entry in _rounds(flower, config.with_settings(num_workers=nodes), Path(scratch)):
                if isinstance(entry, ClientsEvaluation):
                    view.personalized = entry
                    for callback in listeners:
                        callback.on_clients_personalized(view)
                    continue
                view.records.append(entry)
                view.current_round = entry.round
                for callback in listeners:
                    callback.on_clients_processed(view)
        finally:
            for callback in listeners:
                callback.on_server_will_close(view)
    return view.records


@dataclass(frozen=True)
class _BackendName:
    """The backend of a server in another process: callbacks read only its name."""

    name: str


@dataclass
class _ServerView:
    """Stand-in for a server in another process, with the attributes that callbacks read."""

    config: FederatedConfig
    records: list[RoundRecord] = field(default_factory=list)
    current_round: int = 0
    personalized: ClientsEvaluation | None = None
    backend: _BackendName = field(default_factory=lambda: _BackendName("flower"))


def _rounds(flower: LocalFlower, config: FederatedConfig, folder: Path) -> Iterator[RoundRecord | ClientsEvaluation]:
    """Submit the app, and yield its rounds when they are complete."""
    file_path = folder / _ROUNDS
    file_path.touch()
    run = flower.submit(_app(folder, config))
    with file_path.open(encoding="utf-8") as lines:
        while True:
            # Checked before the file is read: otherwise lines between reading and the end of the process would be
            # lost.
            has_ended = run.poll() is not None
            for line in _whole_lines(lines):
                entry = json.loads(line)
                if "error" in entry:
                    raise DovetailError(entry["error"])
                if "end" in entry:
                    return
                is_round = "round" in entry
                yield RoundRecord.from_plain(entry) if is_round else ClientsEvaluation.from_plain(entry)
            if has_ended:
                raise DovetailError(f"the server ended early: {flower.last_output('run')}")
            flower.check()
            time.sleep(_POLL)


def _whole_lines(file: TextIO) -> Iterator[str]:
    while True:
        place = file.tell()
        line = file.readline()
        # The server is still writing this line; read it again later.
        if not line.endswith("\n"):
            file.seek(place)
            return
        yield line


def _app(folder: Path, config: FederatedConfig) -> Path:
    """Write a Flower app that consists of its description only, and return its folder."""
    app = folder / "app"
    app.mkdir()
    settings = {"federation": json.dumps(encode_plain(asdict(config), "federation")), "folder": str(folder)}
    # A string of JSON is a string of TOML.
    lines = [f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in settings.items()]
    (app / "pyproject.toml").write_text(
        _DESCRIPTION.format(module=__name__) + "\n".join(lines) + "\n", encoding="utf-8"
    )
    return app


_DESCRIPTION = """\
[project]
name = "federation"
version = "1.0.0"
description = "A federation of a configuration file."
license = "Apache-2.0"

[tool.flwr.app]
publisher = "dovetail"

[tool.flwr.app.components]
serverapp = "{module}:serverapp"
clientapp = "{module}:clientapp"

[tool.flwr.app.config]
"""

# ------------------------------------------------------------------ in Flower's processes


def _read_config(context: Context) -> FederatedConfig:
    plain = decode(json.loads(str(context.run_config["federation"])), "federation")
    # `asdict` made dictionaries of the sections; each becomes the dataclass of its default again.
    default = FederatedConfig()
    return FederatedConfig(**{name: replace(getattr(default, name), **values) for name, values in plain.items()})


def _server(context: Context) -> Server:
    return federation(_read_config(context))[0]


def _client(context: Context) -> Client:
    return federation(_read_config(context))[1]


class _RoundWriter(ServerCallback):
    """Writes every round into the file that `run_on_flower` reads."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write_line(self, what: dict[str, Any]) -> None:
        self._file.write(json.dumps(what) + "\n")
        self._file.flush()

    def on_training_will_start(self, server: Any) -> None:
        # A resumed server has rounds of its checkpoint, which the reader of the file does not have.
        for record in server.records:
            self.write_line(record.to_plain())

    def on_clients_processed(self, server: Any) -> None:
        self.write_line(server.records[-1].to_plain())

    def on_clients_personalized(self, server: Any) -> None:
        self.write_line(server.personalized.to_plain())


serverapp = ServerApp()
clientapp = client_app(_client, _server)


@serverapp.main()
def _main(grid: Grid, context: Context) -> None:
    config = _read_config(context)
    with Path(str(context.run_config["folder"]), _ROUNDS).open("a", encoding="utf-8") as file:
        writer = _RoundWriter(file)
        try:
            server, client = federation(config, [writer])
            server_app(server, client, num_nodes=config.server.num_workers, states="server")(grid, context)
        except Exception as error:
            # Otherwise the user would only see that Flower's app failed.
            writer.write_line({"error": f"{type(error).__name__}: {error}"})
            raise
        writer.write_line({"end": True})
