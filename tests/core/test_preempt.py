from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest

from dovetail.core import DistributedContext, PreemptContext, PreemptMode
from dovetail.errors import ConfigError
from dovetail.info import ATTEMPT, PREEMPTED

SIGNALS = [signal.SIGINT, signal.SIGTERM]
both = pytest.mark.parametrize("number", SIGNALS)


def of(rank: int, mode: PreemptMode) -> PreemptContext:
    return PreemptContext(DistributedContext(rank=rank, size=2, local_rank=rank, local_size=2), mode)


@pytest.fixture(autouse=True)
def pythons_own_handlers() -> Iterator[None]:
    before = [signal.getsignal(number) for number in SIGNALS]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    for number, handler in zip(SIGNALS, before, strict=True):
        signal.signal(number, handler)


@both
def test_a_signal_is_received_and_logged(number: signal.Signals, capfd: pytest.CaptureFixture[str]) -> None:
    with PreemptContext(DistributedContext()) as preempt:
        assert not preempt.should_preempt()
        assert preempt.signal is None
        os.kill(os.getpid(), number)
        assert preempt.should_preempt()
        assert preempt.should_preempt(auto_ack=False)
        assert preempt.signal == number
    assert capfd.readouterr().err.strip() == (  # type: ignore[unreachable] # `signal` has changed
        f"{number.name}: exit requested; the script stops at its next check (press again to stop at once)"
    )


def test_the_second_signal_has_its_default_effect() -> None:
    with pytest.raises(KeyboardInterrupt), PreemptContext(DistributedContext()):
        os.kill(os.getpid(), signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        os.kill(os.getpid(), signal.SIGINT)


def test_signal_handlers_are_restored() -> None:
    with PreemptContext(DistributedContext()):
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_signal_handler_of_the_user_is_kept() -> None:
    received: list[int] = []

    def own(number: int, frame: FrameType | None) -> None:
        received.append(number)

    signal.signal(signal.SIGTERM, own)
    with PreemptContext(DistributedContext()) as preempt:
        os.kill(os.getpid(), signal.SIGTERM)
        assert not preempt.should_preempt()
    assert received == [signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) is own


def test_a_context_in_another_thread_changes_no_handler() -> None:
    found: list[object] = []

    def work() -> None:
        with PreemptContext(DistributedContext()) as preempt:
            found.extend([signal.getsignal(signal.SIGTERM), preempt.should_preempt()])

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [signal.SIG_DFL, False]


def test_in_chief_only_mode_the_other_ranks_are_rejected() -> None:
    assert not of(0, PreemptMode.ChiefOnly).should_preempt()
    with pytest.raises(ConfigError, match=r"should_preempt\(\) was called in rank 1: with PreemptMode\.ChiefOnly only"):
        of(1, PreemptMode.ChiefOnly).should_preempt()


def test_workers_ask_master_mode_uses_only_local_signals() -> None:
    with of(1, PreemptMode.WorkersAskMaster) as preempt:
        assert not preempt.should_preempt()
        os.kill(os.getpid(), signal.SIGTERM)
        assert preempt.should_preempt()


def test_the_acknowledgement_of_determined_is_accepted() -> None:
    with PreemptContext(DistributedContext()) as preempt:
        preempt.acknowledge_preemption_signal()
        assert not preempt.should_preempt()


@pytest.mark.parametrize("auto_ack", [True, False])
def test_the_experiment_is_notified_that_a_script_will_resume_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, auto_ack: bool
) -> None:
    monkeypatch.setenv(ATTEMPT, str(tmp_path))
    with PreemptContext(DistributedContext()) as preempt:
        assert not preempt.should_preempt(auto_ack)
        assert list(tmp_path.iterdir()) == []
        os.kill(os.getpid(), signal.SIGTERM)
        assert preempt.should_preempt(auto_ack)
        assert (tmp_path / PREEMPTED).exists() == auto_ack
        preempt.acknowledge_preemption_signal()
        assert (tmp_path / PREEMPTED).exists()
