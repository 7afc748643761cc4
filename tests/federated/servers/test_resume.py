"""Servers resumed from their checkpoints; kills are in tests/reliability."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from federation import KINDS, Blobs, make_server, make_trainer, outcome
from torch import nn

from dovetail import checkpoint as store
from dovetail.algorithms import FedBuff
from dovetail.clients.simple import Client
from dovetail.errors import CheckpointError
from dovetail.federated import ServerCallback
from dovetail.servers.fedavg import Server


class PowerCutError(Exception):
    pass


class Cut(ServerCallback):
    """Ends the run in a round, between its aggregation and its checkpoint."""

    def __init__(self, round: int) -> None:
        self.round = round

    def on_weights_aggregated(self, server: Any, updates: Any) -> None:
        if server.current_round == self.round:
            raise PowerCutError


class Complain(ServerCallback):
    """Fails once in every round: in odd ones when they are over, in even ones before."""

    def __init__(self) -> None:
        self.heard: set[int] = set()

    def on_weights_aggregated(self, server: Any, updates: Any) -> None:
        self._complain(server.current_round, 0)

    def on_clients_processed(self, server: Any) -> None:
        self._complain(server.current_round, 1)

    def _complain(self, number: int, remainder: int) -> None:
        if number % 2 == remainder and number not in self.heard:
            self.heard.add(number)
            raise RuntimeError(f"round {number}")


def _run(kind: str, folder: Path | None = None, **options: Any) -> Server:
    server = make_server(kind, folder, **options)
    server.run(Client(trainer=make_trainer()))
    return server


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_interrupted_in_any_round_ends_with_the_same_bits(kind: str, tmp_path: Path) -> None:
    expected = outcome(_run(kind))
    for round in range(1, 6):
        with pytest.raises(PowerCutError):
            _run(kind, tmp_path, callbacks=[Cut(round)])
    assert outcome(_run(kind, tmp_path)) == expected


@pytest.mark.parametrize("is_stored", [False, True])
def test_a_callback_error_keeps_a_finished_round_and_discards_a_running_one(is_stored: bool, tmp_path: Path) -> None:
    server = make_server("everything", tmp_path if is_stored else None, callbacks=[Complain()])
    server.prepare(Client(trainer=make_trainer()))
    for number in range(1, 6):
        with pytest.raises(RuntimeError, match=f"round {number}"):
            server.run()
        assert len(server.records) == number - (number % 2 == 0)
        if is_stored:
            newest = store.list_checkpoints(tmp_path / "checkpoints")[-1].path.name
            assert newest == f"round_{len(server.records)}"
    assert outcome(server) == outcome(_run("everything"))


def test_a_finished_run_is_not_changed_by_another_run(tmp_path: Path) -> None:
    expected = outcome(_run("everything", tmp_path))
    assert outcome(_run("everything", tmp_path)) == expected


def test_two_checkpoints_are_kept_and_a_damaged_one_is_skipped(tmp_path: Path) -> None:
    expected = outcome(_run("everything", tmp_path))
    checkpoints = tmp_path / "checkpoints"
    assert [info.path.name for info in store.list_checkpoints(checkpoints)] == ["round_4", "round_5"]
    (checkpoints / "round_5" / "tensors.safetensors").write_bytes(b"")
    with pytest.warns(store.CheckpointWarning, match="skipping a damaged checkpoint"):
        assert outcome(_run("everything", tmp_path)) == expected


def test_client_states_of_an_earlier_run_are_ignored(tmp_path: Path) -> None:
    expected = outcome(_run("everything", tmp_path))
    for path in (tmp_path / "checkpoints").glob("round_*"):
        shutil.rmtree(path)
    assert outcome(_run("everything", tmp_path)) == expected


def test_checkpoints_without_client_states_are_rejected(tmp_path: Path) -> None:
    _run("everything", tmp_path)
    (tmp_path / "checkpoints" / "clients.db").unlink()
    with pytest.raises(CheckpointError, match="the file does not belong to the checkpoint"):
        _run("everything", tmp_path)


def test_client_states_can_be_stored_in_another_folder(tmp_path: Path) -> None:
    options = {"states_path": str(tmp_path / "states")}
    with pytest.raises(PowerCutError):
        _run("everything", tmp_path, callbacks=[Cut(3)], **options)
    assert (tmp_path / "states" / "clients.db").exists()
    assert outcome(_run("everything", tmp_path, **options)) == outcome(_run("everything"))


def test_client_states_can_be_stored_in_a_file_without_checkpoints(tmp_path: Path) -> None:
    expected = outcome(_run("everything"))
    for _ in range(2):
        assert outcome(_run("everything", states_path=str(tmp_path))) == expected


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"seed": 4}, "written with seed 3, not 4"),
        ({"algorithm": FedBuff}, "written with algorithm FedAvg, not FedBuff"),
        ({"selection_name": "round_robin"}, "written with selection RandomSelection, not RoundRobinSelection"),
    ],
)
def test_a_checkpoint_of_another_federation_is_rejected(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    _run("plain", tmp_path, rounds=1)
    with pytest.raises(CheckpointError, match=words):
        _run("plain", tmp_path, **options)


def test_a_checkpoint_that_is_not_a_server_checkpoint_is_rejected(tmp_path: Path) -> None:
    store.save(tmp_path / "checkpoints" / "epoch_1", {"model": {}, "progress": {}})
    with pytest.raises(CheckpointError, match="not of a server, and has no rounds: give another checkpoint_path"):
        _run("plain", tmp_path)


def test_a_checkpoint_of_another_model_is_rejected(tmp_path: Path) -> None:
    _run("plain", tmp_path, rounds=1)
    server = Server(nn.Linear(4, 3), Blobs(), rounds=2, seed=3, checkpoint_path=str(tmp_path / "checkpoints"))
    with pytest.raises(CheckpointError, match="of another model"):
        server.run(Client(trainer=make_trainer()))
