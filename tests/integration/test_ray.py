"""Experiments on a real Ray cluster: two nodes on the loopback, of which one dies.

Every test of more than ten seconds that shows what another one shows, too, or that few will ever need, is one of
`make torture`.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest

from dovetail.config import parse_config
from dovetail.search.cluster import RayBackend
from dovetail.search.processes import ATTEMPT, Attempt, Backend, Ended, LocalBackend
from dovetail.search.records import ExperimentRecord
from dovetail.search.runner import Observer, Runner
from dovetail.search.schema import read_experiment
from dovetail.search.store import Store

if find_spec("ray") is None:
    pytest.skip("Ray is not installed", allow_module_level=True)

pytestmark = [
    pytest.mark.slow,
    # Ray's own: it leaves processes and files of its nodes to the garbage collector.
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
]

SCRIPT = Path(__file__).with_name("cluster_trial.py")
SETTINGS = {
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


def patiently(start: Callable[[], Any]) -> Any:
    """Start something of Ray's, which gives up after 30 s: on a busy machine the next try succeeds."""
    for _ in range(3):
        try:
            return start()
        except Exception as error:
            if "timed out during startup" not in str(error):
                raise
    return start()


class TwoNodes:
    """A cluster of a head and another node, one slot each."""

    def __init__(self, hosts: tuple[str, str] = HOSTS) -> None:
        from ray.cluster_utils import Cluster

        self.hosts = hosts
        with socket.create_server((hosts[0], 0)) as free:
            port = free.getsockname()[1]
        self.from_outside = f"ray://{hosts[0]}:{port}"
        head = {**self.node(0), "include_dashboard": False, "ray_client_server_port": port}
        self.cluster = patiently(lambda: Cluster(initialize_head=True, head_node_args=head))

    def node(self, number: int) -> dict[str, Any]:
        place = {"num_cpus": 1, "object_store_memory": 80_000_000, "node_ip_address": self.hosts[number]}
        return {**place, "include_log_monitor": False}

    def complete(self) -> None:
        if len(self.cluster.list_all_nodes()) == 1:
            self.other = patiently(lambda: self.cluster.add_node(**self.node(1)))

    @property
    def address(self) -> str:
        return str(self.cluster.address)

    def lose_other(self) -> None:
        self.cluster.remove_node(self.other, allow_graceful=False)

    def lose_head(self) -> None:
        self.cluster.head_node.kill_all_processes(check_alive=False, allow_graceful=False)

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
def nodes(light_ray: None) -> Iterator[TwoNodes]:
    import ray

    with pytest.MonkeyPatch.context() as patch:
        for name, value in SETTINGS.items():
            patch.setenv(name, value)
        with handlers_kept():
            nodes = TwoNodes()
        yield nodes
        ray.shutdown()
        nodes.cluster.shutdown()


@pytest.fixture
def backend(nodes: TwoNodes) -> RayBackend:
    nodes.complete()
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


def story(record: ExperimentRecord) -> str:
    """The files of an experiment that failed."""
    logs = [record.directory / "runner.log", *(trial.directory / "log.txt" for trial in record.trials)]
    return "\n".join(f"{path}:\n{path.read_text()}" for path in logs if path.exists())


def assert_completed(record: ExperimentRecord) -> None:
    assert [(it.state, it.restarts) for it in record.trials] == [("COMPLETED", 0)] * 4, story(record)


def test_an_experiment_on_two_nodes_equals_a_local_one(backend: RayBackend, tmp_path: Path) -> None:
    here, there = experiment(tmp_path / "here"), experiment(tmp_path / "there")
    expected = Runner(here[0], here[1].id, LocalBackend()).run()
    found = Runner(there[0], there[1].id, backend).run()
    assert expected.state == found.state == "COMPLETED"
    assert results(found) == results(expected)
    assert_completed(found)
    raylets = {re.search(r"of (\d+)", (it.directory / "log.txt").read_text())[1] for it in found.trials}
    assert len(raylets) == 2


