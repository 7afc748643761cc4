"""Clients that fail: they are named and left out, and the rest is exact."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from federation import ASYNCHRONOUS, Blobs, Everything, make_model, make_trainer

from dovetail.algorithms import SCAFFOLD, Algorithm, CompositeAlgorithm, FedProx
from dovetail.clients.simple import Client
from dovetail.errors import ConfigError, FederationError, UnknownNameError
from dovetail.federated.backends import Done, Outcome, Sequential, Work
from dovetail.federated.messages import Task, Update
from dovetail.federated.selection import ClientSelection
from dovetail.federated.states import ClientState
from dovetail.servers.fedavg import Server

BAD = 3


class Fixed(ClientSelection):
    """The same clients in every round."""

    def __init__(self, *ids: int) -> None:
        super().__init__()
        self.ids = ids

    def select(self, round: int, clients: Sequence[int], count: int, busy: Collection[int] = ()) -> list[int]:
        return [client_id for client_id in self.ids if client_id not in busy]


class Failing(Client):
    """One client's work goes wrong, in the second round."""

    def __init__(self, how: str) -> None:
        super().__init__(trainer=make_trainer())
        self.how = how

    def work(self, task: Task, state: ClientState) -> tuple[Update, ClientState]:
        update, after = super().work(task, state)
        is_bad = task.client_id == BAD and task.round == 2
        return self.bent(update) if is_bad else update, after

    def bent(self, update: Update) -> Update:
        name = "0.weight"
        bent: dict[str, Any] = {
            "not finite": update.delta[name] * torch.nan,
            "infinite": update.delta[name] + torch.inf,
            "wrong shape": update.delta[name][:1],
            "wrong type": update.delta[name].double(),
        }
        if self.how == "crashed":
            raise RuntimeError("out of memory")
        if self.how == "missing":
            return update.with_delta({key: it for key, it in update.delta.items() if key != name})
        if self.how == "samples":
            return replace(update, num_samples=-5)
        if self.how == "late":
            return replace(update, round=1)
        if self.how == "somebody else":
            return replace(update, client_id=8)
        return update.with_delta({**update.delta, name: bent[self.how]})


class Twice(Sequential):
    """Delivers one report twice, and the copy with other contents."""

    def run(self, work: Sequence[Work]) -> Iterator[Outcome]:
        for outcome in super().run(work):
            yield outcome
            if isinstance(outcome, Done) and outcome.update.client_id == BAD and outcome.update.round == 2:
                doubled = {name: 2 * value for name, value in outcome.update.delta.items()}
                yield Done(outcome.update.with_delta(doubled), {"other": 1})


class Leaving(Sequential):
    """Does not ask one client in the second round."""

    def run(self, work: Sequence[Work]) -> Iterator[Outcome]:
        yield from super().run([it for it in work if (it[0].client_id, it[0].round) != (BAD, 2)])


class Reversed(Sequential):
    def run(self, work: Sequence[Work]) -> Iterator[Outcome]:
        yield from reversed(list(super().run(work)))


def _server(**options: Any) -> Server:
    return Server(
        make_model,
        Blobs(),
        Everything,
        make_trainer(),
        **{"selection": Fixed(1, 3, 5, 7), "rounds": 4, "per_round": 4, "seed": 2, **options},
    )


def _without_the_bad_one() -> Server:
    server = _server(backend=Leaving())
    server.run(Client(trainer=make_trainer()))
    return server


def _assert_same(server: Server, other: Server) -> None:
    torch.testing.assert_close(dict(server.weights), dict(other.weights), rtol=0, atol=0)
    torch.testing.assert_close(server.algorithm.state_dict(), other.algorithm.state_dict(), rtol=0, atol=0)
    for client_id in (1, 3, 5, 7):
        torch.testing.assert_close(server.states.get(client_id), other.states.get(client_id), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("how", "kind", "words"),
    [
        ("crashed", "crashed", "RuntimeError: out of memory"),
        ("not finite", "not finite", "'0.weight' is not finite"),
        ("infinite", "not finite", "'0.weight' is not finite"),
        ("wrong shape", "wrong shape", "expected the shape [5, 4], got [1, 4]"),
        ("wrong type", "wrong shape", "expected torch.float32, got torch.float64"),
        ("missing", "wrong shape", "'0.weight' is missing"),
        ("samples", "wrong shape", "num_samples"),
        ("late", "late", "reported for round 1 in round 2"),
    ],
)
def test_a_failed_client_is_named_and_the_others_are_exact(how: str, kind: str, words: str) -> None:
    server = _server()
    records = server.run(Failing(how))
    assert [record.reported for record in records] == [(1, 3, 5, 7), (1, 5, 7), (1, 3, 5, 7), (1, 3, 5, 7)]
    (fault,) = records[1].faults
    assert (fault.client_id, fault.round, fault.kind) == (BAD, 1 if how == "late" else 2, kind)
    assert words in fault.reason
    assert not records[0].faults
    assert not records[2].faults
    _assert_same(server, _without_the_bad_one())


