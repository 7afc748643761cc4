"""What runs beside every SuperNode."""

from __future__ import annotations

from digits.federation import client, server
from dovetail.federated.flower import client_app

app = client_app(client, server)
