"""Contract tests for federated algorithms: subclass them to test your own."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Mapping
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from dovetail import checkpoint as store
from dovetail.federated.algorithms import Algorithm
from dovetail.federated.callbacks import ServerCallback
from dovetail.federated.clients.simple import Client
from dovetail.federated.data.sources import Datasource
from dovetail.federated.servers.fedavg import Server
from dovetail.trainers.composable import ComposableTrainer
from dovetail.trainers.reuse import equip
from dovetail.trainers.strategies import SGDOptimizerStrategy, ShuffleDataLoaderStrategy
from dovetail.units import Batches

_SIZES = (17, 6, 24, 9)
_ROUNDS = 3


class AlgorithmContract:
    """Tests of an `Algorithm`, in federations of four unequal clients.

    Subclass it at the top level of a test file, and define `make`. Nothing here imports pytest.

    Attributes:
        vectorizes: True if clients can train as one fleet. If False, the backend `vectorized` must warn with the
            reason, and end with the same weights.

    Example:
        >>> from dovetail.federated.algorithms import FedProx
        >>> class TestFedProx(AlgorithmContract):
        ...     vectorizes = True
        ...     def make(self):
        ...         return FedProx(mu=0.1)
        >>> TestFedProx().test_a_fleet_ends_where_clients_alone_do()
    """

    __test__: ClassVar[bool] = False
    vectorizes: ClassVar[bool] = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__test__" not in vars(cls):
            # pytest collects only classes that define `make`, and skips an abstract base that a user derives from
            # this class.
            cls.__test__ = cls.make is not AlgorithmContract.make

    # ------------------------------------------------------------------ methods for a subclass

    def make(self) -> Algorithm:
        """Return a new algorithm, every time with the same settings."""
        raise NotImplementedError(f"{type(self).__name__}.make: return the algorithm to test")

    def make_model(self) -> nn.Module:
        """Return a model for 6 numbers and 3 classes, in float64."""
        # In float64, the different summation order of a fleet stays below the tolerance of `_assert_close`.
        return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()

    def make_trainer(self, **options: Any) -> ComposableTrainer:
        """Return the trainer of clients."""
        defaults = {
            "optimizer_strategy": SGDOptimizerStrategy(lr=0.05, momentum=0.5),
            "data_loader_strategy": ShuffleDataLoaderStrategy(),
            "num_epochs": 2,
            "batch_size": 4,
            "verbose": False,
        }
        return ComposableTrainer(**{**defaults, **options})

    # ------------------------------------------------------------------ tests

    def test_is_an_algorithm(self) -> None:
        """`make` returns a new algorithm each time, and its `repr` starts with the name of its class."""
        one, other = self.make(), self.make()
        assert isinstance(one, Algorithm), f"make() returned {one!r}, which is no Algorithm"
        assert one is not other, "make() returned the same object twice"
        assert repr(one).startswith(type(one).__name__), f"the repr {one!r} lacks the class name"

    def test_a_federation_ends_with_finite_weights_that_have_moved(self) -> None:
        """Three rounds move the model."""
        server = self._run()
        assert all(value.isfinite().all() for value in server.weights.values()), "a weight is not finite"
        first = server._initial_model.state_dict()
        assert any((server.weights[name] != value).any() for name, value in first.items()), "no weight has changed"
        assert not any(record.faults for record in server.records), f"clients failed: {server.records[-1].faults}"

    def test_the_same_seed_gives_the_same_bits(self) -> None:
        """Two federations with one seed agree, also if they use the same algorithm object."""
        algorithm = self.make()
        expected = _outcome(self._run(algorithm))
        _assert_same(_outcome(self._run(algorithm)), expected, "the second run of one object")

    def test_processes_end_where_one_does(self) -> None:
        """Clients in two processes give the same bits, so a client keeps everything in its state."""
        _assert_same(_outcome(self._run(backend="process", num_workers=2)), _outcome(self._run()), "in processes")

    def test_a_fleet_ends_where_clients_alone_do(self) -> None:
        """Clients that train together under `vmap` end with the weights of clients that train one after the other."""
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            fleet = self._run(backend="vectorized")
        reasons = [str(it.message) for it in told if "one after the other" in str(it.message)]
        assert bool(reasons) != self.vectorizes, f"expected vectorizes to be {self.vectorizes}: {reasons}"
        _assert_close(_outcome(fleet), _outcome(self._run()), "as a fleet")

    def test_a_server_that_is_killed_goes_on_with_the_same_bits(self) -> None:
        """A new server that resumes from the checkpoint of any round ends with the bits of an uninterrupted one."""
        expected = _outcome(self._run())
        for last in range(1, _ROUNDS):
            with TemporaryDirectory() as folder:
                try:
                    self._run(checkpoint_path=folder, callbacks=[_Leave(last)])
                except _LeftError:
                    pass
                else:
                    raise AssertionError(f"the server did not stop after round {last}")
                # A new algorithm and a new server: everything that they need must come from the checkpoint.
                resumed = self._run(checkpoint_path=folder)
                _assert_same(_outcome(resumed), expected, f"resumed after round {last}")

    def test_clients_can_be_judged_before_they_were_asked(self) -> None:
        """Every client returns metrics, also one that was in no round."""
        server = self._run(per_round=1, rounds=1)
        found = server.evaluate_clients().metrics
        assert sorted(found) == list(range(1, len(_SIZES) + 1)), f"clients {sorted(found)} answered"
        assert all(math.isfinite(each["loss"]) for each in found.values()), f"a loss is not finite: {found}"

    def test_clients_can_train_for_themselves_after_the_last_round(self) -> None:
        """Personalization does not change the global model."""
        server = self._run()
        before = copy.deepcopy(dict(server.weights))
        found = server.personalize(epochs=2)
        assert not found.faults, f"clients failed: {found.faults}"
        assert sorted(found.metrics) == list(range(1, len(_SIZES) + 1))
        _assert_same(dict(server.weights), before, "the global model")

    def test_what_it_sends_is_never_changed(self) -> None:
        """Evaluation and personalization change no tensor that the algorithm sends to clients."""
        server = self._run(rounds=1)
        sent = server.algorithm.payload(1)
        before = copy.deepcopy(dict(sent))
        server.evaluate_clients()
        server.personalize(epochs=1)
        _assert_same(dict(sent), before, "what the server sends")

    def test_its_strategies_train_in_a_trainer_of_their_own(self) -> None:
        """The strategies of the algorithm train in a plain trainer, and resume from any checkpoint bit for bit."""
        with TemporaryDirectory() as folder:
            whole = self._alone(checkpoint_dir=folder, save_every=0, save_hist=False)
            whole.fit(_Unequal().train_data(1), checkpoint_period=Batches(3))
            assert all(value.isfinite().all() for value in whole.model.state_dict().values()), "a weight is not finite"
            saved = store.list_checkpoints(folder)
            assert len(saved) > 1, "no checkpoint was written before the end"
            for info in saved:
                resumed = self._alone()
                resumed.fit(_Unequal().train_data(1), resume=info.path)
                _assert_same(_kept(resumed), _kept(whole), f"resumed from {info.path.name}")

    # ------------------------------------------------------------------ private

    def _run(self, algorithm: Algorithm | None = None, callbacks: Any = (), **settings: Any) -> Server:
        trainer = self.make_trainer()
        defaults = {"rounds": _ROUNDS, "per_round": 3, "total_clients": len(_SIZES), "seed": 2, **settings}
        server = Server(
            self.make_model, _Unequal(), algorithm or self.make(), trainer=trainer, callbacks=callbacks, **defaults
        )
        server.run(Client(trainer=trainer))
        return server

    def _alone(self, **options: Any) -> ComposableTrainer:
        torch.manual_seed(0)
        model = self.make_model()
        trainer = self.make_trainer(model=model, seed=1, **options)
        algorithm = self.make()
        # The steps of a client before its first task, without server and backend.
        algorithm.prepare(model, 1)
        equip(trainer, **algorithm.equip(trainer.strategies))
        return trainer


class _Unequal(Datasource):
    """Clients of unequal size, each with another shift of its samples."""

    num_clients = len(_SIZES)

    def train_data(self, client_id: int) -> tuple[Tensor, Tensor]:
        return _drawn(client_id, _SIZES[client_id - 1])

    def test_data(self, client_id: int) -> tuple[Tensor, Tensor]:
        return _drawn(client_id + 100, 8)

    def num_samples(self, client_id: int) -> int:
        return _SIZES[client_id - 1]


def _drawn(seed: int, size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 3, (size,), generator=generator)
    noise = torch.randn(size, 6, generator=generator, dtype=torch.float64)
    # Each label moves one of the first three inputs, so the task can be learned; each client has another offset.
    return noise + 2 * torch.eye(3, 6, dtype=torch.float64)[labels] + 0.2 * (seed % 100), labels


class _LeftError(Exception):
    """Raised by `_Leave`, in place of a crash of the server."""


class _Leave(ServerCallback):
    """Ends a server in the middle of the round after a given one."""

    def __init__(self, last: int) -> None:
        self.last = last

    def on_weights_aggregated(self, server: Any, updates: Any) -> None:
        # The round is aggregated but not recorded, so the resumed server must repeat all of it.
        if server.current_round == self.last + 1:
            raise _LeftError


def _outcome(server: Server) -> dict[str, Any]:
    states = {str(client_id): server.states.get(client_id) for client_id in range(1, len(_SIZES) + 1)}
    metrics = [dict(record.metrics) for record in server.records]
    judged = server.evaluate_clients().metrics
    return {
        "weights": dict(server.weights),
        "algorithm": server.algorithm.state_dict(),
        "clients": states,
        "metrics": metrics,
        "judged": {str(client_id): each for client_id, each in judged.items()},
    }


def _kept(trainer: ComposableTrainer) -> dict[str, Any]:
    return {"model": trainer.model.state_dict(), "client_state": trainer.context.client.state}


def _assert_same(one: Any, other: Any, what: str) -> None:
    _compare(one, other, what, lambda a, b: bool(torch.equal(a, b)))


def _assert_close(one: Any, other: Any, what: str) -> None:
    _compare(one, other, what, lambda a, b: torch.allclose(a.double(), b.double(), rtol=1e-9, atol=1e-10))


def _compare(one: Any, other: Any, what: str, agree: Callable[[Tensor, Tensor], bool]) -> None:
    if isinstance(one, Mapping):
        assert one.keys() == other.keys(), f"{what}: {sorted(one)} is not {sorted(other)}"
        for name, value in one.items():
            _compare(value, other[name], f"{what}: {name}", agree)
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), f"{what}: {len(one)} is not {len(other)}"
        for place, (value, expected) in enumerate(zip(one, other, strict=True)):
            _compare(value, expected, f"{what}: {place}", agree)
    elif isinstance(one, (Tensor, float)):
        values = torch.as_tensor(one), torch.as_tensor(other)
        assert values[0].shape == values[1].shape, f"{what}: {one!r} is not {other!r}"
        assert agree(*values), f"{what}: {one!r} is not {other!r}"
    else:
        assert one == other, f"{what}: {one!r} is not {other!r}"
