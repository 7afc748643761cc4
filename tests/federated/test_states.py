"""What clients keep from round to round."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest
import torch

from dovetail.errors import CheckpointError
from dovetail.federated.states import ClientStates, StoredClientStates


@pytest.fixture
def stored(tmp_path: Path) -> StoredClientStates:
    return StoredClientStates(tmp_path / "clients.db")


def test_a_stored_client_state_is_restored(stored: StoredClientStates) -> None:
    shared = torch.arange(4.0)
    state = {"model": {"w": shared, "n": torch.tensor(3)}, "again": shared, "rounds": 3, "seen": (1, "a", None, 0.5)}
    stored.put(7, state)
    back = stored.get(7)
    assert torch.equal(back["model"].pop("w"), shared)
    assert torch.equal(back.pop("again"), shared)
    assert back == {"model": {"n": torch.tensor(3)}, "rounds": 3, "seen": (1, "a", None, 0.5)}


@pytest.mark.parametrize("kind", ["memory", "stored"])
def test_a_client_without_a_round_has_an_empty_state(kind: str, stored: StoredClientStates) -> None:
    states = stored if kind == "stored" else ClientStates()
    assert states.get(1) == {}
    states.put(1, {})
    assert len(states) == 0


@pytest.mark.parametrize("kind", ["memory", "stored"])
def test_an_empty_state_replaces_an_earlier_one(kind: str, stored: StoredClientStates) -> None:
    states = stored if kind == "stored" else ClientStates()
    states.put(1, {"rounds": 1})
    states.put(1, {})
    assert states.get(1) == {}


def test_states_in_memory_are_in_the_server_checkpoint() -> None:
    states, other = ClientStates(), ClientStates()
    states.put(7, {"rounds": 1})
    other.load_state_dict(states.state_dict())
    assert other.get(7) == {"rounds": 1}


def test_states_stored_after_a_checkpoint_are_discarded_by_loading_it(tmp_path: Path) -> None:
    states = StoredClientStates(tmp_path / "clients.db")
    states.put(1, {"rounds": 1})
    states.commit()
    saved = states.state_dict()
    states.put(1, {"rounds": 2})
    states.put(2, {"rounds": 2})
    states.commit()
    again = StoredClientStates(tmp_path / "clients.db")
    again.load_state_dict(saved)
    assert (again.get(1), again.get(2), len(again)) == ({"rounds": 1}, {}, 1)


def test_uncommitted_states_are_lost_with_the_process(tmp_path: Path) -> None:
    states = StoredClientStates(tmp_path / "clients.db")
    states.put(1, {"rounds": 1})
    assert StoredClientStates(tmp_path / "clients.db").get(1) == {}


def test_states_can_be_restored_for_every_kept_checkpoint(stored: StoredClientStates) -> None:
    saved = {}
    for round in range(1, 7):
        # Every second round only, so that the state of a round may be much older.
        stored.put(1 + round % 2, {"rounds": round})
        stored.commit()
        saved[round] = stored.state_dict()
    stored.load_state_dict(saved[5])
    assert (stored.get(1), stored.get(2)) == ({"rounds": 4}, {"rounds": 5})
    stored.load_state_dict(saved[4])
    assert (stored.get(1), stored.get(2)) == ({"rounds": 4}, {"rounds": 3})


def test_older_state_versions_are_deleted(stored: StoredClientStates, tmp_path: Path) -> None:
    for round in range(50):
        stored.put(1, {"rounds": round})
        stored.commit()
    with sqlite3.connect(tmp_path / "clients.db") as database:
        rows = database.execute("SELECT count(*) FROM states").fetchone()[0]
    database.close()
    assert rows <= 3


def test_a_state_file_that_does_not_match_the_checkpoint_is_rejected(
    tmp_path: Path, stored: StoredClientStates
) -> None:
    stored.put(1, {"rounds": 1})
    stored.commit()
    other = StoredClientStates(tmp_path / "other.db")
    with pytest.raises(CheckpointError, match="expected the states of 1 clients after round 1, found 0"):
        other.load_state_dict(stored.state_dict())


def test_memory_and_file_states_reject_each_others_checkpoints(stored: StoredClientStates) -> None:
    with pytest.raises(CheckpointError, match="give the same states_path"):
        ClientStates().load_state_dict(stored.state_dict())
    with pytest.raises(CheckpointError, match="needs no states_path"):
        stored.load_state_dict(ClientStates().state_dict())


def test_a_file_of_another_kind_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "clients.db").write_bytes(b"not a database, but long enough to be taken for one" * 40)
    with pytest.raises(CheckpointError, match="not a file of client states"):
        StoredClientStates(tmp_path / "clients.db")


def test_a_damaged_state_is_rejected(stored: StoredClientStates) -> None:
    stored.put(1, {"w": torch.ones(2)})
    stored._database.execute("UPDATE states SET text = x'00'")
    with pytest.raises(CheckpointError, match="client 1"):
        stored.get(1)


@pytest.mark.parametrize("kind", ["memory", "stored"])
def test_the_states_of_a_failed_round_can_be_discarded(kind: str, stored: StoredClientStates) -> None:
    states = stored if kind == "stored" else ClientStates()
    states.put(1, {"rounds": 1})
    states.commit()
    states.put(1, {"rounds": 2})
    states.put(1, {"rounds": 3})
    states.put(2, {"rounds": 1})
    states.rollback()
    assert (states.get(1), states.get(2), len(states)) == ({"rounds": 1}, {}, 1)


def _written(path: Path) -> dict[str, Any]:
    """Write the states of some clients over three rounds, and return what their checkpoint has."""
    states = StoredClientStates(path)
    for round in range(3):
        for client_id in (1, 2, 7):
            if round == 0 or (client_id + round) % 2:
                states.put(client_id, {"rounds": round, "own": {"w": torch.full((20,), float(round + client_id))}})
        states.put(9, {"rounds": 1} if round < 2 else {})
        states.commit()
    return states.state_dict()


def _changed(path: Path, statement: str, *values: Any) -> None:
    with sqlite3.connect(path) as database:
        database.execute(statement, values)
    database.close()


def test_a_damaged_state_is_named_in_the_error(tmp_path: Path) -> None:
    path = tmp_path / "clients.db"
    saved = _written(path)
    with sqlite3.connect(path) as database:
        (tensors,) = database.execute("SELECT tensors FROM states WHERE client = 7 AND round = 3").fetchone()
    database.close()
    _changed(path, "UPDATE states SET tensors = ? WHERE client = 7 AND round = 3", tensors[:-1] + b"\x01")
    states = StoredClientStates(path)
    states.load_state_dict(saved)
    assert states.get(1)["rounds"] == 2
    with pytest.raises(CheckpointError, match=r"clients\.db, client 7: the state of round 3 is damaged"):
        states.get(7)


@pytest.mark.parametrize(
    "statement",
    [
        "DELETE FROM states WHERE client = 7 AND round = 3",
        "UPDATE states SET round = 9 WHERE client = 7 AND round = 3",
        "UPDATE states SET sha256 = NULL WHERE client = 7",
    ],
)
def test_a_state_without_entry_or_checksum_is_found_when_loading(statement: str, tmp_path: Path) -> None:
    path = tmp_path / "clients.db"
    saved = _written(path)
    _changed(path, statement)
    with pytest.raises(CheckpointError, match=r"the states of clients after round 3 do not match the checkpoint"):
        StoredClientStates(path).load_state_dict(saved)


def test_states_swapped_between_two_clients_are_detected(tmp_path: Path) -> None:
    path = tmp_path / "clients.db"
    _written(path)
    _changed(path, "UPDATE states SET client = client + 100 WHERE client = 1")
    with pytest.raises(CheckpointError, match="client 101: the state of round 3 is damaged"):
        StoredClientStates(path).get(101)


def test_no_flipped_bit_of_the_file_gives_another_state(tmp_path: Path) -> None:
    path, damaged = tmp_path / "clients.db", tmp_path / "damaged.db"
    saved = _written(path)
    ids = (1, 2, 7, 8, 9)
    states = StoredClientStates(path)
    expected = [str(states.get(client_id)) for client_id in ids]
    content = path.read_bytes()
    refused = []
    for position in range(0, len(content), 11):
        flipped = bytearray(content)
        flipped[position] ^= 1 << position % 8
        damaged.write_bytes(flipped)
        try:
            states = StoredClientStates(damaged)
            states.load_state_dict(saved)
            assert [str(states.get(client_id)) for client_id in ids] == expected
        except CheckpointError as error:
            refused.append(str(error))
    assert len(refused) > 50
    assert all("damaged.db" in sentence for sentence in refused)


def test_a_file_from_before_checksums_is_read_and_upgraded(tmp_path: Path) -> None:
    path = tmp_path / "clients.db"
    saved = _written(path)
    with sqlite3.connect(path) as database:
        database.execute("ALTER TABLE states DROP COLUMN sha256")
        database.execute("PRAGMA user_version = 0")
    database.close()
    states = StoredClientStates(path)
    states.load_state_dict({name: saved[name] for name in ("round", "count")})
    assert [states.get(client_id).get("rounds") for client_id in (1, 2, 7, 9)] == [2, 1, 2, None]
    states.put(1, {"rounds": 4})
    states.commit()
    newer = states.state_dict()
    again = StoredClientStates(path)
    again.load_state_dict(newer)
    assert again.get(1) == {"rounds": 4}
    _changed(path, "UPDATE states SET text = text || x'20' WHERE client = 1 AND round = 4")
    with pytest.raises(CheckpointError, match="client 1: the state of round 4 is damaged"):
        StoredClientStates(path).get(1)
