"""Federations on the page: the journal of a server, its state, rounds and partition."""

from __future__ import annotations

import json
import multiprocessing
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dovetail.clients import simple
from dovetail.errors import FederationError
from dovetail.federated.callbacks import ServerCallback
from dovetail.federated.config import ClientsConfig, FederatedConfig
from dovetail.federated.data import label_counts
from dovetail.federated.data.label_counts import count_labels
from dovetail.federated.data.partition import dirichlet, iid
from dovetail.federated.data.sources import GeneratedData, PartitionedData, datasource
from dovetail.federated.messages import Task
from dovetail.federated.servers.journal import WriteJournal
from dovetail.servers import fedavg
from dovetail.ui import charts
from dovetail.ui.federations import Federation, PartitionTable
from dovetail.ui.library import Library
from dovetail.ui.use_charts import partition

OPTIONS: dict[str, Any] = {"rounds": 2, "total_clients": 4, "per_round": 3, "batch_size": 64}


def found_in(folder: Path) -> Federation:
    library = Library([folder])
    library.scan()
    library.poll()
    (found,) = library.federations.values()
    return found


def same_rounds(federation: Federation, server: fedavg.Server) -> bool:
    names = ("selected", "reported", "bytes_down", "bytes_up", "staleness", "metrics")
    mine = [(each.number, *(getattr(each, name) for name in names)) for each in federation.rounds]
    theirs = [(each.round, *(getattr(each, name) for name in names)) for each in server.records]
    faults = [[(fault.client_id, fault.kind) for fault in each.faults] for each in server.records]
    return mine == theirs and [list(each.faults) for each in federation.rounds] == faults


class Failing(simple.Client):
    """Fails as client 2."""

    def work(self, task: Task, state: Any) -> Any:
        if task.client_id == 2:
            raise RuntimeError("no power")
        return super().work(task, state)


def test_a_journal_alone_shows_state_faults_traffic_and_partition(tmp_path: Path) -> None:
    data = datasource("digits", 4, sampler="dirichlet", alpha=0.5)
    server = fedavg.Server(datasource=data, callbacks=[WriteJournal([tmp_path])], **OPTIONS)
    server.run(Failing())
    found = found_in(tmp_path)
    assert (found.state, found.algorithm, found.num_planned) == ("finished", "FedAvg", 2)
    assert same_rounds(found, server)
    assert list(found.faults_by_client()) == [2]
    assert isinstance(data, PartitionedData)
    assert found.partition is not None
    labels = data._rows[-1] if isinstance(data._rows, tuple) else torch.empty(0)
    assert np.array_equal(found.partition.counts, data.partition.table(labels).numpy())
    assert found.partition.rows()[0]["label 0"] == found.partition.counts[0][0]
    assert found.journal.settings["clients.per_round"] == 3
    assert found.poll() is False


def test_staleness_and_the_spread_over_clients_come_from_the_journal(tmp_path: Path) -> None:
    speeds = {"distribution": "pareto", "alpha": 1}
    waiting: dict[str, Any] = {"synchronous": False, "simulate_wall_time": True, "minimum_clients_aggregated": 1}
    clients = replace(ClientsConfig(), do_test=True, speed_simulation=True, simulation_distribution=speeds)
    data = datasource("digits", 4, held_out=0.2)
    server = fedavg.Server(
        datasource=data,
        config=FederatedConfig(clients=clients).with_settings(**{**OPTIONS, "rounds": 5}, **waiting),
        callbacks=[WriteJournal([tmp_path])],
    )
    server.run()
    found = found_in(tmp_path)
    assert same_rounds(found, server)
    assert max(each.staleness for each in found.rounds) > 0
    drawn = charts.spread(found)
    assert drawn is not None
    worst = [[each.round, each.metrics["clients_accuracy_worst"]] for each in server.records]
    assert drawn["series"][-1]["data"] == worst


def test_a_failed_server_is_shown_with_its_error_and_then_as_resumed(tmp_path: Path) -> None:
    class Stop(ServerCallback):
        def on_clients_processed(self, server: Any) -> None:
            if server.current_round == 2 and not (tmp_path / "again").exists():
                raise FederationError("enough")

    options = {**OPTIONS, "rounds": 3, "checkpoint_path": str(tmp_path)}
    with pytest.raises(FederationError, match="enough"):
        fedavg.Server(callbacks=[Stop], **options).run()
    found = found_in(tmp_path)
    assert (found.state, found.error) == ("failed", "FederationError: enough")
    (tmp_path / "again").touch()
    server = fedavg.Server(callbacks=[Stop], **options)
    server.run()
    assert found.poll() is True
    # The callback failed before the journal got round 2, which is in the checkpoint.
    assert same_rounds(found, server)
    assert (found.state, found.journal.num_starts) == ("finished", 2)


