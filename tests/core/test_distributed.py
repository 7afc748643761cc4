from __future__ import annotations

import os
import warnings

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


def test_a_process_alone_is_the_chief_of_itself() -> None:
    context = DistributedContext.from_environment()
    assert places(context) == [(0, 1), (0, 1), (0, 1)]
    assert context.is_chief
    assert (context.get_rank(), context.get_size(), context.get_local_rank(), context.get_num_agents()) == (0, 1, 0, 1)


def test_alone_every_message_is_ones_own_object() -> None:
    context, value = DistributedContext(), {"anything": {1, 2}, "tensor": torch.ones(2)}
    for found in (context.gather(value), context.gather_local(value), context.allgather(value)):
        assert found is not None
        assert len(found) == 1
        assert found[0] is value
    assert context.allgather_local(value)[0] is value
    assert context.broadcast(value) is value
    assert context.broadcast_local(value) is value
    context.close()


def test_torchrun_tells_the_place_on_several_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    context = launched(monkeypatch, RANK=5, WORLD_SIZE=6, LOCAL_RANK=1, LOCAL_WORLD_SIZE=2, GROUP_RANK=2)
    assert places(context) == [(5, 6), (1, 2), (2, 3)]
    assert not context.is_chief
    assert context.get_num_agents() == 3


def test_without_torchruns_finer_variables_there_is_one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    assert places(launched(monkeypatch, RANK=1, WORLD_SIZE=2)) == [(1, 2), (1, 2), (0, 1)]


def test_making_a_context_meets_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    launched(monkeypatch, RANK=1, WORLD_SIZE=2)
    assert not torch.distributed.is_initialized()


def test_a_variable_that_is_no_number_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="environment variable RANK: expected a number, got 'first'"):
        launched(monkeypatch, RANK="first", WORLD_SIZE=2)


def test_a_process_in_no_group_is_told_how_to_get_into_one() -> None:
    with pytest.raises(ConfigError, match=r"this process is in no group: start it by 'python -m dovetail\.launch'"):
        DistributedContext.from_torch_distributed()


def test_other_launchers_are_refused_in_one_sentence() -> None:
    with pytest.raises(ConfigError, match=r"from_horovod: expected processes that torch starts; use .*from_torch"):
        DistributedContext.from_horovod(os)
    with pytest.raises(ConfigError, match="from_deepspeed: expected processes that torch starts"):
        DistributedContext.from_deepspeed()


@pytest.mark.parametrize("wrong", [{"rank": 2, "size": 2}, {"local_rank": -1}, {"cross_rank": 1}])
def test_a_place_that_cannot_be_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(wrong))}: expected a number from 0 to"):
        DistributedContext(**wrong)


def of(size: int) -> DistributedContext:
    return DistributedContext(rank=0, size=size, local_size=size)


@pytest.mark.parametrize(("total", "size", "share"), [(64, 1, 64), (64, 4, 16), (3, 3, 1)])
def test_a_global_batch_is_divided(total: int, size: int, share: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert of(size).shard_batch_size(total) == share


def test_a_remainder_warns_of_the_batch_size_that_is_used() -> None:
    with pytest.warns(UserWarning, match="64 does not divide by 3 processes: it is 63, 21 for each"):
        assert of(3).shard_batch_size(64) == 21


def test_fewer_samples_than_processes_are_refused() -> None:
    with pytest.raises(ConfigError, match="expected at least 4, one for each process, got 3"):
        of(4).shard_batch_size(3)
