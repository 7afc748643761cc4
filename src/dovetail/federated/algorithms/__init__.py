"""Federated algorithms, one file each."""

from __future__ import annotations

from dovetail.federated.algorithms.apfl import APFL, APFLStepStrategy, APFLUpdateStrategy, APFLUpdateStrategyFromConfig
from dovetail.federated.algorithms.base import Algorithm
from dovetail.federated.algorithms.composite import CompositeAlgorithm
from dovetail.federated.algorithms.ditto import Ditto, DittoUpdateStrategy, DittoUpdateStrategyFromConfig
from dovetail.federated.algorithms.fedadp import FedAdp
from dovetail.federated.algorithms.fedala import FedALA, FedALAUpdateStrategy
from dovetail.federated.algorithms.fedasync import FedAsync
from dovetail.federated.algorithms.fedatt import FedAtt
from dovetail.federated.algorithms.fedavg import FedAvg
from dovetail.federated.algorithms.fedbabu import FedBABU, FedBABUUpdateStrategy, FedBABUUpdateStrategyFromConfig
from dovetail.federated.algorithms.fedbuff import FedBuff
from dovetail.federated.algorithms.feddyn import (
    FedDyn,
    FedDynLossStrategy,
    FedDynLossStrategyFromConfig,
    FedDynUpdateStrategy,
)
from dovetail.federated.algorithms.fedmos import (
    FedMos,
    FedMosOptimizer,
    FedMosOptimizerStrategy,
    FedMosOptimizerStrategyFromConfig,
    FedMosStepStrategy,
    FedMosUpdateStrategy,
)
from dovetail.federated.algorithms.fednova import FedNova
from dovetail.federated.algorithms.fedper import FedPer, FedPerUpdateStrategy, FedPerUpdateStrategyFromConfig
from dovetail.federated.algorithms.fedprox import FedProx, FedProxLossStrategy, FedProxLossStrategyFromConfig
from dovetail.federated.algorithms.fedrep import FedRep, FedRepUpdateStrategy, FedRepUpdateStrategyFromConfig
from dovetail.federated.algorithms.fedsam import FedSAM, FedSAMStepStrategy
from dovetail.federated.algorithms.finetune import FedAvgFinetune, FinetuneUpdateStrategy
from dovetail.federated.algorithms.lg_fedavg import (
    LGFedAvg,
    LGFedAvgStepStrategy,
    LGFedAvgStepStrategyAuto,
    LGFedAvgStepStrategyFromConfig,
)
from dovetail.federated.algorithms.moon import MOON, MOONStepStrategy
from dovetail.federated.algorithms.own_phase import OwnPhaseStrategy
from dovetail.federated.algorithms.penalty import PenalizedLossStrategy
from dovetail.federated.algorithms.perfedavg import PerFedAvg, PerFedAvgStepStrategy
from dovetail.federated.algorithms.pfedgraph import PFedGraph, PFedGraphLossStrategy, PFedGraphUpdateStrategy
from dovetail.federated.algorithms.registry import algorithms
from dovetail.federated.algorithms.scaffold import SCAFFOLD, SCAFFOLDUpdateStrategy, SCAFFOLDUpdateStrategyV2
from dovetail.federated.algorithms.server_optimizers import FedAdagrad, FedAdam, FedAvgM, FedYogi

__all__ = [
    "APFL",
    "MOON",
    "SCAFFOLD",
    "APFLStepStrategy",
    "APFLUpdateStrategy",
    "APFLUpdateStrategyFromConfig",
    "Algorithm",
    "CompositeAlgorithm",
    "Ditto",
    "DittoUpdateStrategy",
    "DittoUpdateStrategyFromConfig",
    "FedALA",
    "FedALAUpdateStrategy",
    "FedAdagrad",
    "FedAdam",
    "FedAdp",
    "FedAsync",
    "FedAtt",
    "FedAvg",
    "FedAvgFinetune",
    "FedAvgM",
    "FedBABU",
    "FedBABUUpdateStrategy",
    "FedBABUUpdateStrategyFromConfig",
    "FedBuff",
    "FedDyn",
    "FedDynLossStrategy",
    "FedDynLossStrategyFromConfig",
    "FedDynUpdateStrategy",
    "FedMos",
    "FedMosOptimizer",
    "FedMosOptimizerStrategy",
    "FedMosOptimizerStrategyFromConfig",
    "FedMosStepStrategy",
    "FedMosUpdateStrategy",
    "FedNova",
    "FedPer",
    "FedPerUpdateStrategy",
    "FedPerUpdateStrategyFromConfig",
    "FedProx",
    "FedProxLossStrategy",
    "FedProxLossStrategyFromConfig",
    "FedRep",
    "FedRepUpdateStrategy",
    "FedRepUpdateStrategyFromConfig",
    "FedSAM",
    "FedSAMStepStrategy",
    "FedYogi",
    "FinetuneUpdateStrategy",
    "LGFedAvg",
    "LGFedAvgStepStrategy",
    "LGFedAvgStepStrategyAuto",
    "LGFedAvgStepStrategyFromConfig",
    "MOONStepStrategy",
    "OwnPhaseStrategy",
    "PFedGraph",
    "PFedGraphLossStrategy",
    "PFedGraphUpdateStrategy",
    "PenalizedLossStrategy",
    "PerFedAvg",
    "PerFedAvgStepStrategy",
    "SCAFFOLDUpdateStrategy",
    "SCAFFOLDUpdateStrategyV2",
    "algorithms",
]