def run_until_killed(folder: Path) -> None:
    class Kill(ServerCallback):
        def on_clients_selected(self, server: Any, selected_clients: Any, **kwargs: Any) -> None:
            if server.current_round == 2:
                os.kill(os.getpid(), 9)

    fedavg.Server(callbacks=[Kill], checkpoint_path=str(folder), **OPTIONS).run()


def test_a_killed_server_is_shown_as_killed_with_its_rounds(tmp_path: Path) -> None:
    process = multiprocessing.get_context("fork").Process(target=run_until_killed, args=(tmp_path,))
    process.start()
    process.join()
    found = found_in(tmp_path)
    assert (process.exitcode, found.state, [each.number for each in found.rounds]) == (-9, "killed", [1])
    server = fedavg.Server(checkpoint_path=str(tmp_path), **OPTIONS)
    server.run()
    found.poll()
    assert (found.state, same_rounds(found, server)) == ("finished", True)


def test_a_server_without_a_folder_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    fedavg.Server(**{**OPTIONS, "rounds": 1}).run()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "content",
    [
        "", "[]", "[" * 99999, '{"clients": 3}',
        '{"clients": [1], "labels": ["a"], "counts": [[-1]], "num_clients": 1}',
        '{"clients": [1, 2], "labels": ["a"], "counts": [[1]], "num_clients": 2}',
        '{"clients": [1], "labels": ["a"], "counts": [["NaN"]], "num_clients": 1}',
        '{"clients": [1], "labels": ["a"], "counts": [[1e999]], "num_clients": 1}',
    ],
)  # fmt: skip
def test_a_damaged_partition_or_journal_is_no_error(tmp_path: Path, content: str) -> None:
    (tmp_path / "partition.json").write_text(content)
    (tmp_path / "federation_run.jsonl").write_text(
        '{"dovetail_run": 1}\n{"start": 1.0, "round": "x", "algorithm": 3, "settings": {"trainer.rounds": "<b>"}}\n'
        '{"rows": 1, "time": 2.0, "record": {"round": 1}}\n{"rows": 2, "time": 3.0, "record": 7}\n'
        f'{{"rows": 3, "time": 4.0, "record": {{"round": {"9" * 400}}}}}\n{{"end": 5.0, "state": "<b>"}}\n' + content
    )
    found = found_in(tmp_path)
    assert (found.partition, found.rounds, found.state, found.num_planned) == (None, (), "unknown", None)


def test_many_clients_and_labels_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    labels = torch.arange(5000) % 300
    labels[:1000] = 7
    found = count_labels(iid(labels, 2500), labels)
    assert (len(found.clients), found.clients[:2], found.num_clients) == (834, (1, 4), 2500)
    assert (len(found.labels), found.labels[-1], "7" in found.labels) == (100, "201 others", True)
    assert all(sum(row) == 2 for row in found.counts)
    monkeypatch.setattr(label_counts, "MOST_LABELS", 3)
    some = count_labels(iid(torch.tensor([0, 0, 0, 1, 1, 2, 3]), 1), torch.tensor([0, 0, 0, 1, 1, 2, 3]))
    assert (some.labels, some.counts) == (("0", "1", "2 others"), ((3, 2, 2),))


def test_generated_data_show_their_sizes_if_these_are_known() -> None:
    def make(client: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(client, 1), torch.zeros(client)

    found = GeneratedData(3, make, num_samples=lambda client: client).label_counts()
    assert found is not None
    assert (found.labels, found.counts) == (("",), ((1,), (2,), (3,)))
    assert GeneratedData(3, make).label_counts() is None
    regression = PartitionedData((torch.zeros(4, 1), torch.rand(4)), iid(4, 2)).label_counts()
    assert regression is not None
    assert regression.counts == ((2,), (2,))


def test_the_partition_is_drawn_as_bars_or_as_shares() -> None:
    labels = torch.arange(600) % 6
    for num_clients, kind in ((5, "bar"), (60, "heatmap")):
        plain = count_labels(dirichlet(labels, num_clients, alpha=1.0, min_samples=0), labels).to_plain()
        table = PartitionTable(**plain)
        title, options = partition(table)
        assert title == f"Samples of each label at {num_clients} clients"
        json.dumps(options, allow_nan=False)
        assert {each["type"] for each in options["series"]} == {kind}
        if kind == "bar":
            drawn = np.array([each["data"] for each in options["series"]]).T
            assert np.array_equal(drawn, table.counts)
        else:
            cells = {(row, column): number for column, row, _, number in options["series"][0]["data"]}
            counts = np.array(table.counts)
            assert cells == {(int(r), int(c)): int(counts[r, c]) for r, c in zip(*counts.nonzero(), strict=True)}
    assert "data" in charts.selection_map(Federation("0:.", "a", Path()))["series"][0]