class Misleading(Failing):
    """One client sends good weights in the second round, and something else with them."""

    def __init__(self, bend: Callable[[Any], Any]) -> None:
        super().__init__("misleading")
        self.bend = bend

    def bent(self, update: Update) -> Update:
        sent = {CONTROL: self.bend(update.payload[CONTROL])}
        return replace(update, payload={name: it for name, it in sent.items() if it is not None})


CONTROL = "control_variate_delta"


@pytest.mark.parametrize(
    ("bend", "kind", "words"),
    [
        (lambda sent: {**sent, "0.bias": sent["0.bias"] * torch.nan}, "not finite", "'0.bias' is not finite"),
        (lambda sent: {**sent, "0.bias": sent["0.bias"][:1]}, "wrong shape", "'0.bias': expected the shape [5], got"),
        (lambda sent: {**sent, "0.bias": 0.0}, "wrong shape", "'0.bias': expected a tensor, got float"),
        (lambda sent: {"0.bias": sent["0.bias"]}, "wrong shape", "'0.weight' is missing"),
        (lambda sent: {**sent, "more": sent["0.bias"]}, "wrong shape", "'more' was not requested"),
        (lambda sent: [1, 2], "wrong shape", "expected tensors by their names, got list"),
        (lambda sent: None, "wrong shape", "expected tensors by their names, got NoneType"),
    ],
)
@pytest.mark.parametrize("make", [SCAFFOLD, lambda: CompositeAlgorithm([FedProx(mu=0.1), SCAFFOLD()])])
def test_payloads_beside_the_weights_are_validated_too(
    make: Callable[[], Algorithm], bend: Callable[[Any], Any], kind: str, words: str
) -> None:
    """It would stay in the control variate of the server, and from then on in the gradients of all clients."""

    def server(**options: Any) -> Server:
        return Server(
            make_model, Blobs(), make(), make_trainer(), selection=Fixed(1, 3, 5, 7), rounds=3, per_round=4, **options
        )

    misled, spared = server(), server(backend=Leaving())
    records = misled.run(Misleading(bend))
    spared.run(Client(trainer=make_trainer()))
    (fault,) = records[1].faults
    assert (fault.client_id, fault.kind) == (BAD, kind)
    assert fault.reason.startswith(f"client {BAD}: {CONTROL}: {words}")
    _assert_same(misled, spared)


def test_a_report_for_a_client_that_was_not_selected_is_ignored() -> None:
    server = _server()
    records = server.run(Failing("somebody else"))
    silent, stranger = records[1].faults
    assert (silent.client_id, silent.kind, silent.reason) == (BAD, "timed out", "client 3 has not answered")
    assert (stranger.client_id, records[1].reported) == (8, (1, 5, 7))
    assert "was not selected" in stranger.reason
    _assert_same(server, _without_the_bad_one())


def test_the_first_of_two_reports_is_used() -> None:
    server, plain = _server(backend=Twice()), _server()
    records = server.run(Client(trainer=make_trainer()))
    plain.run(Client(trainer=make_trainer()))
    (fault,) = records[1].faults
    assert (fault.client_id, fault.kind) == (BAD, "duplicate")
    assert records[1].reported == (1, 3, 5, 7)
    _assert_same(server, plain)


def test_the_order_of_answers_does_not_matter() -> None:
    server, plain = _server(backend=Reversed()), _server()
    server.run(Client(trainer=make_trainer()))
    plain.run(Client(trainer=make_trainer()))
    _assert_same(server, plain)


