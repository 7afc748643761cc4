"""After the last round, clients may train for themselves."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from toy import federation

from dovetail.algorithms import SCAFFOLD, CompositeAlgorithm, FedAvg, FedNova, FedPer, FedProx
from dovetail.checks import ConfigErrors
from dovetail.errors import ConfigError, UnknownNameError
from dovetail.federated.callbacks import ServerCallback
from dovetail.federated.records import ClientsEvaluation
from dovetail.federated.servers.building import federation as built
from dovetail.federated.servers.display import RoundDisplay
from dovetail.federated.servers.reading import read_federated
from dovetail.federated.servers.results import Personalized, WriteResults
from dovetail.servers.fedavg import Server


def test_personalization_does_not_change_the_global_model() -> None:
    plain, personal = federation(), federation(personalization={"epochs": 3})
    assert all(torch.equal(plain.weights[name], value) for name, value in personal.weights.items())
    assert plain.personalized is None
    assert personal.personalized is not None
    assert [record.metrics for record in plain.records] == [record.metrics for record in personal.records]


def test_personalization_improves_every_client_on_its_data() -> None:
    server = federation(personalization={"epochs": 10})
    assert server.personalized is not None
    assert server.personalized.mean("loss") < server.evaluate_clients().mean("loss")


def test_personalization_runs_once_for_repeated_runs_of_a_server() -> None:
    received = []

    class Receiver(ServerCallback):
        def on_clients_personalized(self, server: Any) -> None:
            received.append(server.current_round)

    server = federation(personalization={"epochs": 1}, callbacks=[Receiver()])
    server.run()
    assert received == [3]


def test_the_clients_and_epochs_of_personalization_can_be_chosen() -> None:
    server = federation()
    found = [server.personalize([2, 4], epochs=epochs) for epochs in (1, 8)]
    assert [sorted(each.metrics) for each in found] == [[2, 4], [2, 4]]
    assert found[1].metrics[2]["loss"] != found[0].metrics[2]["loss"]


def test_personalization_without_state_gives_the_same_result_twice() -> None:
    server = federation()
    assert server.personalize(epochs=2).metrics == server.personalize(epochs=2).metrics


def test_personalization_in_processes_equals_the_serial_one() -> None:
    one, two = (federation(personalization={"epochs": 2}, **where) for where in ({}, {"backend": "process"}))
    assert one.personalized is not None
    assert two.personalized is not None
    assert one.personalized.metrics == two.personalized.metrics


def test_edge_servers_personalize_their_clients() -> None:
    server = federation(personalization={"epochs": 1}, cross_silo=True, total_silos=2)
    assert server.personalized is not None
    assert sorted(server.personalized.metrics) == [1, 2]


def test_personalization_is_recorded_and_shown(tmp_path: Path) -> None:
    shown = io.StringIO()
    kept = Personalized()
    display = RoundDisplay(Console(file=shown, width=200))
    server = federation(personalization={"epochs": 1}, callbacks=[WriteResults(tmp_path), display, kept])
    with (tmp_path / "clients.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["client"] for row in rows] == ["1", "2", "3", "4"]
    assert server.personalized is not None
    assert float(rows[0]["accuracy"]) == server.personalized.metrics[1]["accuracy"]
    assert "personalized models of 4 clients  accuracy 0." in shown.getvalue()
    assert kept.found is not None
    assert ClientsEvaluation.from_plain(kept.found) == server.personalized


@pytest.mark.parametrize("given", [3, {"epoch": 3}, {"epochs": 0}, {"epochs": 1, "rounds": 2}])
def test_an_invalid_personalization_setting_in_a_file_is_rejected(given: Any) -> None:
    with pytest.raises(ConfigErrors, match=r"algorithm\.personalization"):
        read_federated({"algorithm": {"personalization": given}})


def test_an_invalid_personalization_argument_is_rejected() -> None:
    with pytest.raises(ConfigError, match="did you mean 'epochs'"):
        federation(personalization={"epoch": 1})


@pytest.mark.parametrize("epochs", [0, -1])
def test_less_than_one_epoch_is_rejected(epochs: int) -> None:
    with pytest.raises(ConfigError, match=rf"personalization: expected at least 1 epoch, .* got {epochs}$"):
        Server(personalization={"epochs": epochs})
    with pytest.raises(ConfigError, match=rf"personalization: expected at least 1 epoch, .* got {epochs}$"):
        federation().personalize(epochs=epochs)


def _algorithm(**algorithm: Any) -> Any:
    return built(read_federated({"algorithm": algorithm}))[0].algorithm


def test_a_file_may_name_several_algorithms() -> None:
    made = _algorithm(type=["fedprox", {"fednova": {"momentum": 0.5}}], mu=0.25)
    assert repr(made) == repr(CompositeAlgorithm([FedProx(mu=0.25), FedNova(momentum=0.5)]))


def test_one_algorithm_name_is_not_a_list() -> None:
    assert repr(_algorithm(type="fedprox", mu=0.25)) == "FedProx(mu=0.25)"
    assert isinstance(_algorithm(), FedAvg)


def test_an_argument_of_two_algorithms_must_name_its_algorithm() -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.momentum: fedavgm and fednova both have this option; write"):
        _algorithm(type=["fedavgm", "fednova"], momentum=0.5)
    with pytest.raises(ConfigErrors, match=r"algorithm\.muu: unknown key: did you mean 'mu'"):
        _algorithm(type=["fedprox", "fednova"], muu=0.5)


def test_an_unknown_algorithm_among_several_is_named() -> None:
    with pytest.raises(ConfigErrors, match=r"algorithm\.type: unknown algorithm 'fednov': did you mean 'fednova'"):
        _algorithm(type=["fedprox", "fednov"])


def test_two_algorithms_that_decide_the_same_are_rejected() -> None:
    with pytest.raises(ConfigError, match="FedAvgM and FedAdam both decide how the server steps; use one of them"):
        _algorithm(type=["fedavgm", "fedadam"])


@pytest.mark.parametrize("step", ["pairwise_masks", "gaussian_noise"])
def test_an_algorithm_that_needs_each_update_is_rejected_with_secure_sums(step: str) -> None:
    with pytest.raises(ConfigError, match=r"FedNova (needs every update|uses updates for more)"):
        federation(FedNova(), postprocessors=[step])


def test_a_server_without_an_algorithm_uses_the_one_of_its_settings() -> None:
    config = read_federated({"algorithm": {"type": "fedprox", "mu": 0.5}})
    assert repr(Server(config=config).algorithm) == "FedProx(mu=0.5)"
    assert repr(Server(config=config, algorithm=FedAvg()).algorithm) == "FedAvg()"


def test_a_server_accepts_an_algorithm_by_name() -> None:
    assert repr(Server(algorithm="scaffold").algorithm) == repr(SCAFFOLD())
    assert Server(algorithm="scaffold").config.algorithm.type == "scaffold"
    with pytest.raises(UnknownNameError, match="unknown algorithm 'scafold': did you mean 'scaffold'"):
        Server(algorithm="scafold")


class _LeftError(Exception):
    """A server is gone."""


def test_an_interrupted_personalization_is_repeated_with_the_same_bits(tmp_path: Path) -> None:
    class Leave(ServerCallback):
        def on_clients_personalized(self, server: Any) -> None:
            raise _LeftError

    settings = {"personalization": {"epochs": 2}, "checkpoint_path": str(tmp_path)}
    with pytest.raises(_LeftError):
        federation(FedPer(), callbacks=[Leave()], **settings)
    resumed, straight = federation(FedPer(), **settings), federation(FedPer(), personalization={"epochs": 2})
    assert resumed.personalized == straight.personalized
    assert resumed.evaluate_clients() == straight.evaluate_clients()


@pytest.mark.parametrize("on_disk", [False, True])
def test_a_failed_later_round_keeps_the_personalized_client_state(tmp_path: Path, on_disk: bool) -> None:
    failing = False

    class Fail(ServerCallback):
        def on_weights_aggregated(self, server: Any, updates: Any) -> None:
            if failing:
                raise _LeftError

    where = {"checkpoint_path": str(tmp_path)} if on_disk else {}
    server = federation(FedPer(), callbacks=[Fail()], **where)
    server.personalize(epochs=3)
    before = server.evaluate_clients()
    failing, server.config = True, server.config.with_settings(rounds=4)
    with pytest.raises(_LeftError):
        server.run()
    assert server.evaluate_clients() == before
