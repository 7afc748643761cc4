"""States of clients by their ids, in memory or in a file beside the server's checkpoints."""

from __future__ import annotations

import io
import sqlite3
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dovetail.checkpoint.encoding import decode_text, encode
from dovetail.checkpoint.files import Digest
from dovetail.checkpoint.tensors import read_tensors, stream
from dovetail.errors import CheckpointError

# Nested tensors and plain values.
ClientState = dict[str, Any]


class ClientStates:
    """The states of clients, in memory. Clients that were never selected use no memory.

    Example:
        >>> states = ClientStates()
        >>> states.put(7, {"rounds": 1})
        >>> states.get(7), states.get(8), len(states)
        ({'rounds': 1}, {}, 1)
    """

    def __init__(self) -> None:
        self._states: dict[int, ClientState] = {}
        # The states before the current round, of clients whose state has changed since.
        self._before: dict[int, ClientState] = {}

    def get(self, client_id: int) -> ClientState:
        """Return the state of a client; an empty one for a client that has none."""
        return self._states.get(client_id, {})

    def put(self, client_id: int, state: ClientState) -> None:
        """Store the state of a client; an empty one is deleted."""
        # Only the first change of a round matters: a rollback restores the state before the round.
        self._before.setdefault(client_id, self.get(client_id))
        self._keep(client_id, state)

    def commit(self) -> None:
        """End a round: its states belong to the next checkpoint."""
        self._before.clear()

    def rollback(self) -> None:
        """Restore the states of the end of the last round."""
        for client_id, state in self._before.items():
            self._keep(client_id, state)
        self._before.clear()

    def __len__(self) -> int:
        """Return the number of clients that have a state."""
        return len(self._states)

    def clear(self) -> None:
        """Delete all states."""
        self._states.clear()
        self._before.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return the states for a checkpoint."""
        return {"states": {str(client_id): state for client_id, state in self._states.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by `state_dict`."""
        if "states" not in state:
            raise CheckpointError("the checkpoint keeps the states of clients in a file: give the same states_path")
        self._states = {int(client_id): dict(kept) for client_id, kept in state["states"].items()}
        self._before.clear()

    def _keep(self, client_id: int, state: ClientState) -> None:
        if state:
            self._states[client_id] = state
        else:
            self._states.pop(client_id, None)


