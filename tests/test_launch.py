"""`python -m dovetail.launch`, run as a user runs it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from dovetail.info import VARIABLE

REPORT_LINE = """
import json, os, sys
from dataclasses import asdict
from dovetail.info import get_cluster_info
info = get_cluster_info()
# In one piece: several processes write to the same pipe, and `print` writes the end of a line by itself.
sys.stdout.write(json.dumps({
    "name": __name__,
    "arguments": sys.argv,
    "path": sys.path[0],
    "rank": os.environ.get("RANK"),
    "size": os.environ.get("WORLD_SIZE"),
    "info": None if info is None else asdict(info),
}) + "\\n")
"""

CONFIG = """
name: digits
hyperparameters:
  learning_rate: 1e-3
  global_batch_size: {type: const, val: 64}
  net: {width: 8}
  depth: {type: categorical, vals: [1, 2]}
data: {url: here}
reproducibility: {experiment_seed: 5}
searcher: {name: single, metric: loss}
"""


def environment() -> dict[str, str]:
    left_out = (VARIABLE, "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    return {**{k: v for k, v in os.environ.items() if k not in left_out}, "OMP_NUM_THREADS": "1"}


def launch(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "dovetail.launch", *arguments],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def reported(folder: Path, *arguments: str) -> list[dict[str, Any]]:
    done = launch(folder, *arguments)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return sorted((json.loads(line) for line in done.stdout.splitlines()), key=lambda it: it["rank"] or "")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "below").mkdir()
    (tmp_path / "tell.py").write_text(REPORT_LINE)
    (tmp_path / "below" / "tell.py").write_text(REPORT_LINE)
    (tmp_path / "config.yaml").write_text(CONFIG)
    return tmp_path


# ------------------------------------------------------------------ one process


def test_a_launched_script_runs_as_in_python(folder: Path) -> None:
    (found,) = reported(folder, "below/tell.py", "--slots", "3", "x")
    assert found["name"] == "__main__"
    assert found["arguments"] == ["below/tell.py", "--slots", "3", "x"]
    assert found["path"] == str(folder / "below")
    assert found["rank"] is None
    assert found["info"] is None


def test_a_launched_module_runs_as_in_python(folder: Path) -> None:
    (found,) = reported(folder, "-m", "below.tell", "x")
    assert found["name"] == "__main__"
    assert found["arguments"] == [str(folder / "below" / "tell.py"), "x"]


def test_configuration_and_hyperparameters_reach_the_script(folder: Path) -> None:
    arguments = ["--config", "config.yaml", "--hparam", "depth=2", "--hparam", "net.width=16"]
    (found,) = reported(folder, *arguments, "tell.py")
    info = found["info"]
    expected = {"learning_rate": 0.001, "global_batch_size": 64, "net": {"width": 16}, "depth": 2}
    assert info["hparams"] == expected
    assert info["config"]["name"] == "digits"
    assert info["user_data"] == {"url": "here"}
    assert (info["trial_id"], info["trial_seed"], info["kind"], info["slots"]) == (0, 5, "trial", 1)


def test_hyperparameters_need_no_configuration(folder: Path) -> None:
    (found,) = reported(folder, "--hparam", "lr=1e-3", "--hparam", "net.kind='64'", "--hparam", "deep=true", "tell.py")
    assert found["info"]["hparams"] == {"lr": 0.001, "net": {"kind": "64"}, "deep": True}


def test_a_configuration_without_hyperparameters_is_a_job(folder: Path) -> None:
    (folder / "job.yaml").write_text("data: {trial_id: 777}\nresources: {slots: 1}\n")
    (found,) = reported(folder, "--config", "job.yaml", "tell.py")
    assert (found["info"]["kind"], found["info"]["user_data"]) == ("job", {"trial_id": 777})


def test_one_process_is_a_group_if_requested(folder: Path) -> None:
    (found,) = reported(folder, "--group", "tell.py", "--group")
    assert (found["rank"], found["size"], found["arguments"]) == ("0", "1", ["tell.py", "--group"])


@pytest.mark.usefixtures("forking")
def test_a_group_of_one_initializes_under_torchrun(folder: Path) -> None:
    (folder / "meet.py").write_text(
        "import torch.distributed as dist\n"
        "from dovetail.core import DistributedContext\n"
        "dist.init_process_group('gloo')\n"
        "context = DistributedContext.from_torch_distributed()\n"
        "print(context.rank, context.size, context.allgather(3))\n"
        "dist.destroy_process_group()\n"
    )
    done = launch(folder, "--group", "meet.py")
    assert (done.returncode, done.stdout) == (0, "0 1 [3]\n"), done.stderr


def test_zero_slots_mean_one_process_without_graphics_cards(folder: Path) -> None:
    (folder / "none.yaml").write_text("resources: {slots_per_trial: 0}\n")
    (folder / "cards.py").write_text("import os; print(repr(os.environ['CUDA_VISIBLE_DEVICES']))")
    done = launch(folder, "--config", "none.yaml", "cards.py")
    assert (done.returncode, done.stdout) == (0, "''\n")


@pytest.mark.parametrize(("end", "code"), [("", 0), ("import sys; sys.exit(7)", 7), ("raise SystemExit", 0)])
def test_the_launcher_exits_with_the_code_of_the_script(folder: Path, end: str, code: int) -> None:
    (folder / "end.py").write_text(end)
    done = launch(folder, "end.py")
    assert (done.returncode, done.stdout, done.stderr) == (code, "", "")


def test_an_error_looks_the_same_as_without_the_launcher(folder: Path) -> None:
    (folder / "wrong.py").write_text("def fail():\n    raise ValueError('no luck')\n\nfail()\n")
    done = launch(folder, "wrong.py")
    alone = subprocess.run([sys.executable, "wrong.py"], cwd=folder, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == alone.stderr.replace(f"{folder}/", "")


def test_a_signal_reaches_the_script(folder: Path) -> None:
    (folder / "wait.py").write_text("print('.', flush=True)\ninput()\n")
    for number, code in ((signal.SIGTERM, -signal.SIGTERM), (signal.SIGINT, 130)):
        with started(folder, "wait.py") as program:
            assert read(program, 1) == b"."
            program.send_signal(number)
            assert program.wait(timeout=120) == code


# ------------------------------------------------------------------ mistakes


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["train.py"], "script: expected a file, got 'train.py': there is none in "),
        (["-m", "nowhere.train"], "script: expected a module after -m, got 'nowhere.train': there is none in "),
        (["--config", "other.yaml", "tell.py"], "other.yaml: cannot be read: No such file or directory"),
        (["--config", "tell.py", "tell.py"], "tell.py:"),
        (["--config", "config.yaml", "tell.py"], "config.yaml:7:3: hyperparameters.depth: type 'categorical' needs a"),
        (["--config", "slots.yaml", "tell.py"], "slots.yaml:1:13: resources.slots_per_trial: expected a whole number"),
        (["--hparam", "lr", "tell.py"], "--hparam: expected NAME=VALUE, got 'lr'"),
        (["--hparam", "lr=[1, 2]", "tell.py"], "--hparam lr: expected one value such as 1e-3"),
        (
            ["--hparam", "lr=1", "--hparam", "lr.base=2", "tell.py"],
            "--hparam lr.base: cannot set 'base', because the name above it has a value",
        ),
        (["--config", "config.yaml", "--hparam", "learning_rat=1", "tell.py"], "did you mean 'learning_rate'?"),
        (["--config", "config.yaml", "--hparam", "net.widht=1", "tell.py"], "'widht': did you mean 'width'?"),
        (["--config", "config.yaml", "--hparam", "nte.width=1", "tell.py"], "'nte': did you mean 'net'?"),
        (["--slots", "none", "tell.py"], "argument --slots: expected a whole number from 1 on, got 'none'"),
        (["--restarts", "-1", "tell.py"], "argument --restarts: expected"),
        (["--slot", "2", "tell.py"], "unrecognized arguments: --slot"),
        ([], "the following arguments are required: script"),
    ],
)
def test_a_launcher_mistake_prints_one_sentence_without_a_traceback(
    folder: Path, arguments: list[str], sentence: str
) -> None:
    (folder / "slots.yaml").write_text("resources: {slots_per_trial: two}\n")
    done = launch(folder, *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    *_, last = done.stderr.strip().splitlines()
    assert sentence in last
    assert "Traceback" not in done.stderr


# ------------------------------------------------------------------ several processes


class started:
    """A launcher that runs until the block ends."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "dovetail.launch", *arguments],
            cwd=folder,
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def __enter__(self) -> subprocess.Popen[bytes]:
        return self.process

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()