def test_a_trial_of_a_lost_node_resumes_elsewhere_from_its_checkpoint(
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
            # No process remains that could write into the folder of a trial that continues elsewhere.
            wait_until(lambda: not processes_with("RAY_RAYLET_PID", dead))
            hold.unlink()

    found = Runner(store, record.id, backend, observer=lose_a_node).run()
    assert found.state == "COMPLETED"
    assert results(found) == results(expected), story(found)
    assert sum(trial.restarts for trial in found.trials) == 1, story(found)
    (moved,) = [trial for trial in found.trials if trial.restarts]
    log = (moved.directory / "log.txt").read_text()
    begins = re.findall(r"begins after (\d) in process \d+ of (\d+)", log)
    assert [done for done, _ in begins] == ["0", "3"]
    assert begins[0][1] == dead != begins[1][1]
    assert "dovetail: the node of attempt 0 was lost" in log
    assert "dovetail: the node of attempt 0 was lost" in (found.directory / "runner.log").read_text()


def test_a_killed_owner_process_ends_its_trial(backend: RayBackend, tmp_path: Path) -> None:
    attempt = Attempt.of(tmp_path, 0)
    backend.start(attempt, ["sleep", "1000"], {}, tmp_path, 1)
    wait_until(lambda: (attempt.folder / "pid").exists())
    wrapper = psutil.Process(int((attempt.folder / "wrapper").read_text()))
    wrapper.parent().kill()
    assert ended(backend, attempt) == Ended(None)
    assert not processes_with(ATTEMPT, str(attempt.folder))
    words = "dovetail: the node of attempt 0 was lost (its worker process has died)\n"
    assert (tmp_path / "log.txt").read_text() == words


def test_a_failed_group_leaves_no_process(backend: RayBackend, tmp_path: Path) -> None:
    attempt = Attempt.of(tmp_path, 0)
    backend.start(attempt, ["sh", "-c", "setsid sleep 1000 & exit 3"], {}, tmp_path, 1)
    assert ended(backend, attempt) == Ended(3)
    assert not processes_with(ATTEMPT, str(attempt.folder))


def test_stop_sends_a_signal_and_kill_ends_the_attempt(backend: RayBackend, tmp_path: Path) -> None:
    leaves, stays = Attempt.of(tmp_path / "leaves", 0), Attempt.of(tmp_path / "stays", 0)
    for attempt, handler in ((leaves, "exit 5"), (stays, ":")):
        command = ["sh", "-c", f"trap '{handler}' TERM; touch ready; while :; do sleep 0.01; done"]
        attempt.folder.parent.mkdir(parents=True)
        backend.start(attempt, command, {}, attempt.folder.parent, 1)
    for attempt in (leaves, stays):
        wait_until((attempt.folder.parent / "ready").exists)
        attempt.request_exit("pause")
        backend.stop(attempt)
    assert ended(backend, leaves) == Ended(5)
    assert backend.poll(stays) is None
    wait_until(lambda: backend.stop(stays, kill=True) or backend.poll(stays))
    assert not processes_with(ATTEMPT, str(stays.folder))


def test_an_attempt_that_waits_for_a_slot_can_be_stopped(backend: RayBackend, tmp_path: Path) -> None:
    attempts = [Attempt.of(tmp_path / str(number), 0) for number in range(3)]
    for attempt in attempts:
        backend.start(attempt, ["sleep", "1000"], {}, tmp_path, 1)
    wait_until(lambda: sum(attempt.has_started for attempt in attempts) == 2)
    (waiting,) = [attempt for attempt in attempts if not attempt.has_started]
    waiting.request_exit("cancel")
    backend.stop(waiting)
    assert ended(backend, waiting) == Ended(None)
    assert not (waiting.folder / "pid").exists()
    for attempt in attempts:
        if attempt is not waiting:
            attempt.request_exit("cancel")
            wait_until(lambda attempt=attempt: backend.stop(attempt, kill=True) or backend.poll(attempt))


def test_an_attempt_that_is_started_twice_runs_once(nodes: TwoNodes, backend: RayBackend, tmp_path: Path) -> None:
    attempt = Attempt.of(tmp_path, 0)
    again = RayBackend(nodes.address)
    for each in (backend, again):
        each.start(attempt, ["sh", "-c", "echo once"], {}, tmp_path, 1)
    assert ended(backend, attempt) == ended(again, attempt) == Ended(0)
    assert (tmp_path / "log.txt").read_text() == "once\n"


def test_a_trial_that_lost_its_checkpoints_gets_the_copies_back(
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
    assert (tmp_path / "trial_1" / "storage").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "trial_1" / "after-4" / "files" / "state.json").read_text() == '{"done": 4, "x": 0.5}'


def runner_process(store: Store, record: ExperimentRecord) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "dovetail.search", str(store.home), str(record.id)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def held_experiment(address: str, folder: Path) -> tuple[Store, ExperimentRecord, subprocess.Popen[bytes]]:
    """An experiment in a separate process, two trials of which wait before their fourth step."""
    folder.mkdir()
    (folder / "hold").write_text("3")
    store, record = experiment(folder, f"resources: {{cluster: '{address}'}}\n")
    runner = runner_process(store, record)
    wait_until(lambda: [it.steps for it in store.experiment(record.id).trials] == [3, 3])
    return store, record, runner


def test_trials_outlive_a_killed_runner_and_the_next_one_adopts_them(
    nodes: TwoNodes, backend: RayBackend, tmp_path: Path
) -> None:
    store, record, runner = held_experiment(nodes.address, tmp_path / "killed")
    runner.kill()
    runner.wait()
    (tmp_path / "killed" / "hold").unlink()
    found = Runner(store, record.id, backend).run()
    assert_completed(found)
    logs = [(it.directory / "log.txt").read_text() for it in found.trials]
    assert [log.count("begins after") for log in logs] == [1] * 4


@pytest.mark.torture
def test_a_runner_outside_the_cluster_handles_sigterm(nodes: TwoNodes, backend: RayBackend, tmp_path: Path) -> None:
    store, record, runner = held_experiment(nodes.from_outside, tmp_path / "paused")
    runner.send_signal(signal.SIGTERM)
    assert runner.wait(timeout=150) == 0, story(store.experiment(record.id))
    paused = store.experiment(record.id)
    assert paused.state == "PAUSED"
    assert [it.state for it in paused.trials] == ["WAITING"] * 2
    (tmp_path / "paused" / "hold").unlink()
    found = Runner(store, record.id, backend).run()
    assert_completed(found)
    assert (found.trials[0].directory / "log.txt").read_text().count("begins after 3") == 1


@pytest.mark.torture
def test_a_local_cluster_lives_as_long_as_its_runner(nodes: TwoNodes, tmp_path: Path) -> None:
    store, record = experiment(tmp_path / "local", "resources: {cluster: local}\n")
    runner = runner_process(store, record)
    assert runner.wait(timeout=150) == 0, story(store.experiment(record.id))
    found = store.experiment(record.id)
    assert_completed(found)
    raylets = [re.search(r"of (\d+)", (it.directory / "log.txt").read_text())[1] for it in found.trials]
    assert len(set(raylets)) == 1
    assert not psutil.pid_exists(int(raylets[0]))


SPREAD = """
name: spread
entrypoint: python3 cluster_ranks.py {hold}
hyperparameters: {{lr: {lr}}}
searcher: {{name: single, metric: loss}}
resources: {{slots_per_trial: 2}}
max_restarts: {restarts}
"""


def spread_experiment(
    backend: RayBackend, folder: Path, lr: float, restarts: int = 0, observer: Observer | None = None
) -> ExperimentRecord:
    (folder / "code").mkdir(parents=True)
    for script in (SCRIPT, SCRIPT.with_name("cluster_ranks.py")):
        shutil.copy(script, folder / "code")
    text, store = SPREAD.format(lr=lr, hold=folder / "hold", restarts=restarts), Store.open(folder / "home")
    record = store.create_experiment(read_experiment(parse_config(text)), text, folder / "code")
    return Runner(store, record.id, backend, observer).run()


def test_a_trial_too_large_for_one_node_is_distributed_over_both(backend: RayBackend, tmp_path: Path) -> None:
    found = spread_experiment(backend, tmp_path, lr=0.25)
    (trial,) = found.trials
    assert (trial.state, trial.best) == ("COMPLETED", 0.25), story(found)
    row = json.loads((trial.directory / "metrics.jsonl").read_text())
    assert row["metrics"] == {"loss": 0.25, "nodes": 2, "ranks": 2}


@pytest.mark.torture
def test_a_distributed_trial_fails_with_the_rank_that_failed(backend: RayBackend, tmp_path: Path) -> None:
    found = spread_experiment(backend, tmp_path, lr=0.75)
    (trial,) = found.trials
    assert trial.state == "ERROR", story(found)
    assert "rank 1 ended with exit code 3" in trial.reason


@pytest.mark.torture
@pytest.mark.timeout(600)
@pytest.mark.parametrize("loss", ["worker", "node"])
def test_a_distributed_trial_that_loses_a_process_resumes(
    nodes: TwoNodes, backend: RayBackend, tmp_path: Path, loss: str
) -> None:
    (tmp_path / "hold").write_text("0")
    lost: list[int] = []

    def lose_a_part(seen: ExperimentRecord) -> None:
        attempts = [it for trial in seen.trials for it in Attempt.all_of(trial.directory)]
        if lost or not attempts:
            return
        log = (attempts[0].folder.parent.parent / "log.txt").read_text()
        if log.count("begins after 0") < 2:
            return
        ranks = [psutil.Process(pid) for pid in processes_with(ATTEMPT, str(attempts[0].folder))]
        (second,) = [it for it in ranks if it.environ().get("RANK") == "1"]
        lost.append(second.pid)
        if loss == "worker":
            second.parent().kill()
        else:
            dead = str(nodes.raylet(nodes.other))
            nodes.lose_other()
            wait_until(lambda: not processes_with("RAY_RAYLET_PID", dead))
            nodes.complete()

    found = spread_experiment(backend, tmp_path, 0.25, restarts=1, observer=lose_a_part)
    (trial,) = found.trials
    assert (trial.state, trial.restarts) == ("COMPLETED", 1), story(found)
    assert not psutil.pid_exists(lost[0])
    log = (trial.directory / "log.txt").read_text()
    assert re.findall(r"rank \d begins after \d", log)[-2:] in (
        ["rank 0 begins after 1", "rank 1 begins after 1"],
        ["rank 1 begins after 1", "rank 0 begins after 1"],
    )


@pytest.mark.torture
@pytest.mark.timeout(600)
def test_a_runner_that_loses_the_head_reports_it_and_another_resumes(
    nodes: TwoNodes, backend: RayBackend, tmp_path: Path
) -> None:
    with handlers_kept():
        lonely = TwoNodes(("127.0.0.4", "127.0.0.5"))
    address = lonely.address
    try:
        (tmp_path / "lost").mkdir()
        (tmp_path / "lost" / "hold").write_text("3")
        store, record = experiment(tmp_path / "lost", f"resources: {{cluster: '{address}'}}\n")
        command = [sys.executable, "-m", "dovetail.search", str(store.home), str(record.id)]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as runner:
            wait_until(lambda: [it.steps for it in store.experiment(record.id).trials] == [3])
            lonely.lose_head()
            _, messages = runner.communicate(timeout=150)
    finally:
        lonely.cluster.shutdown()
    assert runner.returncode == 1
    (sentence,) = [line for line in messages.splitlines() if line.startswith("dovetail:")]
    assert sentence == (
        f"dovetail: cluster: the head of the cluster at {address} has not responded for 20 s: "
        "resume the experiment when a cluster is available again"
    )
    (first,) = store.experiment(record.id).trials
    assert not processes_with(ATTEMPT, str(Attempt.of(first.directory, 0).folder))
    (tmp_path / "lost" / "hold").unlink()
    found = Runner(store, record.id, backend).run()
    assert [(it.state, it.restarts) for it in found.trials] == [("COMPLETED", it == 0) for it in range(4)], story(found)
    assert re.findall(r"begins after (\d)", (first.directory / "log.txt").read_text()) == ["0", "3"]