class StoredClientStates(ClientStates):
    """The states of clients in a file, so that memory does not grow with the number of clients.

    Every state is stored with its round, and the state before it as long as a checkpoint needs it. A checkpoint has
    only the number of its round. Loading it deletes later states, so that a server that was killed resumes with states
    and weights of the same round. Nothing in the file is ever unpickled.

    Every state has a SHA-256, which is compared when the state is read. A checkpoint has the sum of the checksums of
    all newest states, so that damaged or missing states are never used. Older files without checksums can be read:
    a state gets its checksum when it is written again.

    Args:
        path: The file, an SQLite database; created if it does not exist.
        num_checkpoints: The number of rounds before the last one that can be restored.

    Example:
        >>> import tempfile
        >>> states = StoredClientStates(Path(tempfile.mkdtemp(), "clients.db"))
        >>> states.put(7, {"rounds": 1})
        >>> states.commit()
        >>> saved = states.state_dict()
        >>> states.put(7, {"rounds": 2})
        >>> states.load_state_dict(saved)
        >>> states.get(7), states.get(8)
        ({'rounds': 1}, {})
    """

    def __init__(self, path: Path, num_checkpoints: int = 2) -> None:
        self.path = path
        self._num_checkpoints = num_checkpoints
        path.parent.mkdir(parents=True, exist_ok=True)
        self._database = sqlite3.connect(path, check_same_thread=False)
        self._closing = weakref.finalize(self, self._database.close)
        try:
            self._has_checksums = self._make_table()
        except _DAMAGE as error:
            raise CheckpointError(f"{path}: not a file of client states: {error}") from error
        self._round = 0
        self._count = 0
        # The sum of the checksums of the newest states.
        self._sum = 0

    def get(self, client_id: int) -> ClientState:
        found = self._run(
            "SELECT round, text, tensors, sha256 FROM states WHERE client = ? ORDER BY round DESC LIMIT 1", client_id
        )
        if not found:
            return {}
        round, text, tensors, sha256 = found[0]
        where = f"{self.path}, client {client_id}"
        is_whole = isinstance(text, bytes | None) and isinstance(tensors, bytes | None)
        # In a file of an older version, a state may have no checksum.
        is_known = sha256 is not None or self._has_checksums
        if not is_whole or (is_known and sha256 != _sha256(client_id, round, text, tensors)):
            raise CheckpointError(
                f"{where}: the state of round {round} is damaged: it does not have the SHA-256 that it was written with"
            )
        if text is None:
            return {}
        read = read_tensors(io.BytesIO(tensors), len(tensors), where, Digest())
        state: ClientState = decode_text(text, where, read, "cpu")
        return state

    def put(self, client_id: int, state: ClientState) -> None:
        """Store the state of a client for the running round, without a commit."""
        # States of the running round have its number, so that a rollback can delete them by number.
        coming = self._round + 1
        encoded = encode(state) if state else None
        known = self._run("SELECT sha256 FROM states WHERE client = ? ORDER BY round DESC LIMIT 1", client_id)
        if encoded is None and not known:
            return
        self._count += not known
        row = (None, None) if encoded is None else (encoded.text, b"".join(stream(encoded.blocks)))
        sha256 = _sha256(client_id, coming, *row)
        # The sum is updated, not recomputed: a checkpoint must not read the states of a million clients.
        self._sum += _number(sha256) - sum(_number(before) for (before,) in known)
        self._run(
            "INSERT OR REPLACE INTO states (client, round, text, tensors, sha256) VALUES (?, ?, ?, ?, ?)",
            *(client_id, coming, *row, sha256),
        )
        self._run(
            # Keeps the newest state of each checkpoint that can still be restored, and deletes older ones.
            "DELETE FROM states WHERE client = ?1 AND round < "
            "(SELECT max(round) FROM states WHERE client = ?1 AND round <= ?2)",
            *(client_id, coming - self._num_checkpoints),
        )

    def commit(self) -> None:
        self._database.commit()
        self._round += 1

    def rollback(self) -> None:
        self._go_back(self._round)

    def __len__(self) -> int:
        """Return the number of clients that have a state, or had one."""
        return self._count

    def clear(self) -> None:
        self._go_back(0)

    def state_dict(self) -> dict[str, Any]:
        """Return the round, the number of clients with a state, and the sum of the checksums, for a checkpoint."""
        return {"round": self._round, "count": self._count, "sha256": f"{self._sum % _MODULUS:064x}"}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the states of the round of `state_dict`.

        Raises:
            CheckpointError: The file is not the one that belongs to the checkpoint.
        """
        if "round" not in state:
            raise CheckpointError("the checkpoint holds the states of clients itself, and needs no states_path")
        self._go_back(int(state["round"]))
        if self._count != state["count"]:
            raise CheckpointError(
                f"{self.path}: expected the states of {state['count']} clients after round {state['round']}, "
                f"found {self._count}: the file does not belong to the checkpoint, or is damaged"
            )
        # Checkpoints of an older version have no sum.
        if state.get("sha256", self.state_dict()["sha256"]) != self.state_dict()["sha256"]:
            raise CheckpointError(
                f"{self.path}: the states of clients after round {state['round']} do not match the checkpoint: "
                "the file does not belong to the checkpoint, or is damaged"
            )

    def _make_table(self) -> bool:
        """Create the table, or add the checksums to an old one; return whether every state has a checksum."""
        run = self._database.execute
        # The checkpoint that refers to these states is written after the commit, and must not survive without them.
        run("PRAGMA synchronous = FULL")
        columns = [row[1] for row in run("PRAGMA table_info(states)")]
        if not columns:
            run(
                "CREATE TABLE states (client INTEGER, round INTEGER, text BLOB, tensors BLOB, sha256 TEXT, "
                "PRIMARY KEY (client, round)) WITHOUT ROWID"
            )
            run(f"PRAGMA user_version = {_WITH_CHECKSUMS}")
        elif "sha256" not in columns:
            run("ALTER TABLE states ADD COLUMN sha256 TEXT")
        return bool(run("PRAGMA user_version").fetchone()[0] == _WITH_CHECKSUMS)

    def _run(self, statement: str, *values: Any) -> list[Any]:
        """Run a statement, and return all its rows."""
        try:
            return self._database.execute(statement, values).fetchall()
        except _DAMAGE as error:
            raise CheckpointError(f"{self.path}: the file of client states cannot be used: {error}") from error

    def _go_back(self, round: int) -> None:
        # First the uncommitted changes, then states of rounds that were committed after the checkpoint.
        self._database.rollback()
        self._run("DELETE FROM states WHERE round > ?", round)
        try:
            self._database.commit()
            # SQLite takes the other columns from the row that has the largest round.
            newest = self._run("SELECT max(round), sha256 FROM states GROUP BY client")
            checksums = [_number(sha256) for _, sha256 in newest]
        except (*_DAMAGE, TypeError) as error:
            raise CheckpointError(f"{self.path}: the file of client states is damaged: {error}") from error
        self._round, self._count, self._sum = round, len(checksums), sum(checksums)


# SQLite raises the first for a damaged file, and Python the second for text in it, also in SQLite's own message.
_DAMAGE = (sqlite3.DatabaseError, ValueError)
# In a file with this version, every state has a checksum.
_WITH_CHECKSUMS = 1
_MODULUS = 2**256


def _sha256(client_id: int, round: int, text: bytes | None, tensors: bytes | None) -> str:
    """Return the checksum of a state, its client and its round, so that a state in a wrong row is damaged, too."""
    digest = Digest()
    sizes = [None if part is None else len(part) for part in (text, tensors)]
    digest.update(f"{client_id} {round} {sizes}".encode())
    for part in (text, tensors):
        digest.update(part or b"")
    return digest.sha256


def _number(sha256: str | None) -> int:
    return 0 if sha256 is None else int(sha256, 16)
