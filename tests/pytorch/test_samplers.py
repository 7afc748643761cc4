from __future__ import annotations

from itertools import islice

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, SequentialSampler, TensorDataset

from dovetail.data import DataLoader
from dovetail.errors import DataError
from dovetail.pytorch.samplers import (
    DistributedBatchSampler,
    DistributedSampler,
    RepeatBatchSampler,
    RepeatSampler,
    ReproducibleShuffleBatchSampler,
    ReproducibleShuffleSampler,
    SkipBatchSampler,
    SkipSampler,
)


def batches(length: int, size: int = 2) -> BatchSampler:
    return BatchSampler(range(length), size, drop_last=False)


def test_the_repeat_sampler_is_endless_and_has_the_length_of_one_pass() -> None:
    repeated = RepeatBatchSampler(batch_sampler=batches(5))
    assert list(islice(repeated, 5)) == [[0, 1], [2, 3], [4], [0, 1], [2, 3]]
    assert len(repeated) == 3
    assert list(islice(RepeatSampler(sampler=range(2)), 3)) == [0, 1, 0]


def test_repeating_an_empty_sampler_raises_instead_of_looping() -> None:
    with pytest.raises(DataError, match="sampler: expected a sampler with at least one index, got none"):
        next(iter(RepeatSampler([])))


def test_batches_are_distributed_to_ranks_in_turn() -> None:
    shares = [DistributedBatchSampler(batch_sampler=batches(9), num_workers=3, rank=rank) for rank in range(3)]
    assert [list(share) for share in shares] == [[[0, 1], [6, 7]], [[2, 3], [8]], [[4, 5]]]
    assert [len(share) for share in shares] == [2, 2, 1]


@given(length=st.integers(0, 50), num_workers=st.integers(1, 7))
def test_all_ranks_together_have_each_item_once(length: int, num_workers: int) -> None:
    shares = [DistributedSampler(range(length), num_workers, rank) for rank in range(num_workers)]
    assert sorted(index for share in shares for index in share) == list(range(length))
    assert all(len(share) == len(list(share)) for share in shares)
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.parametrize(("num_workers", "rank"), [(2, 2), (2, -1), (0, 0)])
def test_a_rank_out_of_range_is_rejected(num_workers: int, rank: int) -> None:
    with pytest.raises(DataError, match=f"rank: expected 0 <= rank < num_workers = {num_workers}, got {rank}"):
        DistributedSampler(range(3), num_workers, rank)


def test_skipping_applies_only_to_the_first_pass() -> None:
    skipping = SkipBatchSampler(batch_sampler=batches(5), skip=2)
    assert [list(skipping) for _ in range(2)] == [[[4]], [[0, 1], [2, 3], [4]]]
    assert len(skipping) == 3


@given(length=st.integers(0, 20), skip=st.integers(0, 30))
def test_skipping_more_than_the_length_skips_everything(length: int, skip: int) -> None:
    assert list(SkipSampler(range(length), skip)) == list(range(length))[skip:]


def test_a_negative_skip_is_rejected() -> None:
    with pytest.raises(DataError, match="skip: expected a number that is not negative, got -1"):
        SkipSampler(range(3), -1)


def test_a_shuffle_is_equal_in_every_process_and_version() -> None:
    shuffled = ReproducibleShuffleSampler(range(8), seed=7)
    assert [list(shuffled), list(shuffled)] == [[5, 7, 1, 6, 3, 4, 2, 0], [1, 2, 6, 7, 5, 3, 4, 0]]


@given(st.integers(), st.integers(0, 5))
def test_the_order_of_an_epoch_does_not_depend_on_earlier_epochs(seed: int, epoch: int) -> None:
    one_after_the_other = ReproducibleShuffleSampler(range(9), seed)
    orders = [list(one_after_the_other) for _ in range(epoch + 1)]
    at_once = ReproducibleShuffleSampler(range(9), seed)
    at_once.set_epoch(epoch)
    assert list(at_once) == orders[-1]
    assert sorted(orders[-1]) == list(range(9))


def test_shuffling_does_not_change_the_global_rng() -> None:
    before = torch.random.get_rng_state()
    list(ReproducibleShuffleSampler(range(9), seed=1))
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_sample_shuffle_equals_the_loader_with_the_same_seed() -> None:
    data = TensorDataset(torch.arange(20))
    loader = DataLoader(data, batch_size=20, shuffle=True, seed=3)
    shuffled = ReproducibleShuffleSampler(SequentialSampler(data), seed=3)
    for _ in range(3):
        ((order,),) = loader
        assert order.tolist() == list(shuffled)


def test_a_batch_shuffle_keeps_each_batch_together() -> None:
    shuffled = ReproducibleShuffleBatchSampler(batch_sampler=batches(20), seed=0)
    first, second = list(shuffled), list(shuffled)
    assert sorted(first) == sorted(second) == list(batches(20))
    assert first != second
    assert len(shuffled) == 10


def training(seed: int, num_workers: int = 1, rank: int = 0, skip: int = 0) -> SkipBatchSampler:
    shuffled = ReproducibleShuffleSampler(range(10), seed)
    repeated = RepeatBatchSampler(BatchSampler(shuffled, 3, drop_last=False))
    return SkipBatchSampler(DistributedBatchSampler(repeated, num_workers, rank), skip)


@pytest.mark.parametrize("skip", [0, 1, 4, 9])
def test_the_training_sampler_chain_resumes_at_its_position(skip: int) -> None:
    assert list(islice(training(1, skip=skip), 10)) == list(islice(training(1), skip + 10))[skip:]


def test_the_training_sampler_chain_is_synchronous_across_ranks() -> None:
    shares = [list(islice(training(1, num_workers=2, rank=rank), 6)) for rank in range(2)]
    in_turn = [batch for pair in zip(*shares, strict=True) for batch in pair]
    assert in_turn == list(islice(training(1), 12))


def test_set_epoch_reaches_the_innermost_shuffle() -> None:
    shared = DistributedBatchSampler(BatchSampler(ReproducibleShuffleSampler(range(10), 1), 3, drop_last=False), 2, 1)
    orders = [list(shared) for _ in range(3)]
    shared.set_epoch(1)
    assert list(shared) == orders[1] != orders[0]


def test_a_loader_passes_the_epoch_to_its_sampler() -> None:
    sampler = SkipSampler(ReproducibleShuffleSampler(range(10), 1), 0)
    loader = DataLoader(TensorDataset(torch.arange(10)), batch_size=10, sampler=sampler)
    orders = [order.tolist() for _ in range(3) for (order,) in loader]
    loader.set_epoch(1)
    assert [order.tolist() for (order,) in loader] == orders[1:2]
