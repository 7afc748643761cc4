"""plato's `servers.fedavg_personalized`: after the last round, every client trains the model for itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dovetail.compat.plato.servers import fedavg

__all__ = ["Server"]


class Server(fedavg.Server):
    """A server that ends with a round of personalization, also without `algorithm.personalization` in its settings.

    Example:
        >>> server = Server(rounds=1, total_clients=4, per_round=2, testset_sampler="iid")
        >>> _ = server.run()
        >>> sorted(server.personalized.metrics)
        [1, 2, 3, 4]
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        algorithm = self.config.algorithm
        if not algorithm.personalization:
            # Any setting requests the personalization round; with a ratio of 1 all clients take part in the rounds
            # before.
            own = replace(algorithm, personalization={"participating_client_ratio": 1.0})
            self.config = replace(self.config, algorithm=own)
