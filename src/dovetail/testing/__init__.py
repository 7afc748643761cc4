"""Contract suites: tests that every strategy, callback, searcher, algorithm and backend must pass, for your own ones.

Subclass the contract of a kind in a test file, and define `make`:

    from dovetail.testing import LossStrategyContract

    class TestFocalLoss(LossStrategyContract):
        def make(self):
            return FocalLossStrategy(gamma=2.0)

pytest collects the subclass and runs every test of the contract. The test problem is a tiny classifier; if a strategy
needs another one, override `make_model`, `make_data` or `make_options`. The contracts of searchers, backends and
algorithms are defined in `dovetail.search.contract`, `dovetail.federated.backends.contract` and
`dovetail.federated.servers.contract`. Nothing here imports pytest.
"""

from dovetail.federated.backends.contract import BackendContract
from dovetail.federated.servers.contract import AlgorithmContract
from dovetail.search.contract import SearcherContract
from dovetail.testing.callbacks import CallbackContract
from dovetail.testing.strategies import (
    DataLoaderStrategyContract,
    LossStrategyContract,
    LRSchedulerStrategyContract,
    ModelUpdateStrategyContract,
    OptimizerStrategyContract,
    TestingStrategyContract,
    TrainingStepStrategyContract,
)

__all__ = [
    "AlgorithmContract",
    "BackendContract",
    "CallbackContract",
    "DataLoaderStrategyContract",
    "LRSchedulerStrategyContract",
    "LossStrategyContract",
    "ModelUpdateStrategyContract",
    "OptimizerStrategyContract",
    "SearcherContract",
    "TestingStrategyContract",
    "TrainingStepStrategyContract",
]
