"""What clients keep from round to round."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
import torch

from dovetail.errors import CheckpointError
from dovetail.federated.states import ClientStates, StoredClientStates


@pytest.fixture
def stored(tmp_path: Path) -> StoredClientStates:
    return StoredClientStates(tmp_path / "clients.db")


def test_a_stored_state_comes_back_as_it_was(stored: StoredClientStates) -> None:
    shared = torch.arange(4.0)
    state = {"model": {"w": shared, "n": torch.tensor(3)}, "again": shared, "rounds": 3, "seen": (1, "a", None, 0.5)}
    stored.put(7, state)
    back = stored.get(7)
    assert torch.equal(back["model"].pop("w"), shared)
    assert torch.equal(back.pop("again"), shared)
    assert back == {"model": {"n": torch.tensor(3)}, "rounds": 3, "seen": (1, "a", None, 0.5)}


@pytest.mark.parametrize("kind", ["memory", "stored"])
def test_a_client_that_was_never_asked_has_an_empty_state(kind: str, stored: StoredClientStates) -> None:
    states = stored if kind == "stored" else ClientStates()
    assert states.get(1) == {}
    states.put(1, {})
    assert len(states) == 0


@pytest.mark.parametrize("kind", ["memory", "stored"])
def test_an_empty_state_takes_the_place_of_another(kind: str, stored: StoredClientStates) -> None:
    states = stored if kind == "stored" else ClientStates()
    states.put(1, {"rounds": 1})
    states.put(1, {})
    assert states.get(1) == {}


def test_states_in_memory_are_in_the_checkpoint() -> None:
    states, other = ClientStates(), ClientStates()
    states.put(7, {"rounds": 1})
    other.load_state_dict(states.state_dict())
    assert other.get(7) == {"rounds": 1}


def test_what_was_put_after_a_checkpoint_is_forgotten_with_it(tmp_path: Path) -> None:
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


def test_what_was_not_committed_is_lost_with_the_process(tmp_path: Path) -> None:
    states = StoredClientStates(tmp_path / "clients.db")
    states.put(1, {"rounds": 1})
    assert StoredClientStates(tmp_path / "clients.db").get(1) == {}


def test_states_can_go_back_as_far_as_checkpoints_are_kept(stored: StoredClientStates) -> None:
    saved = {}
    for round in range(1, 7):
        # Every second round only, so that a round's state may be that of one long ago.
        stored.put(1 + round % 2, {"rounds": round})
        stored.commit()
        saved[round] = stored.state_dict()
    stored.load_state_dict(saved[5])
    assert (stored.get(1), stored.get(2)) == ({"rounds": 4}, {"rounds": 5})
    stored.load_state_dict(saved[4])
    assert (stored.get(1), stored.get(2)) == ({"rounds": 4}, {"rounds": 3})


def test_older_versions_do_not_pile_up(stored: StoredClientStates, tmp_path: Path) -> None:
    for round in range(50):
        stored.put(1, {"rounds": round})
        stored.commit()
    with sqlite3.connect(tmp_path / "clients.db") as database:
        rows = database.execute("SELECT count(*) FROM states").fetchone()[0]
    database.close()
    assert rows <= 3


def test_a_file_that_does_not_belong_to_the_checkpoint_is_refused(tmp_path: Path, stored: StoredClientStates) -> None:
    stored.put(1, {"rounds": 1})
    stored.commit()
    other = StoredClientStates(tmp_path / "other.db")
    with pytest.raises(CheckpointError, match="expected the states of 1 clients after round 1, found 0"):
        other.load_state_dict(stored.state_dict())


def test_the_two_kinds_do_not_take_each_others_checkpoints(stored: StoredClientStates) -> None:
    with pytest.raises(CheckpointError, match="give the same states_path"):
        ClientStates().load_state_dict(stored.state_dict())
    with pytest.raises(CheckpointError, match="needs no states_path"):
        stored.load_state_dict(ClientStates().state_dict())


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "clients.db").write_bytes(b"not a database, but long enough to be taken for one" * 40)
    with pytest.raises(CheckpointError, match="not a file of client states"):
        StoredClientStates(tmp_path / "clients.db")


def test_a_damaged_state_is_refused(stored: StoredClientStates) -> None:
    stored.put(1, {"w": torch.ones(2)})
    stored._database.execute("UPDATE states SET text = x'00'")
    with pytest.raises(CheckpointError, match="client 1"):
        stored.get(1)


@pytest.mark.parametrize("kind", ["memory", "stored"])
def test_a_round_that_failed_can_be_forgotten(kind: str, stored: StoredClientStates) -> None:
    states = stored if kind == "stored" else ClientStates()
    states.put(1, {"rounds": 1})
    states.commit()
    states.put(1, {"rounds": 2})
    states.put(1, {"rounds": 3})
    states.put(2, {"rounds": 1})
    states.rollback()
    assert (states.get(1), states.get(2), len(states)) == ({"rounds": 1}, {}, 1)
