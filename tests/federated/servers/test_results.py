"""Tables, pictures and lines of rounds."""

from __future__ import annotations

import csv
import io
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from rich.console import Console

from dovetail.errors import ConfigError, UnknownNameError
from dovetail.federated.backends import Sequential
from dovetail.federated.config import FederatedConfig
from dovetail.federated.data.sources import datasource
from dovetail.federated.messages import Fault
from dovetail.federated.records import RoundRecord
from dovetail.federated.servers.display import RoundDisplay
from dovetail.federated.servers.results import WriteResults, rows_of
from dovetail.servers import fedavg

RECORDS = [
    RoundRecord(1, 0.5, (2, 3), (3,), (Fault(2, 1, "crashed", "ValueError: x"),), {"train_loss": 2.0}),
    RoundRecord(2, 1.0, (1, 3), (1, 3), (), {"train_loss": 1.0, "accuracy": 0.5}),
]


def test_the_results_table_has_every_column_that_some_round_has() -> None:
    rows = rows_of(RECORDS)
    assert [row["accuracy"] for row in rows] == ["", 0.5]
    assert [row["reported"] for row in rows] == ["3", "1 3"]
    assert rows[0]["faults"] == "2 crashed"


def test_columns_that_no_round_has_are_rejected() -> None:
    with pytest.raises(UnknownNameError, match=r"unknown column of results.types 'acuracy': did you mean 'accuracy'\?"):
        rows_of(RECORDS, ["round", "acuracy"])


def test_the_result_files_agree_with_the_records(tmp_path: Path) -> None:
    server = fedavg.Server(rounds=2, total_clients=3, per_round=2, callbacks=[WriteResults(tmp_path / "out")])
    records = server.run()
    with open(tmp_path / "out" / "rounds.csv", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["accuracy"]) for row in rows] == [record.metrics["accuracy"] for record in records]
    assert (tmp_path / "out" / "rounds.png").read_bytes().startswith(b"\x89PNG")
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == ["federation_run.jsonl", "partition.json", "rounds.csv", "rounds.png"]


def test_the_log_line_of_a_round_names_clients_that_were_left_out() -> None:
    class Watched:
        records = RECORDS[:1]
        current_round = 1
        config = FederatedConfig()
        backend = Sequential()

    text = io.StringIO()
    display = RoundDisplay(Console(file=text, width=200))
    display.on_training_will_start(Watched())
    display.on_clients_processed(Watched())
    display.on_server_will_close(Watched())
    assert text.getvalue() == "round  1/10  1 of 2 clients  train loss 2.0000  0.50s  client 2 crashed: ValueError: x\n"


def test_the_line_of_a_round_fits_80_columns_and_has_the_time_of_the_round() -> None:
    class Watched:
        metrics: ClassVar[dict[str, float]] = {"accuracy": 0.2758, "loss": 2.2816, "train_loss": 0.0889}
        records = (RoundRecord(1, 1.09, (1, 2), (1, 2), (), {}), RoundRecord(2, 1.16, (1, 2), (1, 2), (), metrics))
        current_round = 2
        config = FederatedConfig()
        backend = Sequential()

    text = io.StringIO()
    display = RoundDisplay(Console(file=text, width=80))
    display.on_training_will_start(Watched())
    display.on_clients_processed(Watched())
    line = "round  2/10  2 clients  accuracy 0.2758  loss 2.2816  train loss 0.0889  0.07s"
    assert text.getvalue() == f"{line}\n"
    assert len(line) <= 80


@pytest.mark.parametrize(
    ("reason", "told"),
    [
        ("client 2: its node was lost", "client 2 late: its node was lost"),
        ("client 2 has not answered", "client 2 late: it has not answered"),
        ("client 20: no", "client 2 late: client 20: no"),
    ],
)
def test_a_fault_names_its_client_once(reason: str, told: str) -> None:
    class Watched:
        records = (RoundRecord(1, 0.5, (2,), (), (Fault(2, 1, "late", reason),), {}),)
        current_round = 1
        config = FederatedConfig()
        backend = Sequential()

    text = io.StringIO()
    display = RoundDisplay(Console(file=text, width=200))
    display.on_training_will_start(Watched())
    display.on_clients_processed(Watched())
    display.on_server_will_close(Watched())
    assert text.getvalue() == f"round  1/10  0 of 1 client  0.50s  {told}\n"


def test_a_server_with_a_results_folder_writes_results(tmp_path: Path) -> None:
    fedavg.Server(rounds=1, total_clients=2, per_round=2, result_path=str(tmp_path)).run()
    assert (tmp_path / "rounds.csv").read_text().splitlines()[0] == "round,accuracy,elapsed_time"
    assert (tmp_path / "rounds.png").exists()


def test_a_given_results_callback_writes_results_once(tmp_path: Path) -> None:
    given = WriteResults(tmp_path / "mine", ["round"])
    fedavg.Server(rounds=1, total_clients=2, per_round=2, result_path=str(tmp_path / "other"), callbacks=[given]).run()
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_recorded_client_accuracies_have_columns(tmp_path: Path) -> None:
    settings: Any = {"rounds": 2, "total_clients": 2, "per_round": 2, "result_path": str(tmp_path)}
    clients = FederatedConfig().clients
    tested = replace(clients, total_clients=2, per_round=2, do_test=True, test_interval=2)
    data = datasource("digits", 2, testset_sampler="iid")
    fedavg.Server(None, data, **settings, clients=tested, record_clients_accuracy=True).run()
    header, first, second = (tmp_path / "rounds.csv").read_text().splitlines()
    columns = "clients_accuracy,clients_accuracy_std,clients_accuracy_worst"
    assert header == f"round,accuracy,elapsed_time,{columns}"
    assert first.endswith(",,,")
    assert all(second.split(",")[3:])


def test_unmeasured_client_accuracies_cannot_be_recorded() -> None:
    with pytest.raises(ConfigError, match="record_clients_accuracy: clients measure no accuracy unless do_test"):
        fedavg.Server(record_clients_accuracy=True)
