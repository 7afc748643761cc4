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
        num_nodes: How many SuperNodes; None for `num_workers`, or as many as clients are asked and cores are there.

    Raises:
        DovetailError: The server has failed, or one of Flower's processes.
    """
    server = config.server
    nodes = num_nodes or server.num_workers or config.trainer.max_concurrency
    nodes = min(nodes or num_cores(), config.clients.per_round, config.clients.total_clients)
    # Flower's processes work elsewhere.
    paths = {"checkpoint_path": server.checkpoint_path, "states_path": server.states_path}
    config = config.with_settings(**{name: str(Path(path).absolute()) for name, path in paths.items() if path})
    watched = _Watched(config)
    hearing = with_results([it() if isinstance(it, type) else it for it in callbacks], config.results)
    # The results are written here, and not by the server in Flower's process.
    config = replace(config, results=ResultsConfig())
    with tempfile.TemporaryDirectory(prefix="dovetail-flower-") as scratch, LocalFlower(Path(scratch), nodes) as flower:
        for callback in hearing:
            callback.on_training_will_start(watched)
        try:
            for told in _rounds(flower, config.with_settings(num_workers=nodes), Path(scratch)):
                if isinstance(told, ClientsEvaluation):
                    watched.personalized = told
                    for callback in hearing:
                        callback.on_clients_personalized(watched)
                    continue
                watched.records.append(told)
                watched.current_round = told.round
                for callback in hearing:
                    callback.on_clients_processed(watched)
        finally:
            for callback in hearing:
                callback.on_server_will_close(watched)
    return watched.records


@dataclass(frozen=True)
class _Named:
    """The name of a backend in another process."""

    name: str


@dataclass
class _Watched:
    """What callbacks see of a server in another process."""

    config: FederatedConfig
    records: list[RoundRecord] = field(default_factory=list)
    current_round: int = 0
    personalized: ClientsEvaluation | None = None
    backend: _Named = field(default_factory=lambda: _Named("flower"))


def _rounds(flower: LocalFlower, config: FederatedConfig, folder: Path) -> Iterator[RoundRecord | ClientsEvaluation]:
    """Submit the app, and give its rounds as they end."""
    written = folder / _ROUNDS
    written.touch()
    run = flower.submit(_app(folder, config))
    with written.open(encoding="utf-8") as lines:
        while True:
            has_ended = run.poll() is not None
            for line in _whole_lines(lines):
                told = json.loads(line)
                if "error" in told:
                    raise DovetailError(told["error"])
                if "end" in told:
                    return
                is_round = "round" in told
                yield RoundRecord.from_plain(told) if is_round else ClientsEvaluation.from_plain(told)
            if has_ended:
                raise DovetailError(f"the server ended early: {flower.said('run')}")
            flower.check()
            time.sleep(_POLL)


def _whole_lines(file: TextIO) -> Iterator[str]:
    while True:
        place = file.tell()
        line = file.readline()
        if not line.endswith("\n"):
            file.seek(place)
            return
        yield line


def _app(folder: Path, config: FederatedConfig) -> Path:
    """Write a Flower app that consists of its description only, and return its folder."""
    app = folder / "app"
    app.mkdir()
    told = {"federation": json.dumps(encode_plain(asdict(config), "federation")), "folder": str(folder)}
    # A string of JSON is a string of TOML.
    lines = [f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in told.items()]
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


def _told(context: Context) -> FederatedConfig:
    plain = decode(json.loads(str(context.run_config["federation"])), "federation")
    default = FederatedConfig()
    return FederatedConfig(**{name: replace(getattr(default, name), **values) for name, values in plain.items()})


def _server(context: Context) -> Server:
    return federation(_told(context))[0]


def _client(context: Context) -> Client:
    return federation(_told(context))[1]


class _Tell(ServerCallback):
    """Writes every round into the file that `run_on_flower` reads."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def tell(self, what: dict[str, Any]) -> None:
        self._file.write(json.dumps(what) + "\n")
        self._file.flush()

    def on_training_will_start(self, server: Any) -> None:
        for record in server.records:
            self.tell(record.to_plain())

    def on_clients_processed(self, server: Any) -> None:
        self.tell(server.records[-1].to_plain())

    def on_clients_personalized(self, server: Any) -> None:
        self.tell(server.personalized.to_plain())


serverapp = ServerApp()
clientapp = client_app(_client, _server)


@serverapp.main()
def _main(grid: Grid, context: Context) -> None:
    config = _told(context)
    with Path(str(context.run_config["folder"]), _ROUNDS).open("a", encoding="utf-8") as file:
        telling = _Tell(file)
        try:
            server, client = federation(config, [telling])
            server_app(server, client, num_nodes=config.server.num_workers, states="server")(grid, context)
        except Exception as error:
            telling.tell({"error": f"{type(error).__name__}: {error}"})
            raise
        telling.tell({"end": True})
