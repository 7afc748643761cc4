"""Experiments on a real Ray cluster: two nodes on the loopback, of which one dies."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from dovetail.config import parse_config
from dovetail.search.cluster import RayBackend
from dovetail.search.processes import ATTEMPT, Attempt, Backend, Ended, LocalBackend
from dovetail.search.records import ExperimentRecord
from dovetail.search.runner import Runner
from dovetail.search.schema import read_experiment
from dovetail.search.store import Store

ray = pytest.importorskip("ray")

pytestmark = [
    pytest.mark.slow,
    # Ray's own: it leaves processes and files of its nodes to the garbage collector.
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
]

SCRIPT = Path(__file__).with_name("cluster_trial.py")
SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # A dead node is noticed soon.
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "3000",
    "RAY_health_check_failure_threshold": "3",
}
# Not 127.0.0.1, in whose place Ray takes the address that others see.
HOSTS = ("127.0.0.2", "127.0.0.3")


def wait_until(condition: Callable[[], Any], seconds: float = 150) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "it takes too long"
        time.sleep(0.02)
    return found


class TwoNodes:
    """A cluster of a head and another node, one slot each."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        with socket.create_server((HOSTS[0], 0)) as free:
            port = free.getsockname()[1]
        self.from_outside = f"ray://{HOSTS[0]}:{port}"
        head = {**self.node(0), "include_dashboard": False, "ray_client_server_port": port}
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        self.other = self.cluster.add_node(**self.node(1))

    @staticmethod
    def node(number: int) -> dict[str, Any]:
        return {"num_cpus": 1, "object_store_memory": 80_000_000, "node_ip_address": HOSTS[number]}

    @property
    def address(self) -> str:
        return str(self.cluster.address)

    def lose_other(self) -> None:
        self.cluster.remove_node(self.other, allow_graceful=False)

    def raylet(self, node: Any) -> int:
        return int(node.all_processes["raylet"][0].process.pid)


@contextmanager
def handlers_kept() -> Iterator[None]:
    """Put signal handlers back: a process that starts nodes gets Ray's own."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


@pytest.fixture(autouse=True)
def own_handlers() -> Iterator[None]:
    with handlers_kept():
        yield


@pytest.fixture(scope="module")
def nodes() -> Iterator[TwoNodes]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SETTINGS.items():
            patch.setenv(name, value)
        # As where only ray itself is installed: a node whose dashboard takes 15 s to start, on a busy machine, dies.
        patch.setitem(sys.modules, "ray.dashboard.optional_deps", None)
        with handlers_kept():
            nodes = TwoNodes()
        yield nodes
        ray.shutdown()
        nodes.cluster.shutdown()


@pytest.fixture
def backend(nodes: TwoNodes) -> RayBackend:
    if len(nodes.cluster.list_all_nodes()) == 1:
        nodes.other = nodes.cluster.add_node(**nodes.node(1))
    return RayBackend(nodes.address)


def ended(backend: Backend, attempt: Attempt) -> Ended:
    return wait_until(lambda: backend.poll(attempt))


def processes_with(variable: str, value: str) -> list[int]:
    """The processes of trials in whose environment a variable has a value."""
    found = []
    for process in psutil.process_iter():
        try:
            environment = process.environ()
            if ATTEMPT in environment and environment.get(variable) == value:
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


CONFIG = """
name: parabola
entrypoint: python3 cluster_trial.py {hold}
hyperparameters:
  lr: {{type: double, minval: 0.1, maxval: 0.4, count: 4}}
