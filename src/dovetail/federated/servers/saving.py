"""Checkpoints of a server: its state after a round, saved in a folder and restored from it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dovetail import checkpoint as store
from dovetail.errors import CheckpointError
from dovetail.federated.records import RoundRecord
from dovetail.federated.states import StoredClientStates

if TYPE_CHECKING:
    from dovetail.federated.servers.fedavg import Server


# The file of client states in the folder of checkpoints.
_STATES = "clients.db"
# The newest checkpoint, and the one before it in case the newest is damaged.
_NUM_CHECKPOINTS = 2


def server_state(server: Server) -> dict[str, Any]:
    """Return everything that the next round depends on; a checkpoint contains it."""
    return {
        **_round_state(server),
        "seed": server.config.server.random_seed,
        "clients": server.states.state_dict(),
        "records": [record.to_plain() for record in server.records],
    }


def restore_server(server: Server, state: Mapping[str, Any]) -> None:
    """Restore the state returned by `server_state`.

    Raises:
        CheckpointError: The state belongs to another federation.
    """
    _check_state(server, state)
    _restore_round_state(server, state)
    # After the checks: the stored states of later rounds are deleted here, which cannot be undone.
    server.states.load_state_dict(state["clients"])
    server.records = [RoundRecord.from_plain(plain) for plain in state["records"]]


def snapshot(server: Server) -> dict[str, Any]:
    """Return a copy of what a round changes, for `roll_back`; the client states keep their own."""
    state = _round_state(server)
    # Weights are replaced and never changed in place, so they need no copy.
    return state | {name: copy.deepcopy(state[name]) for name in ("algorithm", "selection", "postprocessors")}


def roll_back(server: Server, before: Mapping[str, Any]) -> None:
    """Undo a round that failed: restore a `snapshot` and the client states of the last complete round."""
    _restore_round_state(server, before)
    server.states.rollback()


def save_server(server: Server) -> None:
    """Write a checkpoint of the last round if the configuration names a folder, and delete old ones."""
    folder = server.config.server.checkpoint_path
    if folder is None:
        return
    store.save(
        Path(folder, f"round_{server.current_round}"),
        server.state_dict(),
        summary={"step": server.current_round, "metrics": dict(server.records[-1].metrics)},
    )
    store.prune(folder, last=_NUM_CHECKPOINTS, pattern="round_*")


def resume_server(server: Server) -> None:
    """Open the file of client states, and restore the newest checkpoint; without one, start without client states."""
    settings = server.config.server
    folder = settings.states_path or settings.checkpoint_path
    if folder is not None:
        server.states = StoredClientStates(Path(folder, _STATES), _NUM_CHECKPOINTS)
    newest = None if settings.checkpoint_path is None else store.load_latest(settings.checkpoint_path)
    if newest is None:
        # The file may hold states of an earlier run whose checkpoints were deleted.
        server.states.clear()
    else:
        server.load_state_dict(newest[1])


def _round_state(server: Server) -> dict[str, Any]:
    """Return the part of the state that does not grow with rounds and clients."""
    return {
        "round": server.current_round,
        "weights": dict(server.weights),
        "algorithm": {"name": server.algorithm.title, "state": server.algorithm.state_dict()},
        "selection": {"name": type(server.selection).__name__, "state": server.selection.state_dict()},
        "postprocessors": server.outbound.state_dict(),
        "clock": server.clock.state_dict(),
    }


def _restore_round_state(server: Server, state: Mapping[str, Any]) -> None:
    server.current_round = int(state["round"])
    server.weights = dict(state["weights"])
    server.algorithm.load_state_dict(state["algorithm"]["state"])
    server.selection.load_state_dict(state["selection"]["state"])
    server.outbound.load_state_dict(state["postprocessors"])
    server.clock.load_state_dict(state["clock"])


def _check_state(server: Server, state: Mapping[str, Any]) -> None:
    """Raise if a state was saved by another kind of run, or by a federation with another model or other settings."""
    if "records" not in state:
        raise CheckpointError("the checkpoint is not of a server, and has no rounds: give another checkpoint_path")
    shapes = [{name: value.shape for name, value in each.items()} for each in (state["weights"], server.weights)]
    if shapes[0] != shapes[1]:
        raise CheckpointError("the checkpoint is of another model: give another checkpoint_path, or the same model")
    names = {"algorithm": server.algorithm.title, "selection": type(server.selection).__name__}
    saved = {**{what: state[what]["name"] for what in names}, "seed": state["seed"]}
    for what, value in {**names, "seed": server.config.server.random_seed}.items():
        if saved[what] != value:
            raise CheckpointError(
                f"the checkpoint was written with {what} {saved[what]}, not {value}: give another checkpoint_path, "
                f"or the same {what}"
            )
