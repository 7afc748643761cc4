"""Synchronous and asynchronous rounds, their callbacks, and their stop conditions."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from federation import ASYNCHRONOUS, Blobs, Everything, make_model, make_trainer, outcome

from dovetail.algorithms import FedAsync, FedBuff
from dovetail.clients.simple import Client
from dovetail.errors import ConfigError
from dovetail.federated import ServerCallback
from dovetail.servers.fedavg import Server


def _server(**options: Any) -> Server:
    return Server(make_model, Blobs(), trainer=make_trainer(), **{"rounds": 4, "per_round": 4, "seed": 2, **options})


def _run(**options: Any) -> Server:
    server = _server(**options)
    server.run(Client(trainer=make_trainer()))
    return server


def test_a_server_that_waits_for_all_clients_is_synchronous() -> None:
    patient = _run(synchronous=False, minimum_clients_aggregated=4)
    plain = _run()
    assert [record.reported for record in patient.records] == [record.reported for record in plain.records]
    torch.testing.assert_close(dict(patient.weights), dict(plain.weights), rtol=0, atol=0)


def test_asynchronous_rounds_are_deterministic() -> None:
    first, second = (_run(**ASYNCHRONOUS, algorithm=FedBuff, rounds=8) for _ in range(2))
    assert first.records == second.records
    torch.testing.assert_close(dict(first.weights), dict(second.weights), rtol=0, atol=0)


def test_busy_clients_are_not_selected_and_the_number_is_constant() -> None:
    server = _server(**ASYNCHRONOUS, rounds=8)
    at_work: list[set[int]] = []

    class Watch(ServerCallback):
        def on_clients_selected(self, server: Any, selected_clients: Sequence[int], **kwargs: Any) -> None:
            assert not server.clock.busy() & set(selected_clients)
            at_work.append(server.clock.busy() | set(selected_clients))

    server.callbacks.append(Watch())
    records = server.run(Client(trainer=make_trainer()))
    assert [len(ids) for ids in at_work] == [4] * 8
    assert max(record.staleness for record in records) == 3
    times = [record.elapsed_time for record in records]
    assert times == sorted(times)


def test_staleness_is_counted_in_rounds() -> None:
    server = _server(**{**ASYNCHRONOUS, "staleness_bound": 9, "minimum_clients_aggregated": 1}, rounds=6)
    seen: list[int] = []

    class Watch(ServerCallback):
        def on_weights_aggregated(self, server: Any, updates: Sequence[Any]) -> None:
            seen.extend(update.staleness for update in updates)
            assert all(update.staleness == server.current_round - update.round for update in updates)

    server.callbacks.append(Watch())
    server.run(Client(trainer=make_trainer()))
    assert len(set(seen)) > 2


def test_fedasync_mixes_relative_to_the_weights_the_client_started_from() -> None:
    # With m = 1 every update replaces the model by what its client has trained, however stale it is.
    server = _server(**{**ASYNCHRONOUS, "minimum_clients_aggregated": 1}, algorithm=FedAsync(1.0), rounds=5)

    class Watch(ServerCallback):
        def on_weights_aggregated(self, server: Any, updates: Sequence[Any]) -> None:
            last = updates[-1]
            trained = {name: last.sent[name] + change for name, change in last.delta.items()}
            torch.testing.assert_close(dict(server.weights), trained, rtol=1e-4, atol=1e-5)

    server.callbacks.append(Watch())
    records = server.run(Client(trainer=make_trainer()))
    assert any(record.staleness for record in records)


def test_the_simulated_time_of_a_round_is_the_time_of_its_slowest_client() -> None:
    server = _run(simulate_wall_time=True, comm_simulation=False, avg_training_time=2.0, rounds=1)
    slowest = max(Blobs().num_samples(client_id) for client_id in server.records[0].selected)
    average = sum(map(Blobs().num_samples, range(1, 9))) / 8
    assert server.records[0].elapsed_time == pytest.approx(2.0 * slowest / average)


def test_sending_costs_simulated_time() -> None:
    quick = _run(simulate_wall_time=True, comm_simulation=False, rounds=1).records[0]
    slow = _run(simulate_wall_time=True, uplink_bandwidth=0.001, downlink_bandwidth=1e9, rounds=1).records[0]
    sent = slow.bytes_up / 4
    assert slow.elapsed_time - quick.elapsed_time == pytest.approx(sent * 8 / 1000, rel=1e-3)


def test_masks_require_synchronous_rounds() -> None:
    with pytest.raises(ConfigError, match="synchronous: masks cancel among the clients of one round"):
        _server(synchronous=False, postprocessors=["pairwise_masks"])


def test_masks_do_not_change_the_mean() -> None:
    masked, plain = _run(postprocessors=["pairwise_masks"]), _run()
    assert [record.reported for record in masked.records] == [record.reported for record in plain.records]
    torch.testing.assert_close(dict(masked.weights), dict(plain.weights), rtol=1e-4, atol=1e-6)


def test_postprocessors_shrink_updates_and_records_report_the_sizes() -> None:
    small, plain = _run(postprocessors=["quantization"]), _run()
    assert small.records[0].bytes_up < 0.6 * plain.records[0].bytes_up
    assert small.records[0].bytes_down == plain.records[0].bytes_down
    torch.testing.assert_close(dict(small.weights), dict(plain.weights), rtol=0.5, atol=0.1)


def test_weights_sent_to_clients_can_be_compressed() -> None:
    small, plain = _run(inbound_processors=("bfloat16",), rounds=1), _run(rounds=1)
    assert small.records[0].bytes_down < 0.6 * plain.records[0].bytes_down
    assert not small.records[0].faults
    torch.testing.assert_close(dict(small.weights), dict(plain.weights), rtol=0.1, atol=0.05)


def test_postprocessor_state_is_stored_per_client() -> None:
    server = _run(postprocessors=[{"top_k": {"ratio": 0.2, "error_feedback": True}}], algorithm=Everything)
    reported = {client_id for record in server.records for client_id in record.reported}
    for client_id in range(1, 9):
        state = server.states.get(client_id)
        assert set(state) == ({"remembering", "model", "postprocessors"} if client_id in reported else set())


def test_server_callbacks_are_called_in_the_documented_order() -> None:
    heard: list[Any] = []

    class Listen(ServerCallback):
        def on_training_will_start(self, server: Any) -> None:
            heard.append("start")

        def on_clients_selected(self, server: Any, selected_clients: Sequence[int], **kwargs: Any) -> None:
            heard.append(("selected", server.current_round, len(selected_clients)))

        def on_weights_received(self, server: Any, weights_received: Sequence[Any]) -> None:
            heard.append(("received", len(weights_received)))

        def on_weights_aggregated(self, server: Any, updates: Sequence[Any]) -> None:
            heard.append(("aggregated", len(updates)))

        def on_clients_processed(self, server: Any) -> None:
            heard.append(("processed", server.records[-1].round))

        def on_server_will_close(self, server: Any) -> None:
            heard.append("close")

    _run(rounds=2, callbacks=[Listen])
    each = [("received", 4), ("aggregated", 4)]
    assert heard == [
        "start",
        ("selected", 1, 4),
        *each,
        ("processed", 1),
        ("selected", 2, 4),
        *each,
        ("processed", 2),
        "close",
    ]


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("options", [{}, ASYNCHRONOUS])
def test_the_server_closes_after_an_error_and_repeats_the_round(
    options: dict[str, Any], stored: bool, tmp_path: Path
) -> None:
    class Trip(ServerCallback):
        trips = True

        def on_weights_aggregated(self, server: Any, updates: Sequence[Any]) -> None:
            if server.current_round == 2 and self.trips:
                self.trips = False
                raise OSError("the disk is full")

        def on_server_will_close(self, server: Any) -> None:
            closed.append(server.current_round)

    closed: list[int] = []
    path = {"states_path": str(tmp_path)} if stored else {}
    server = _server(callbacks=[Trip()], algorithm=Everything, **options, **path)
    with pytest.raises(OSError, match="the disk is full"):
        server.run(Client(trainer=make_trainer()))
    assert (closed, len(server.records)) == ([1], 1)
    server.run()
    assert [record.round for record in server.records] == [1, 2, 3, 4]
    plain = _run(algorithm=Everything, **options)
    assert outcome(server) == outcome(plain)


def test_an_object_that_is_not_a_server_callback_is_rejected() -> None:
    with pytest.raises(ConfigError, match="expected a ServerCallback"):
        _server(callbacks=[print])


def test_the_run_ends_at_the_target_accuracy() -> None:
    server = _run(rounds=30, target_accuracy=0.5)
    accuracies = [record.metrics["accuracy"] for record in server.records]
    assert len(accuracies) < 30
    assert accuracies[-1] >= 0.5 > max(accuracies[:-1], default=0.0)


def test_the_run_ends_at_the_target_perplexity() -> None:
    server = _run(rounds=30, target_perplexity=2.85)
    losses = torch.tensor([record.metrics["loss"] for record in server.records])
    assert len(losses) < 30
    assert losses[-1].exp() <= 2.85
    assert bool((losses[:-1].exp() > 2.85).all())


def test_a_federation_does_not_change_the_rng_of_the_caller() -> None:
    torch.manual_seed(9)
    _run(rounds=1)
    after = torch.rand(1)
    torch.manual_seed(9)
    assert torch.equal(torch.rand(1), after)


def test_a_second_run_continues_after_the_last_round() -> None:
    server = _run(rounds=2)
    server.config = server.config.with_settings(rounds=4)
    server.run()
    torch.testing.assert_close(dict(server.weights), dict(_run().weights), rtol=0, atol=0)


def test_the_server_shares_no_memory_with_its_arguments() -> None:
    model, trainer, algorithm = make_model(), make_trainer(), Everything()
    before = copy.deepcopy(model.state_dict())
    client = Client(model=model, trainer=trainer)
    vars_before = set(vars(client))
    server = Server(model, Blobs(), algorithm, trainer, rounds=2, per_round=4)
    server.run(client)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert trainer.model is None
    assert trainer.context.progress.batches == 0
    assert not trainer.context.client.state
    assert client.datasource is None
    assert client.algorithm is None
    assert set(vars(client)) == vars_before
    assert server.model is not model
    assert all(a is not b for a, b in zip(server.model.parameters(), model.parameters(), strict=True))
