"""Loader strategies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from problem import Problem
from torch.utils.data import Dataset, IterableDataset, SequentialSampler, SubsetRandomSampler, TensorDataset

from dovetail import Batches, Epochs
from dovetail.data import DataLoader
from dovetail.errors import ConfigError, DataError
from dovetail.trainers.composable import ComposableTrainer
from dovetail.trainers.context import TrainingContext
from dovetail.trainers.strategies import (
    CustomCollateFnDataLoaderStrategy,
    DataLoaderStrategy,
    DefaultDataLoaderStrategy,
    DynamicBatchSizeDataLoaderStrategy,
    PrefetchDataLoaderStrategy,
    ShuffleDataLoaderStrategy,
)

NUMBERS = TensorDataset(torch.arange(10))


class Squares(Dataset[int]):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> int:
        return index * index


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


class Source:
    def get(self) -> list[int]:
        return [3, 1]


def batches(strategy: DataLoaderStrategy, context: TrainingContext, sampler: Any = None) -> list[list[int]]:
    return [batch.tolist() for (batch,) in strategy.create_train_loader(NUMBERS, sampler, 4, context)]


def test_the_default_loader_reads_in_order(context: TrainingContext) -> None:
    assert batches(DefaultDataLoaderStrategy(), context) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_an_incomplete_last_batch_may_be_dropped(context: TrainingContext) -> None:
    assert batches(DefaultDataLoaderStrategy(drop_last=True), context) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_indices_are_drawn_in_a_new_order_every_epoch(context: TrainingContext) -> None:
    context.state["order_seed"] = 1
    loader = DefaultDataLoaderStrategy().create_train_loader(NUMBERS, range(8), 8, context)
    first, second = ([batch.tolist() for (batch,) in loader] for _ in range(2))
    assert sorted(first[0]) == sorted(second[0]) == list(range(8))
    assert first != second


def test_the_loader_order_follows_from_the_seed() -> None:
    def order(seed: int) -> list[list[int]]:
        context = TrainingContext()
        context.state["order_seed"] = seed
        return batches(ShuffleDataLoaderStrategy(), context)

    assert order(5) == order(5) != order(6)


def test_a_torch_sampler_keeps_its_order(context: TrainingContext) -> None:
    whole = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert batches(ShuffleDataLoaderStrategy(), context, SequentialSampler(NUMBERS)) == whole


def test_a_sampler_source_provides_the_sampler(context: TrainingContext) -> None:
    assert [sorted(batch) for batch in batches(DefaultDataLoaderStrategy(), context, Source())] == [[1, 3]]


def test_a_torch_sampler_of_indices_reads_only_those(context: TrainingContext) -> None:
    assert [sorted(it) for it in batches(DefaultDataLoaderStrategy(), context, SubsetRandomSampler([7, 2]))] == [[2, 7]]


def test_samples_are_collated_by_the_given_function(context: TrainingContext) -> None:
    strategy = CustomCollateFnDataLoaderStrategy(lambda samples: [int(x) for (x,) in samples], drop_last=True)
    assert list(strategy.create_train_loader(NUMBERS, None, 4, context)) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_prefetching_processes_read_the_same_batches(context: TrainingContext) -> None:
    strategy = PrefetchDataLoaderStrategy(prefetch_factor=3, num_workers=1)
    loader = strategy.create_train_loader(Squares(), None, 4, context)
    assert [batch.tolist() for batch in loader] == [[0, 1, 4, 9], [16, 25]]
    assert (loader.prefetch_factor, loader.persistent_workers, loader.num_workers) == (3, True, 1)


def test_prefetching_shuffles_by_the_seed_as_the_default_does(context: TrainingContext) -> None:
    context.state["order_seed"] = 3
    prefetched = PrefetchDataLoaderStrategy(num_workers=1).create_train_loader(Squares(), range(6), 4, context)
    plain = DefaultDataLoaderStrategy().create_train_loader(Squares(), range(6), 4, context)
    assert [batch.tolist() for batch in prefetched] == [batch.tolist() for batch in plain]


def test_prefetching_without_processes_equals_the_default_loader(context: TrainingContext) -> None:
    loader = PrefetchDataLoaderStrategy(num_workers=0).create_train_loader(Squares(), None, 4, context)
    assert [batch.tolist() for batch in loader] == [[0, 1, 4, 9], [16, 25]]


def test_a_stream_is_read_in_its_given_order(context: TrainingContext) -> None:
    loader = ShuffleDataLoaderStrategy().create_train_loader(Stream(), None, 3, context)
    assert [batch.tolist() for batch in loader] == [[0, 1, 2], [3]]


def test_batched_data_is_left_unchanged(context: TrainingContext) -> None:
    ready = [torch.zeros(2), torch.zeros(2)]
    assert DefaultDataLoaderStrategy().create_train_loader(ready, None, 4, context) is ready


# Batch sizes that change


def test_a_batch_size_without_a_function_is_constant(context: TrainingContext) -> None:
    strategy = DynamicBatchSizeDataLoaderStrategy(initial_batch_size=3)
    assert [len(batch) for batch in batches(strategy, context)] == [3, 3, 3, 1]


def test_no_batch_exceeds_the_maximum_size(context: TrainingContext) -> None:
    strategy = DynamicBatchSizeDataLoaderStrategy(max_batch_size=5, adjust_fn=lambda context: 100)
    assert [len(batch) for batch in batches(strategy, context)] == [5, 5]


@pytest.mark.parametrize("size", [0, 2.5, True])
def test_an_invalid_batch_size_is_rejected(size: Any, context: TrainingContext) -> None:
    with pytest.raises(ConfigError, match=f"adjust_fn: expected a whole number that is at least 1, got {size}"):
        batches(DynamicBatchSizeDataLoaderStrategy(adjust_fn=lambda context: size), context)
    with pytest.raises(
        ConfigError, match=f"initial_batch_size: expected a whole number that is at least 1, got {size}"
    ):
        DynamicBatchSizeDataLoaderStrategy(initial_batch_size=size)


@pytest.mark.parametrize("data", [Stream(), DataLoader(range(8), batch_size=2)], ids=["stream", "batches"])
def test_batched_data_rejects_a_changing_batch_size(data: Any, context: TrainingContext) -> None:
    with pytest.raises(DataError, match="expected a dataset with indices"):
        DynamicBatchSizeDataLoaderStrategy().create_train_loader(data, None, 4, context)


def test_the_batch_size_changes_from_epoch_to_epoch(problem: Problem, train: Callable[..., ComposableTrainer]) -> None:
    trainer = train(
        problem.model(),
        (problem.x, problem.y),
        epochs=3,
        data_loader_strategy=DynamicBatchSizeDataLoaderStrategy(
            initial_batch_size=6, adjust_fn=lambda context: 2 * context.state["batch_size"]
        ),
    )
    assert trainer.context.progress.batches == 96 // 12 + 96 // 24 + 96 // 48


def test_changing_batch_sizes_resume_within_an_epoch(problem: Problem, tmp_path: Path) -> None:
    def trainer() -> ComposableTrainer:
        trainer = ComposableTrainer(
            problem.model(),
            verbose=False,
            seed=3,
            data_loader_strategy=DynamicBatchSizeDataLoaderStrategy(adjust_fn=lambda c: 8 * c.current_epoch),
        )
        trainer.sampler = range(96)
        return trainer

    data = TensorDataset(problem.x, problem.y)
    whole, first, second = trainer(), trainer(), trainer()
    whole.fit(data, max_length=Epochs(3))
    first.fit(data, max_length=Batches(15))
    first.save_checkpoint(tmp_path / "half")
    second.load_checkpoint(tmp_path / "half")
    second.fit(data, max_length=Epochs(3))
    assert whole.context.progress.batches == second.context.progress.batches == 12 + 6 + 4
    for one, other in zip(whole.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(one, other)
