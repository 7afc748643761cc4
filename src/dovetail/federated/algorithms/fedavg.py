"""FedAvg: federated averaging of client updates, weighted by samples."""

from __future__ import annotations

from dovetail.federated.algorithms.base import Algorithm


class FedAvg(Algorithm):
    """w ← w + Σ (n_k / n) Δ_k over the clients of a round (McMahan et al., 2017).

    Example:
        >>> FedAvg()
        FedAvg()
    """
