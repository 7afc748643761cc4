"""Records of a round."""

from __future__ import annotations

import pytest

from dovetail.checkpoint.encoding import encode_plain
from dovetail.federated.messages import Fault, Update
from dovetail.federated.records import ClientsEvaluation, RoundRecord, Spread, accuracy_of_clients, client_metrics


def test_the_worst_tenth_is_at_least_one_client() -> None:
    assert Spread.of([0.25]) == Spread(0.25, 0.0, 0.25)
    assert Spread.of([value / 100 for value in range(1, 21)]).worst == pytest.approx(0.015)


def test_the_worst_clients_by_loss_have_the_largest_losses() -> None:
    assert Spread.of([1.0, 2.0, 9.0], larger_is_better=False).worst == 9.0
    assert ClientsEvaluation({1: {"loss": 1.0}, 2: {"loss": 5.0}}, {1: 1, 2: 1}).spread("loss").worst == 5.0


def test_a_record_survives_a_round_trip_through_plain_values() -> None:
    record = RoundRecord(
        3, 1.5, (1, 2), (1,), (Fault(2, 3, "crashed", "client 2: ValueError"),), {"accuracy": 0.5}, 10, 20, 1
    )
    encode_plain(record.to_plain(), "record")
    assert RoundRecord.from_plain(record.to_plain()) == record


def test_losses_of_clients_are_weighted_by_samples() -> None:
    updates = [Update(1, 1, 10, metrics={"loss": 1.0}), Update(2, 1, 30, metrics={"loss": 2.0}), Update(3, 1, 0)]
    assert client_metrics(updates) == {"train_loss": 1.75}


def test_client_test_results_have_a_mean_and_a_spread() -> None:
    updates = [Update(k, 1, 10 * k, metrics={"test_accuracy": k / 4}) for k in (1, 3)]
    assert client_metrics(updates) == {
        "clients_accuracy": 0.5,
        "clients_accuracy_std": 0.25,
        "clients_accuracy_worst": 0.25,
    }
    assert accuracy_of_clients(updates) == {"accuracy": (10 * 0.25 + 30 * 0.75) / 40}


def test_a_record_without_reports_has_no_measurements() -> None:
    assert client_metrics([]) == accuracy_of_clients([]) == {}


def test_clients_without_samples_have_a_plain_mean() -> None:
    assert ClientsEvaluation({1: {"accuracy": 0.5}, 2: {"accuracy": 1.0}}, {1: 0, 2: 0}).mean("accuracy") == 0.75
