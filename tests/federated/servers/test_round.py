"""One round as a value: what each step adds to it."""

from __future__ import annotations

from typing import Any

import torch
from federation import Blobs, make_model, make_trainer

from dovetail.clients.simple import Client
from dovetail.federated.servers import round as steps
from dovetail.servers.fedavg import Server


def _prepared(**settings: Any) -> Server:
    options = {"rounds": 1, "per_round": 3, "seed": 2, **settings}
    server = Server(make_model, Blobs(), trainer=make_trainer(), **options)
    server.prepare(Client(trainer=make_trainer()))
    return server


def test_the_steps_of_a_round_called_one_by_one_equal_a_round() -> None:
    server, expected = _prepared(), _prepared()
    expected.run()
    server.backend.start(server.worker)
    server.current_round = 1
    before = dict(server.weights)

    round = steps.Round(1)
    steps.select_clients(server, round)
    assert tuple(round.selected) == expected.records[0].selected
    steps.make_tasks(server, round)
    assert [task.client_id for task in round.tasks] == round.selected
    assert not server.clock.busy()
    steps.run_clients(server, round)
    assert server.clock.busy() == set(round.selected)
    steps.collect_answers(server, round)
    assert [answer.update.client_id for answer in round.answers] == round.selected
    assert not round.updates
    steps.decode_updates(server, round)
    assert [update.client_id for update in round.updates] == round.selected
    assert round.used == round.answers
    steps.receive_weights(server, round)
    steps.aggregate_updates(server, round)
    assert round.weights is not None
    torch.testing.assert_close(dict(server.weights), before, rtol=0, atol=0)
    steps.update_server(server, round)
    torch.testing.assert_close(dict(server.weights), dict(expected.weights), rtol=0, atol=0)
    steps.evaluate_round(server, round)
    assert round.metrics == expected.records[0].metrics
    assert not server.records
    steps.record_round(server, round)
    assert [record.reported for record in server.records] == [record.reported for record in expected.records]


def test_too_few_answers_change_neither_weights_nor_states() -> None:
    server = _prepared(min_clients=3)
    server.backend.start(server.worker)
    server.current_round = 1
    before = dict(server.weights)
    round = steps.Round(1)
    steps.select_clients(server, round)
    del round.selected[0]
    for step in (
        steps.make_tasks,
        steps.run_clients,
        steps.collect_answers,
        steps.decode_updates,
        steps.receive_weights,
        steps.aggregate_updates,
        steps.update_server,
    ):
        step(server, round)
    assert len(round.updates) == 2
    assert not round.used
    assert round.weights is None
    torch.testing.assert_close(dict(server.weights), before, rtol=0, atol=0)
