"""Flower: the same server and clients as a Flower app, on a SuperLink with SuperNodes."""

from __future__ import annotations

from dovetail.extras import require

# Before the modules that import it, so that the error names the extra.
require("flwr", "flower")

from dovetail.federated.flower.apps import client_app, server_app, worker_app  # noqa: E402
from dovetail.federated.flower.backend import FlowerBackend  # noqa: E402

__all__ = ["FlowerBackend", "client_app", "server_app", "worker_app"]
