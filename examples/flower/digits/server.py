"""What runs beside the SuperLink."""

from __future__ import annotations

from digits.federation import client, server
from dovetail.federated.flower import server_app

app = server_app(server, client)