searcher: {{name: grid, metric: loss, max_concurrent_trials: 2}}
max_restarts: 1
"""


def experiment(folder: Path, extra: str = "") -> tuple[Store, ExperimentRecord]:
    (folder / "code").mkdir(parents=True)
    (folder / "code" / SCRIPT.name).write_text(SCRIPT.read_text())
    text = CONFIG.format(hold=folder / "hold") + extra
    store = Store.open(folder / "home")
    return store, store.create_experiment(read_experiment(parse_config(text)), text, folder / "code")


def results(record: ExperimentRecord) -> list[Any]:
    return [(trial.number, trial.state, trial.hparams, trial.values) for trial in record.trials]


def test_an_experiment_on_two_nodes_is_the_one_on_this_machine(backend: RayBackend, tmp_path: Path) -> None:
    here, there = experiment(tmp_path / "here"), experiment(tmp_path / "there")
    expected = Runner(here[0], here[1].id, LocalBackend()).run()
    found = Runner(there[0], there[1].id, backend).run()
    assert expected.state == found.state == "COMPLETED"
    assert results(found) == results(expected)
    assert len(found.trials) == 4
    assert [trial.restarts for trial in found.trials] == [0] * 4
    raylets = {re.search(r"of (\d+)", (it.directory / "log.txt").read_text())[1] for it in found.trials}
    assert len(raylets) == 2


def test_a_trial_of_a_lost_node_goes_on_elsewhere_from_its_checkpoint(
    nodes: TwoNodes, backend: RayBackend, tmp_path: Path
) -> None:
    undisturbed = experiment(tmp_path / "undisturbed")
    expected = Runner(undisturbed[0], undisturbed[1].id, LocalBackend()).run()
    store, record = experiment(tmp_path / "lost")
    hold = tmp_path / "lost" / "hold"
    hold.write_text("3")
    dead = str(nodes.raylet(nodes.other))
    lost: list[bool] = []

    def lose_a_node(seen: ExperimentRecord) -> None:
        if not lost and [it.steps for it in seen.trials] == [3, 3]:
            lost.append(True)
            nodes.lose_other()
            # Nobody is left who could write into the folder of a trial that goes on elsewhere.
            wait_until(lambda: not processes_with("RAY_RAYLET_PID", dead))
            hold.unlink()

    found = Runner(store, record.id, backend, observer=lose_a_node).run()
    assert found.state == "COMPLETED"
    assert results(found) == results(expected)
    assert sum(trial.restarts for trial in found.trials) == 1
    (moved,) = [trial for trial in found.trials if trial.restarts]
    log = (moved.directory / "log.txt").read_text()
    begins = re.findall(r"begins after (\d) in process \d+ of (\d+)", log)
    assert [done for done, _ in begins] == ["0", "3"]
    assert begins[0][1] == dead != begins[1][1]
    assert "dovetail: the node of attempt 0 was lost" in log
    assert "dovetail: the node of attempt 0 was lost" in (found.directory / "runner.log").read_text()


def test_a_keeper_that_is_killed_takes_its_trial_with_it(backend: RayBackend, tmp_path: Path) -> None:
    attempt = Attempt.of(tmp_path, 0)
    backend.start(attempt, ["sleep", "1000"], {}, tmp_path, 1)
    wait_until(lambda: (attempt.folder / "pid").exists())
    wrapper = psutil.Process(int((attempt.folder / "wrapper").read_text()))
    wrapper.parent().kill()
    assert ended(backend, attempt) == Ended(None)
    assert not processes_with(ATTEMPT, str(attempt.folder))
    words = "dovetail: the node of attempt 0 was lost (its worker process has died)\n"
    assert (tmp_path / "log.txt").read_text() == words


def test_a_failed_group_leaves_nobody_behind(backend: RayBackend, tmp_path: Path) -> None:
    attempt = Attempt.of(tmp_path, 0)
    backend.start(attempt, ["sh", "-c", "setsid sleep 1000 & exit 3"], {}, tmp_path, 1)
    assert ended(backend, attempt) == Ended(3)
    assert not processes_with(ATTEMPT, str(attempt.folder))


def test_stop_is_a_signal_and_kill_is_the_end(backend: RayBackend, tmp_path: Path) -> None:
    leaves, stays = Attempt.of(tmp_path / "leaves", 0), Attempt.of(tmp_path / "stays", 0)
    for attempt, handler in ((leaves, "exit 5"), (stays, ":")):
        command = ["sh", "-c", f"trap '{handler}' TERM; touch ready; while :; do sleep 0.01; done"]
        attempt.folder.parent.mkdir(parents=True)
        backend.start(attempt, command, {}, attempt.folder.parent, 1)
    for attempt in (leaves, stays):
        wait_until((attempt.folder.parent / "ready").exists)
        attempt.ask("pause")
        backend.stop(attempt)
    assert ended(backend, leaves) == Ended(5)
    assert backend.poll(stays) is None
    wait_until(lambda: backend.stop(stays, kill=True) or backend.poll(stays))
    assert not processes_with(ATTEMPT, str(stays.folder))


def test_an_attempt_that_waits_for_a_place_leaves_without_one(backend: RayBackend, tmp_path: Path) -> None:
    attempts = [Attempt.of(tmp_path / str(number), 0) for number in range(3)]
    for attempt in attempts:
        backend.start(attempt, ["sleep", "1000"], {}, tmp_path, 1)
    wait_until(lambda: sum(attempt.has_begun for attempt in attempts) == 2)
    (waiting,) = [attempt for attempt in attempts if not attempt.has_begun]
    waiting.ask("cancel")
    backend.stop(waiting)
    assert ended(backend, waiting) == Ended(None)
    assert not (waiting.folder / "pid").exists()
    for attempt in attempts:
        if attempt is not waiting:
            attempt.ask("cancel")
            wait_until(lambda attempt=attempt: backend.stop(attempt, kill=True) or backend.poll(attempt))


def test_an_attempt_that_is_started_twice_runs_once(nodes: TwoNodes, backend: RayBackend, tmp_path: Path) -> None:
    attempt = Attempt.of(tmp_path, 0)
    again = RayBackend(nodes.address)
    for each in (backend, again):
        each.start(attempt, ["sh", "-c", "echo once"], {}, tmp_path, 1)
    assert ended(backend, attempt) == ended(again, attempt) == Ended(0)
    assert (tmp_path / "log.txt").read_text() == "once\n"


def test_checkpoints_are_copied_and_a_trial_that_has_lost_its_own_gets_them_back(
    nodes: TwoNodes, backend: RayBackend, tmp_path: Path
) -> None:
    copying = RayBackend(nodes.address, storage=f"file://{tmp_path}/stored")
    attempt = Attempt.of(tmp_path / "trial_1", 0)
    code = (
        f"from cluster_trial import save; from pathlib import Path; save(Path({str(tmp_path / 'trial_1')!r}), 4, 0.5)"
    )
    copying.start(attempt, [sys.executable, "-c", f"{code}; raise SystemExit(3)"], {}, SCRIPT.parent, 1)
    stored = tmp_path / "stored"
    wait_until(lambda: list(stored.glob("trial_1-*/after-4-*.json")))
    shutil.rmtree(tmp_path / "trial_1" / "after-4")
    assert ended(copying, attempt) == Ended(3)
    assert (tmp_path / "trial_1" / "after-4" / "files" / "state.json").read_text() == '{"done": 4, "x": 0.5}'


def runner_process(store: Store, record: ExperimentRecord) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "dovetail.search.runner", str(store.home), str(record.id)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def held_experiment(address: str, folder: Path) -> tuple[Store, ExperimentRecord, subprocess.Popen[bytes]]:
    """An experiment in a process of its own, two trials of which wait before their fourth step."""
    folder.mkdir()
    (folder / "hold").write_text("3")
    store, record = experiment(folder, f"resources: {{cluster: '{address}'}}\n")
    runner = runner_process(store, record)
    wait_until(lambda: [it.steps for it in store.experiment(record.id).trials] == [3, 3])
    return store, record, runner


def test_trials_outlive_a_runner_that_is_killed_and_the_next_one_adopts_them(
    nodes: TwoNodes, backend: RayBackend, tmp_path: Path
) -> None:
    store, record, runner = held_experiment(nodes.address, tmp_path / "killed")
    runner.kill()
    runner.wait()
    (tmp_path / "killed" / "hold").unlink()
    found = Runner(store, record.id, backend).run()
    assert [(it.state, it.restarts) for it in found.trials] == [("COMPLETED", 0)] * 4
    logs = [(it.directory / "log.txt").read_text() for it in found.trials]
    assert [log.count("begins after") for log in logs] == [1] * 4


def test_a_runner_outside_of_the_cluster_heeds_sigterm(nodes: TwoNodes, backend: RayBackend, tmp_path: Path) -> None:
    store, record, runner = held_experiment(nodes.from_outside, tmp_path / "paused")
    runner.send_signal(signal.SIGTERM)
    assert runner.wait(timeout=60) == 0
    paused = store.experiment(record.id)
    assert paused.state == "PAUSED"
    assert [it.state for it in paused.trials] == ["WAITING"] * 2
    (tmp_path / "paused" / "hold").unlink()
    found = Runner(store, record.id, backend).run()
    assert [(it.state, it.restarts) for it in found.trials] == [("COMPLETED", 0)] * 4
    assert (found.trials[0].directory / "log.txt").read_text().count("begins after 3") == 1


def test_a_local_cluster_lives_as_long_as_its_runner(nodes: TwoNodes, tmp_path: Path) -> None:
    store, record = experiment(tmp_path / "local", "resources: {cluster: local}\n")
    runner = runner_process(store, record)
    assert runner.wait(timeout=100) == 0, (record.directory / "runner.log").read_text()
    found = store.experiment(record.id)
    assert [(it.state, it.restarts) for it in found.trials] == [("COMPLETED", 0)] * 4
    raylets = [re.search(r"of (\d+)", (it.directory / "log.txt").read_text())[1] for it in found.trials]
    assert len(set(raylets)) == 1
    assert not psutil.pid_exists(int(raylets[0]))


SPREAD = """
name: spread
entrypoint: python3 cluster_ranks.py
hyperparameters: {{lr: {lr}}}
searcher: {{name: single, metric: loss}}
resources: {{slots_per_trial: 2}}
max_restarts: 0
"""


def spread_trial(backend: RayBackend, folder: Path, lr: float) -> Any:
    (folder / "code").mkdir(parents=True)
    (folder / "code" / "cluster_ranks.py").write_text(SCRIPT.with_name("cluster_ranks.py").read_text())
    text, store = SPREAD.format(lr=lr), Store.open(folder / "home")
    record = store.create_experiment(read_experiment(parse_config(text)), text, folder / "code")
    return Runner(store, record.id, backend).run().trials[0]


def test_a_trial_that_no_node_can_hold_is_spread_over_both(backend: RayBackend, tmp_path: Path) -> None:
    trial = spread_trial(backend, tmp_path, lr=0.25)
    assert (trial.state, trial.best) == ("COMPLETED", 0.25), (trial.directory / "log.txt").read_text()
    row = json.loads((trial.directory / "metrics.jsonl").read_text())
    assert row["metrics"] == {"loss": 0.25, "nodes": 2, "ranks": 2}


@pytest.mark.skipif(os.environ.get("DOVETAIL_TORTURE") != "1", reason="takes most of a minute: `make torture` runs it")
def test_a_spread_trial_fails_with_the_rank_that_failed(backend: RayBackend, tmp_path: Path) -> None:
    trial = spread_trial(backend, tmp_path, lr=0.75)
    assert trial.state == "ERROR"
    assert "rank 1 ended with exit code 3" in trial.reason