def read(program: subprocess.Popen[bytes], size: int) -> bytes:
    assert program.stdout is not None
    return program.stdout.read(size)


# The first has new interpreters, as a user has; the others start with torch imported.
@pytest.mark.slow
class TestSeveralProcesses:
    def test_every_process_has_its_rank_and_the_trial(self, folder: Path) -> None:
        (folder / "two.yaml").write_text("hyperparameters: {lr: 0.1}\nresources: {slots_per_trial: 2}\n")
        found = reported(folder, "--config", "two.yaml", "tell.py", "--slots", "3")
        assert [(each["rank"], each["size"]) for each in found] == [("0", "2"), ("1", "2")]
        for each in found:
            assert each["name"] == "__main__"
            assert each["arguments"] == ["tell.py", "--slots", "3"]
            assert each["path"] == str(folder)
            assert (each["info"]["hparams"], each["info"]["slots"]) == ({"lr": 0.1}, 2)

    @pytest.mark.usefixtures("forking")
    def test_command_line_slots_override_the_file_and_modules_work(self, folder: Path) -> None:
        (folder / "two.yaml").write_text("resources: {slots_per_trial: 1}\n")
        found = reported(folder, "--slots", "2", "--config", "two.yaml", "-m", "below.tell", "x")
        assert [(each["rank"], each["arguments"][1:]) for each in found] == [("0", ["x"]), ("1", ["x"])]

    @pytest.mark.usefixtures("forking")
    def test_the_output_of_the_failing_process_is_shown(self, folder: Path) -> None:
        (folder / "fail.py").write_text(
            "from dovetail import core\n"
            "with core.init() as context:\n"
            "    context.distributed.allgather(1)\n"
            "    if context.distributed.rank == 1:\n"
            "        raise ValueError('no luck')\n"
            "    context.distributed.allgather(2)\n"
        )
        done = launch(folder, "--slots", "2", "fail.py")
        assert done.returncode == 1
        lines = [line for line in done.stderr.splitlines() if line]
        assert [line for line in lines if line.startswith("[rank1]")] == [
            "[rank1]: Traceback (most recent call last):",
            '[rank1]:   File "fail.py", line 5, in <module>',
            "[rank1]:     raise ValueError('no luck')",
            "[rank1]: ValueError: no luck",
        ]
        # The launcher may end the other process before it has written this.
        others = [line for line in lines if not line.startswith("[rank1]")]
        assert others in ([], ["dovetail.launch: rank 0 exits: rank 1 failed: ValueError: no luck"])

    @pytest.mark.usefixtures("forking")
    @pytest.mark.parametrize(("end", "code"), [("sys.exit(7)", 7), ("os.kill(os.getpid(), 9)", 137)])
    def test_the_exit_code_is_that_of_the_first_failed_process(self, folder: Path, end: str, code: int) -> None:
        script = f"import os, sys, time\nif os.environ['RANK'] == '1':\n    {end}\ntime.sleep(100)\n"
        (folder / "end.py").write_text(script)
        done = launch(folder, "--slots", "2", "end.py")
        assert (done.returncode, done.stdout, done.stderr) == (code, "", "")

    @pytest.mark.usefixtures("forking")
    @pytest.mark.parametrize("slots", [1, 2])
    def test_a_failed_group_is_restarted_with_the_same_trial(self, folder: Path, slots: int) -> None:
        (folder / "again.py").write_text(
            "import os, sys, time\n"
            "from dovetail.info import get_cluster_info\n"
            "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n"
            "    time.sleep(100 * int(os.environ['RANK']))\n"
            "    sys.exit(3)\n"
            "os.write(1, f'{get_cluster_info().hparams}\\n'.encode())\n"
        )
        arguments = ["--slots", str(slots), "--hparam", "lr=1", "--restarts"]
        done = launch(folder, *arguments, "1", "again.py")
        assert (done.returncode, done.stdout, done.stderr) == (0, "{'lr': 1}\n" * slots, "")

    @pytest.mark.usefixtures("forking")
    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
    def test_a_signal_lets_every_process_save_and_exit(self, folder: Path, number: signal.Signals) -> None:
        (folder / "wait.py").write_text(
            "import os, pathlib, time\n"
            "from dovetail import core\n"
            "with core.init() as context:\n"
            "    os.write(1, b'.')\n"
            "    while not context.preempt.should_preempt():\n"
            "        time.sleep(0.01)\n"
            "    pathlib.Path(f'saved-{context.distributed.rank}').touch()\n"
        )
        with started(folder, "--slots", "2", "wait.py") as program:
            assert read(program, 2) == b".."
            program.send_signal(number)
            assert program.wait(timeout=120) == 128 + number
            assert program.stderr is not None
            messages = program.stderr.read().decode().split("\n")
        assert {line for line in messages if line} == {
            f"{number.name}: exit requested; the script stops at its next check (press again to stop at once)"
        }
        assert sorted(path.name for path in folder.glob("saved-*")) == ["saved-0", "saved-1"]

    @pytest.mark.usefixtures("forking")
    def test_the_second_signal_ends_processes_that_ignore_the_first(self, folder: Path) -> None:
        (folder / "deaf.py").write_text(
            "import os, time\n"
            "from dovetail import core\n"
            "with core.init() as context:\n"
            "    os.write(1, f'{os.getpid():8d}'.encode())\n"
            "    time.sleep(100)\n"
        )
        with started(folder, "--slots", "2", "deaf.py") as program:
            pids = [int(read(program, 8)) for _ in range(2)]
            program.send_signal(signal.SIGTERM)
            assert program.stderr is not None
            received = 0
            while received < 2:
                received += b"SIGTERM" in program.stderr.readline()
            program.send_signal(signal.SIGTERM)
            assert program.wait(timeout=120) == 128 + signal.SIGTERM
            deadline = time.monotonic() + 120
            while any(Path(f"/proc/{pid}").exists() for pid in pids):
                assert time.monotonic() < deadline
