"""Algorithms by name, for configurations."""

from __future__ import annotations

from collections.abc import Callable

from dovetail.algorithms.apfl import APFL
from dovetail.algorithms.base import Algorithm
from dovetail.algorithms.ditto import Ditto
from dovetail.algorithms.fedadp import FedAdp
from dovetail.algorithms.fedala import FedALA
from dovetail.algorithms.fedasync import FedAsync
from dovetail.algorithms.fedatt import FedAtt
from dovetail.algorithms.fedavg import FedAvg
from dovetail.algorithms.fedbabu import FedBABU
from dovetail.algorithms.fedbuff import FedBuff
from dovetail.algorithms.feddyn import FedDyn
from dovetail.algorithms.fedmos import FedMos
from dovetail.algorithms.fednova import FedNova
from dovetail.algorithms.fedper import FedPer
from dovetail.algorithms.fedprox import FedProx
from dovetail.algorithms.fedrep import FedRep
from dovetail.algorithms.fedsam import FedSAM
from dovetail.algorithms.finetune import FedAvgFinetune
from dovetail.algorithms.lg_fedavg import LGFedAvg
from dovetail.algorithms.moon import MOON
from dovetail.algorithms.perfedavg import PerFedAvg
from dovetail.algorithms.pfedgraph import PFedGraph
from dovetail.algorithms.scaffold import SCAFFOLD
from dovetail.algorithms.server_optimizers import FedAdagrad, FedAdam, FedAvgM, FedYogi
from dovetail.registry import Registry

__all__ = ["algorithms"]

algorithms: Registry[Callable[..., Algorithm]] = Registry(
    "algorithm",
    lambda: {
        "apfl": APFL,
        "ditto": Ditto,
        "fedadagrad": FedAdagrad,
        "fedadam": FedAdam,
        "fedadp": FedAdp,
        "fedala": FedALA,
        "fedasync": FedAsync,
        "fedatt": FedAtt,
        "fedavg": FedAvg,
        "fedavg_finetune": FedAvgFinetune,
        "fedavgm": FedAvgM,
        "fedbabu": FedBABU,
        "fedbuff": FedBuff,
        "feddyn": FedDyn,
        "fedmos": FedMos,
        "fednova": FedNova,
        "fedper": FedPer,
        "fedprox": FedProx,
        "fedrep": FedRep,
        "fedsam": FedSAM,
        "fedyogi": FedYogi,
        "lg_fedavg": LGFedAvg,
        "moon": MOON,
        "perfedavg": PerFedAvg,
        "pfedgraph": PFedGraph,
        "scaffold": SCAFFOLD,
    },
)
