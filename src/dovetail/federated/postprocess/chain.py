"""Chain of postprocessors, applied in order on the client and in reverse order on the server."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from dovetail.errors import ConfigError
from dovetail.federated.messages import Fault, Task, Update, Weights
from dovetail.federated.postprocess.base import Codec, Gathering, Postprocessor, Upload
from dovetail.federated.postprocess.registry import make
from dovetail.runtime.seeds import derive_seed

# The errors of a decoder that receives bytes of a dishonest client.
_UNREADABLE = (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError)

# The key of the states of postprocessors in the state of a client.
_KEY = "postprocessors"


class Chain:
    """Postprocessors that encode an update in order on the client, and decode it in reverse order on the server.

    Client and server have the same chain. Another chain encodes the weights that are sent to clients, with `pack` at
    the server and `unpack` at the clients.

    Args:
        steps: Postprocessors, names of them, or mappings of one name to its arguments.

    Example:
        >>> chain = Chain([{"norm_clip": {"max_norm": 1.0}}, "quantization"])
        >>> task = Task(round=1, client_id=7, weights={"w": torch.zeros(2)})
        >>> sent = chain.encode(Update(7, 1, 20, delta={"w": torch.tensor([3.0, 4.0])}), task, state={})
        >>> sent.delta["w/levels"]
        tensor([  0, 255], dtype=torch.uint8)
        >>> updates, faults = chain.decode([sent], Gathering(1, [7], task.weights))
        >>> updates[0].delta, faults
        ({'w': tensor([0.6000, 0.8000])}, [])
        >>> sent.metrics["update_norm"], sent.metrics["raw_bytes"], sent.metrics["sent_bytes"]
        (5.0, 8.0, 10.0)
    """

    def __init__(self, steps: Iterable[Any] = ()) -> None:
        self.steps = tuple(make(step) for step in steps)
        # Clipping or noise after a codec would change levels or indices, and not the numbers that they encode.
        encoding: Postprocessor | None = None
        for step in self.steps:
            if encoding is not None and not isinstance(step, Codec):
                raise ConfigError(
                    f"{type(step).__name__} after {type(encoding).__name__} would not see the model's tensors: "
                    "put it before"
                )
            encoding = step if step.encodes else encoding

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def needs_cohort(self) -> bool:
        """True if the config of a task must have the ids of the round's clients, as `cohort`."""
        return any(step.needs_cohort for step in self.steps)

    @property
    def needs_plain_mean(self) -> bool:
        """True if the guarantee of a step holds only for the mean of updates."""
        return any(step.needs_plain_mean for step in self.steps)

    def encode(self, update: Update, task: Task, state: dict[str, Any]) -> Update:
        """Return the encoded update, on the client.

        The states of the steps are stored in the client's `state`. The metrics of the result have its size before
        (`raw_bytes`) and after (`sent_bytes`).
        """
        if not self.steps:
            return update
        before = update.num_bytes
        kept = state.get(_KEY, {})
        keeping = {}
        for position, step in enumerate(self.steps):
            # A copy: the state of the client must stay unchanged if the server does not use this update.
            own = dict(kept.get(str(position), {}))
            update = step.encode(update, Upload(task, derive_seed(task.seed, _KEY, position), own))
            if own:
                keeping[str(position)] = own
        if keeping:
            state[_KEY] = keeping
        sizes = {"raw_bytes": float(before), "sent_bytes": float(update.num_bytes)}
        return replace(update, metrics={**update.metrics, **sizes})

    def decode(self, updates: Sequence[Update], gathering: Gathering) -> tuple[list[Update], list[Fault]]:
        """Return the decoded updates of a round, and a fault for every one that cannot be decoded, on the server."""
        faults = []
        for step in reversed(self.steps):
            decoded = []
            for update in updates:
                try:
                    decoded.append(step.decode(update, gathering))
                except _UNREADABLE as error:
                    reason = f"client {update.client_id}: {type(step).__name__} cannot read its update: {error}"
                    faults.append(Fault(update.client_id, update.round, "wrong shape", reason))
            # Per step, because steps before it in the chain need the combined update: noise is added to a sum of
            # masked updates.
            updates = step.combine(decoded, gathering)
        return list(updates), faults

    def aggregated(self, mean: Weights, updates: Sequence[Update], gathering: Gathering) -> Weights:
        """Return the mean of a round's updates as the steps change it, on the server."""
        for position, step in reversed(list(enumerate(self.steps))):
            own = replace(gathering, seed=derive_seed(gathering.seed, _KEY, position))
            mean = step.aggregated(mean, updates, own)
        return mean

    def pack(self, weights: Weights, seed: int) -> Weights:
        """Return the encoded weights, once for all clients of a round.

        Raises:
            ConfigError: A step is no codec.
        """
        for position, codec in enumerate(self._codecs()):
            weights = codec.pack(weights, torch.Generator().manual_seed(derive_seed(seed, _KEY, position)))
        return weights

    def unpack(self, weights: Weights) -> Weights:
        """Return the decoded weights."""
        for codec in reversed(self._codecs()):
            weights = codec.unpack(weights)
        return weights

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint of the server must keep."""
        states = {str(position): step.state_dict() for position, step in enumerate(self.steps)}
        return {position: state for position, state in states.items() if state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by `state_dict`."""
        for position, own in state.items():
            self.steps[int(position)].load_state_dict(own)

    def _codecs(self) -> list[Codec]:
        codecs = [step for step in self.steps if isinstance(step, Codec)]
        if len(codecs) < len(self.steps):
            other = next(type(step).__name__ for step in self.steps if not isinstance(step, Codec))
            raise ConfigError(f"{other} processes updates only: inbound_processors accepts codecs only")
        return codecs
