"""Federated algorithms, one file each."""

from __future__ import annotations

from dovetail.algorithms.apfl import APFL, APFLStepStrategy, APFLUpdateStrategy, APFLUpdateStrategyFromConfig
from dovetail.algorithms.base import Algorithm
from dovetail.algorithms.composite import CompositeAlgorithm
from dovetail.algorithms.ditto import Ditto, DittoUpdateStrategy, DittoUpdateStrategyFromConfig
from dovetail.algorithms.fedadp import FedAdp
from dovetail.algorithms.fedala import FedALA, FedALAUpdateStrategy
from dovetail.algorithms.fedasync import FedAsync
from dovetail.algorithms.fedatt import FedAtt
from dovetail.algorithms.fedavg import FedAvg
from dovetail.algorithms.fedbabu import FedBABU, FedBABUUpdateStrategy, FedBABUUpdateStrategyFromConfig
from dovetail.algorithms.fedbuff import FedBuff
from dovetail.algorithms.feddyn import FedDyn, FedDynLossStrategy, FedDynLossStrategyFromConfig, FedDynUpdateStrategy
from dovetail.algorithms.fedmos import (
    FedMos,
    FedMosOptimizer,
    FedMosOptimizerStrategy,
    FedMosOptimizerStrategyFromConfig,
    FedMosStepStrategy,
    FedMosUpdateStrategy,
)
from dovetail.algorithms.fednova import FedNova
from dovetail.algorithms.fedper import FedPer, FedPerUpdateStrategy, FedPerUpdateStrategyFromConfig
from dovetail.algorithms.fedprox import FedProx, FedProxLossStrategy, FedProxLossStrategyFromConfig
from dovetail.algorithms.fedrep import FedRep, FedRepUpdateStrategy, FedRepUpdateStrategyFromConfig
from dovetail.algorithms.fedsam import FedSAM, FedSAMStepStrategy
from dovetail.algorithms.finetune import FedAvgFinetune, FinetuneUpdateStrategy
from dovetail.algorithms.lg_fedavg import (
    LGFedAvg,
    LGFedAvgStepStrategy,
    LGFedAvgStepStrategyAuto,
    LGFedAvgStepStrategyFromConfig,
)
from dovetail.algorithms.moon import MOON, MOONStepStrategy
from dovetail.algorithms.perfedavg import PerFedAvg, PerFedAvgStepStrategy
from dovetail.algorithms.pfedgraph import PFedGraph, PFedGraphLossStrategy, PFedGraphUpdateStrategy
from dovetail.algorithms.registry import algorithms
from dovetail.algorithms.scaffold import SCAFFOLD, SCAFFOLDUpdateStrategy, SCAFFOLDUpdateStrategyV2
from dovetail.algorithms.server_optimizers import FedAdagrad, FedAdam, FedAvgM, FedYogi

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
    "PFedGraph",
    "PFedGraphLossStrategy",
    "PFedGraphUpdateStrategy",
    "PerFedAvg",
    "PerFedAvgStepStrategy",
    "SCAFFOLDUpdateStrategy",
    "SCAFFOLDUpdateStrategyV2",
    "algorithms",
]