def test_a_round_with_too_few_updates_changes_nothing() -> None:
    server = _server(min_clients=4, rounds=2)
    records = server.run(Failing("crashed"))
    first = _server(min_clients=4, rounds=1)
    first.run(Client(trainer=make_trainer()))
    assert records[1].reported == ()
    _assert_same(server, first)


def test_a_minimum_above_the_clients_per_round_is_rejected() -> None:
    with pytest.raises(ConfigError, match="min_clients: expected at most per_round, 4, got 5"):
        _server(min_clients=5)


class Broken(Client):
    """All clients fail, in the rounds that are named."""

    def __init__(self, *rounds: int) -> None:
        super().__init__(trainer=make_trainer())
        self.rounds = rounds

    def work(self, task: Task, state: ClientState) -> tuple[Update, ClientState]:
        if task.round in self.rounds:
            raise ValueError(f"no, says {task.client_id}")
        return super().work(task, state)


def test_a_round_in_which_all_clients_fail_raises_the_first_failure() -> None:
    server = _server(rounds=3)
    with pytest.raises(FederationError, match="4 failed; first failure: client 1 crashed: ValueError: no"):
        server.run(Broken(2))
    assert [record.round for record in server.records] == [1]


def test_a_round_in_which_all_clients_failed_is_repeated_by_the_next_run() -> None:
    server, plain = _server(rounds=3), _server(rounds=3)
    with pytest.raises(FederationError):
        server.run(Broken(2))
    assert [record.faults for record in server.run(Broken())] == [()] * 3
    plain.run(Broken())
    _assert_same(server, plain)


def test_personalization_in_which_all_clients_fail_raises_the_first_failure() -> None:
    server = _server(rounds=1)
    server.run(Broken(2))
    with pytest.raises(FederationError, match="first failure: client 1 crashed: ValueError: no"):
        server.personalize()


def test_a_failure_of_all_answers_does_not_end_a_round_with_pending_clients() -> None:
    # The clients that are asked in the second round fail; answers of the first round are still on their way.
    server = _server(**{**ASYNCHRONOUS, "minimum_clients_aggregated": 1, "staleness_bound": 9}, rounds=3)
    records = server.run(Broken(2))
    assert records[1].faults
    assert records[1].reported


def test_a_client_over_the_timeout_is_left_out_for_the_round() -> None:
    slow = {
        "simulate_wall_time": True,
        "speed_simulation": True,
        "simulation_distribution": {"distribution": "pareto", "alpha": 0.5},
        "comm_simulation": False,
        "timeout": 3.0,
        "rounds": 1,
    }
    server = _server(**slow)
    (record,) = server.run(Client(trainer=make_trainer()))
    times = {it: server.speeds.work(it, 1, Blobs().num_samples(it) / 11.5) for it in (1, 3, 5, 7)}
    late = {client_id for client_id, seconds in times.items() if seconds > 3}
    assert 0 < len(late) < 4
    assert {fault.client_id for fault in record.faults} == late
    assert {fault.kind for fault in record.faults} == {"timed out"}
    assert set(record.reported) == {1, 3, 5, 7} - late
    assert record.elapsed_time == 3.0


def test_an_attacker_hardly_moves_a_robust_mean() -> None:
    class Attacker(Client):
        def work(self, task: Task, state: ClientState) -> tuple[Update, ClientState]:
            update, after = super().work(task, state)
            if task.client_id == BAD:
                update = update.with_delta({name: value + 1000 for name, value in update.delta.items()})
            return update, after

    def largest(**options: Any) -> float:
        server = Server(
            make_model,
            Blobs(),
            trainer=make_trainer(),
            selection=Fixed(1, 3, 5, 7, 8),
            rounds=1,
            per_round=5,
            **options,
        )
        server.run(Attacker(trainer=make_trainer()))
        return float(server.weights["0.weight"].abs().max())

    assert largest() > 100
    assert largest(aggregator="median") < 2
    assert largest(aggregator="krum") < 2


def test_an_unknown_aggregator_raises_an_error() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'median'"):
        Server(aggregator="medain")


def test_requesting_partially_trained_models_is_rejected() -> None:
    with pytest.raises(ConfigError, match="request_update: a simulated client has no half-trained model"):
        Server(request_update=True, synchronous=False)
