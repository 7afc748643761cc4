"""Registry of federated algorithms by name, for configurations."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from dovetail.errors import ConfigError
from dovetail.federated.algorithms.apfl import APFL
from dovetail.federated.algorithms.base import Algorithm
from dovetail.federated.algorithms.composite import CompositeAlgorithm
from dovetail.federated.algorithms.ditto import Ditto
from dovetail.federated.algorithms.fedadp import FedAdp
from dovetail.federated.algorithms.fedala import FedALA
from dovetail.federated.algorithms.fedasync import FedAsync
from dovetail.federated.algorithms.fedatt import FedAtt
from dovetail.federated.algorithms.fedavg import FedAvg
from dovetail.federated.algorithms.fedbabu import FedBABU
from dovetail.federated.algorithms.fedbuff import FedBuff
from dovetail.federated.algorithms.feddyn import FedDyn
from dovetail.federated.algorithms.fedmos import FedMos
from dovetail.federated.algorithms.fednova import FedNova
from dovetail.federated.algorithms.fedper import FedPer
from dovetail.federated.algorithms.fedprox import FedProx
from dovetail.federated.algorithms.fedrep import FedRep
from dovetail.federated.algorithms.fedsam import FedSAM
from dovetail.federated.algorithms.finetune import FedAvgFinetune
from dovetail.federated.algorithms.lg_fedavg import LGFedAvg
from dovetail.federated.algorithms.moon import MOON
from dovetail.federated.algorithms.perfedavg import PerFedAvg
from dovetail.federated.algorithms.pfedgraph import PFedGraph
from dovetail.federated.algorithms.scaffold import SCAFFOLD
from dovetail.federated.algorithms.server_optimizers import FedAdagrad, FedAdam, FedAvgM, FedYogi
from dovetail.federated.config import AlgorithmConfig
from dovetail.federated.specs import build
from dovetail.registry import Registry

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


def algorithm_of(config: AlgorithmConfig) -> Algorithm:
    """Return the algorithm that a configuration names, or several as one.

    Raises:
        ConfigError: An option is invalid, or fits none or several of the algorithms.

    Example:
        >>> algorithm_of(AlgorithmConfig(type=("fedprox", "fedadam"), options={"mu": 0.1}))
        CompositeAlgorithm(algorithms=[FedProx(mu=0.1), FedAdam()])
    """
    wanted, options = config.type, dict(config.options)
    if isinstance(wanted, str):
        return build(algorithms, {wanted: options})
    plain = {name: set(inspect.signature(algorithms.get(name)).parameters) for name in wanted if isinstance(name, str)}
    given: dict[str, dict[str, Any]] = {name: {} for name in plain}
    for option, value in options.items():
        # An option of the section belongs to the only algorithm that has it; otherwise the file must name the
        # algorithm.
        takers = [name for name, taken in plain.items() if option in taken]
        if len(takers) != 1:
            owners = f"{' and '.join(takers)} both have" if takers else "no algorithm that is given by name alone has"
            raise ConfigError(
                f"algorithm.{option}: {owners} this option; write {{name: {{{option}: …}}}} in the list of types"
            )
        given[takers[0]][option] = value
    return CompositeAlgorithm(
        [build(algorithms, {each: given[each]} if isinstance(each, str) else each) for each in wanted]
    )
