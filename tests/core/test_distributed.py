from __future__ import annotations

import os
import socket
import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch

from dovetail.core import DistributedContext
from dovetail.errors import ConfigError

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)


def launched(monkeypatch: pytest.MonkeyPatch, **variables: object) -> DistributedContext:
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1, **variables}.items():
        monkeypatch.setenv(name, str(value))
    return DistributedContext.from_environment()


def places(context: DistributedContext) -> list[tuple[int, int]]:
    return [
        (context.rank, context.size),
        (context.local_rank, context.local_size),
        (context.cross_rank, context.cross_size),
    ]


def test_a_single_process_is_the_chief() -> None:
    context = DistributedContext.from_environment()
    assert places(context) == [(0, 1), (0, 1), (0, 1)]
    assert context.is_chief
    assert (context.get_rank(), context.get_size(), context.get_local_rank(), context.get_num_agents()) == (0, 1, 0, 1)


def test_a_single_process_receives_its_own_messages() -> None:
    context, value = DistributedContext(), {"anything": {1, 2}, "tensor": torch.ones(2)}
    for found in (context.gather(value), context.gather_local(value), context.allgather(value)):
        assert found is not None
        assert len(found) == 1
        assert found[0] is value
    assert context.allgather_local(value)[0] is value
    assert context.broadcast(value) is value
    assert context.broadcast_local(value) is value
    context.close()


def test_torchrun_variables_set_the_rank_on_several_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    context = launched(monkeypatch, RANK=5, WORLD_SIZE=6, LOCAL_RANK=1, LOCAL_WORLD_SIZE=2, GROUP_RANK=2)
    assert places(context) == [(5, 6), (1, 2), (2, 3)]
    assert not context.is_chief
    assert context.get_num_agents() == 3


def test_without_local_torchrun_variables_there_is_one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    assert places(launched(monkeypatch, RANK=1, WORLD_SIZE=2)) == [(1, 2), (1, 2), (0, 1)]


def test_creating_a_context_opens_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    launched(monkeypatch, RANK=1, WORLD_SIZE=2)
    assert not torch.distributed.is_initialized()


def test_a_variable_that_is_not_a_number_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="environment variable RANK: expected a number, got 'first'"):
        launched(monkeypatch, RANK="first", WORLD_SIZE=2)


def test_a_process_without_a_group_gets_an_error_with_a_remedy() -> None:
    with pytest.raises(ConfigError, match=r"this process is in no group: start it by 'python -m dovetail\.launch'"):
        DistributedContext.from_torch_distributed()


def test_other_launchers_are_rejected_in_one_sentence() -> None:
    with pytest.raises(ConfigError, match=r"from_horovod: expected processes that torch starts; use .*from_torch"):
        DistributedContext.from_horovod(os, chief_ip="10.0.0.1")
    with pytest.raises(ConfigError, match="from_deepspeed: expected processes that torch starts"):
        DistributedContext.from_deepspeed(chief_ip="10.0.0.1")
    with pytest.raises(ConfigError, match="from_tf_config: expected processes that torch starts"):
        DistributedContext.from_tf_config()


@pytest.mark.parametrize("wrong", [{"rank": 2, "size": 2}, {"local_rank": -1}, {"cross_rank": 1}])
def test_an_impossible_rank_is_rejected(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(wrong))}: expected a number from 0 to"):
        DistributedContext(**wrong)


def of(size: int) -> DistributedContext:
    return DistributedContext(rank=0, size=size, local_size=size)


@pytest.mark.parametrize(("total", "size", "share"), [(64, 1, 64), (64, 4, 16), (3, 3, 1)])
def test_a_global_batch_is_divided_among_processes(total: int, size: int, share: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert of(size).shard_batch_size(total) == share


def test_a_remainder_warns_with_the_batch_size_that_is_used() -> None:
    with pytest.warns(UserWarning, match="64 does not divide by 3 processes: it is 63, 21 for each"):
        assert of(3).shard_batch_size(64) == 21


def test_fewer_samples_than_processes_are_rejected() -> None:
    with pytest.raises(ConfigError, match="expected at least 4, one for each process, got 3"):
        of(4).shard_batch_size(3)


# ------------------------------------------------------------------ ranks without a launcher

_PEER = """
import sys
from dovetail.core import DistributedContext
rank, port = int(sys.argv[1]), int(sys.argv[2])
places = {"local_rank": rank, "local_size": 2, "cross_rank": 0, "cross_size": 1}
context = DistributedContext(rank=rank, size=2, **places, chief_ip="127.0.0.1", pub_port=port - 1, port_offset=1)
print(context.allgather(10 + rank), context.broadcast(rank), context.gather(rank))
context.close()
"""


@pytest.mark.slow
def test_processes_without_a_launcher_connect_to_the_chief_address() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-c", _PEER]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    peers = [
        subprocess.Popen([*command, str(rank), str(port)], stdout=subprocess.PIPE, text=True, env=environment)
        for rank in range(2)
    ]
    try:
        assert [peer.communicate(timeout=120)[0] for peer in peers] == ["[10, 11] 0 [0, 1]\n", "[10, 11] 0 None\n"]
    finally:
        for peer in peers:
            peer.kill()


def test_several_machines_without_a_launcher_require_the_chief_address() -> None:
    context = DistributedContext(rank=0, size=2, local_rank=0, local_size=1, cross_rank=0, cross_size=2)
    with pytest.raises(ConfigError, match="chief_ip: 2 processes on several machines need the address"):
        context.broadcast(1)


def test_a_launched_process_accepts_the_chief_address(monkeypatch: pytest.MonkeyPatch) -> None:
    launched(monkeypatch, RANK=1, WORLD_SIZE=2)
    assert places(DistributedContext.from_torch_distributed(chief_ip="10.0.0.1")) == [(1, 2), (1, 2), (0, 1)]


def test_a_second_port_is_not_ignored_silently() -> None:
    with pytest.warns(UserWarning, match="pull_port has no effect: all messages use pub_port"):
        DistributedContext(pull_port=12376, force_tcp=True)
