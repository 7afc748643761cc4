from __future__ import annotations

import json
import multiprocessing
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data as torch_data
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    Dataset,
    IterableDataset,
    RandomSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from dovetail.data import DataLoader, iterate_from
from dovetail.data.slicing import rows_in_memory
from dovetail.errors import DataError

Options = dict[str, Any]


def tensors(length: int) -> TensorDataset:
    return TensorDataset(torch.arange(length * 3.0).view(length, 3), torch.arange(length))


class Counting(Dataset[Any]):
    """Rows with a record of which were read."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.read.append(index)
        return torch.full((2,), float(index)), index


class Stream(IterableDataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.length))


class SizedStream(Stream):
    def __len__(self) -> int:
        return self.length


def as_lists(batches: Any) -> list[Any]:
    return [[part.tolist() for part in batch] if isinstance(batch, list) else batch.tolist() for batch in batches]


def labels(batches: Any) -> list[list[int]]:
    return [batch[-1].tolist() for batch in batches]


def assert_same(ours: list[Any], theirs: list[Any]) -> None:
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert type(one) is type(other)
        for part, other_part in zip(one, other, strict=True):
            assert part.dtype == other_part.dtype
            assert part.stride() == other_part.stride()
            assert torch.equal(part, other_part)


def epochs(kind: Callable[..., Any], dataset: Any, generator_seed: int | None, options: Options) -> tuple[Any, Any]:
    """Return the batches of three epochs with dropout-like draws between, and the random states after."""
    torch.manual_seed(5)
    generator = None if generator_seed is None else torch.Generator().manual_seed(generator_seed)
    loader = kind(dataset, generator=generator, **options)
    drawn, batches = [], []
    for _ in range(3):
        iterator = iter(loader)
        drawn.append(torch.rand(()))
        for batch in iterator:
            batches.append(batch)
            drawn.append(torch.rand(()))
            drawn.append(torch.rand((), generator=generator))
    states = [torch.get_rng_state(), *([] if generator is None else [generator.get_state()])]
    return batches, torch.cat([torch.stack(drawn), *(state.float() for state in states)])


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("generator_seed", [None, 3])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("length", "batch_size"), [(0, 4), (1, 4), (4, 4), (12, 4), (13, 4), (3, 1), (300, 2)])
def test_batches_and_random_states_equal_torch(
    shuffle: bool, generator_seed: int | None, drop_last: bool, length: int, batch_size: int
) -> None:
    if shuffle and not length:
        with pytest.raises(ValueError, match="num_samples"):
            DataLoader(tensors(0), shuffle=True)
        return
    dataset = tensors(length)
    options = {"shuffle": shuffle, "drop_last": drop_last, "batch_size": batch_size}
    ours, our_numbers = epochs(DataLoader, dataset, generator_seed, options)
    theirs, their_numbers = epochs(torch_data.DataLoader, dataset, generator_seed, options)
    assert_same(ours, theirs)
    assert torch.equal(our_numbers, their_numbers)


@pytest.mark.parametrize("taken", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("length", [8, 10])
@pytest.mark.parametrize("drop_last", [False, True])
def test_an_interrupted_epoch_leaves_the_generator_as_in_torch(taken: int, length: int, drop_last: bool) -> None:
    states = []
    for kind in (DataLoader, torch_data.DataLoader):
        generator = torch.Generator().manual_seed(1)
        iterator = iter(kind(tensors(length), 3, True, generator=generator, drop_last=drop_last))
        for _ in range(taken):
            next(iterator, None)
        states.append(generator.get_state())
    assert torch.equal(states[0], states[1])


@pytest.mark.parametrize(
    "dataset",
    [
        Subset(tensors(10), [7, -1, 3, 3, 0]),
        Subset(tensors(10), np.arange(1, 9)),  # type: ignore[arg-type]
        Subset(tensors(10), range(2, 8)),
        Subset(Subset(tensors(10), [9, 8, 7, 6, 5]), [0, -1, 2]),
        Subset(tensors(10), []),
        TensorDataset(torch.randn(7, 3, 4, 4).to(memory_format=torch.channels_last)),
        TensorDataset(torch.randn(3, 7).T, torch.randn(7, 4)[:, ::2]),
        TensorDataset(torch.zeros(7, 0), torch.arange(7) > 3, torch.randn(7, dtype=torch.complex64)),
    ],
)
@pytest.mark.parametrize("shuffle", [False, True])
def test_sliced_tensors_give_the_batches_of_torch(dataset: Any, shuffle: bool) -> None:
    shuffle = shuffle and len(dataset) > 0
    options: Options = {"shuffle": shuffle, "batch_size": 2}
    assert rows_in_memory(DataLoader(dataset, **options)) is not None
    ours, our_numbers = epochs(DataLoader, dataset, None, options)
    theirs, their_numbers = epochs(torch_data.DataLoader, dataset, None, options)
    assert_same(ours, theirs)
    assert torch.equal(our_numbers, their_numbers)


@pytest.mark.parametrize("generator_seed", [None, 3])
@pytest.mark.parametrize("dataset", [tensors(10), Subset(tensors(20), range(5, 15))])
def test_a_sliced_random_subset_gives_the_batches_of_torch(dataset: Any, generator_seed: int | None) -> None:
    numbers = []
    for kind in (DataLoader, torch_data.DataLoader):
        generator = None if generator_seed is None else torch.Generator().manual_seed(generator_seed)
        sampler = SubsetRandomSampler([7, -1, 3, 0, 2], generator=generator)
        batches, drawn = epochs(kind, dataset, 4, {"sampler": sampler, "batch_size": 2})
        numbers.append((as_lists(batches), drawn.tolist()))
    assert rows_in_memory(DataLoader(dataset, sampler=SubsetRandomSampler([7, -1]))) is not None
    assert numbers[0] == numbers[1]


def test_runs_of_large_rows_give_the_batches_of_torch() -> None:
    dataset = TensorDataset(torch.randn(41, 100_000))
    ours, _ = epochs(DataLoader, dataset, None, {"shuffle": True, "batch_size": 2})
    theirs, _ = epochs(torch_data.DataLoader, dataset, None, {"shuffle": True, "batch_size": 2})
    assert_same(ours, theirs)


class Doubled(TensorDataset):
    def __getitem__(self, index: Any) -> tuple[Tensor, ...]:
        return tuple(2 * tensor[index] for tensor in self.tensors)


@pytest.mark.parametrize(
    ("dataset", "options"),
    [
        (Doubled(torch.arange(5)), {"batch_size": 2}),
        (Subset(Doubled(torch.arange(5)), [1, 2]), {"batch_size": 2}),
        (TensorDataset(torch.zeros(5, requires_grad=True)), {"batch_size": 2}),
        (tensors(5), {"batch_size": None}),
        (tensors(5), {"batch_size": 2, "sampler": [3, 1, 0]}),
        (tensors(5), {"batch_size": 2, "sampler": RandomSampler(range(3))}),
        (tensors(5), {"batch_size": 2, "sampler": RandomSampler(range(5), replacement=True, num_samples=9)}),
        (tensors(5), {"batch_size": 2, "sampler": WeightedRandomSampler([1.0, 2.0, 3.0], 4)}),
        (tensors(5), {"batch_sampler": [[0, 1, 2], [4]]}),
        (tensors(5), {"batch_size": 2, "collate_fn": lambda samples: [torch.stack([x for x, _ in samples])]}),
        (Counting(5), {"batch_size": 2, "shuffle": True}),
    ],
)
def test_data_that_is_not_in_memory_is_loaded_by_torch(dataset: Any, options: Options) -> None:
    assert rows_in_memory(DataLoader(dataset, **options)) is None
    ours, our_numbers = epochs(DataLoader, dataset, 3, options)
    theirs, their_numbers = epochs(torch_data.DataLoader, dataset, 3, options)
    assert as_lists(map(list, ours)) == as_lists(map(list, theirs))
    assert torch.equal(our_numbers, their_numbers)


def test_a_stream_is_loaded_by_torch() -> None:
    assert as_lists(DataLoader(Stream(5), batch_size=2)) == [[0, 1], [2, 3], [4]]


@pytest.mark.slow
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("generator_seed", [None, 3])
@pytest.mark.parametrize("dataset", [tensors(10), Counting(10)])
def test_workers_give_the_batches_of_torch(dataset: Any, generator_seed: int | None, persistent: bool) -> None:
    options: Options = {"shuffle": True, "batch_size": 3, "num_workers": 1, "persistent_workers": persistent}
    results = []
    for kind in (DataLoader, torch_data.DataLoader):
        torch.manual_seed(5)
        generator = None if generator_seed is None else torch.Generator().manual_seed(generator_seed)
        loader = kind(dataset, generator=generator, **options)
        results.append((*(labels(loader) for _ in range(3)), torch.rand(()).item()))
    assert results[0] == results[1]


def test_data_in_memory_starts_no_worker() -> None:
    loader = DataLoader(tensors(4), num_workers=1)
    assert next(iter(loader))[0].is_shared() is False


def losses(kind: Callable[..., Any]) -> list[float]:
    torch.manual_seed(0)
    dataset = TensorDataset(torch.randn(50, 6), torch.randint(0, 3, (50,)))
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found = []
    for _ in range(3):
        for inputs, targets in kind(dataset, batch_size=8, shuffle=True):
            loss = nn.functional.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            found.append(loss.item())
    return found


def test_training_losses_equal_those_with_the_torch_loader() -> None:
    assert losses(DataLoader) == losses(torch_data.DataLoader)


@pytest.mark.parametrize("shuffle", [False, True])
def test_changing_a_batch_changes_neither_dataset_nor_other_batches(shuffle: bool) -> None:
    dataset = tensors(10)
    before = [tensor.clone() for tensor in dataset.tensors]
    torch.manual_seed(1)
    expected = as_lists(torch_data.DataLoader(dataset, 3, shuffle))
    torch.manual_seed(1)
    seen = []
    for batch in DataLoader(dataset, 3, shuffle):
        seen.append([part.tolist() for part in batch])
        for part in batch:
            part.fill_(-1)
    assert seen == expected
    assert all(map(torch.equal, dataset.tensors, before))


def test_changing_a_batch_in_place_does_not_break_another_backward_pass() -> None:
    weight = torch.ones(3, requires_grad=True)
    (first, _), (second, _) = DataLoader(tensors(4), batch_size=2)
    loss = (first * weight).sum()
    second.mul_(2)
    torch.autograd.backward(loss)
    assert weight.grad is not None
    assert torch.equal(weight.grad, first.sum(0))


def test_batches_are_usable_in_inference_mode() -> None:
    with torch.inference_mode():
        assert labels(DataLoader(tensors(3), batch_size=2)) == [[0, 1], [2]]


def test_the_loader_is_a_torch_data_loader() -> None:
    assert isinstance(DataLoader(tensors(2)), torch_data.DataLoader)


# Seed and epoch


@pytest.mark.parametrize("dataset", [tensors(20), Counting(20)])
def test_with_a_seed_the_order_depends_on_seed_and_epoch(dataset: Any) -> None:
    loader = DataLoader(dataset, batch_size=4, shuffle=True, seed=1)
    first, second, third = (labels(loader) for _ in range(3))
    other = DataLoader(dataset, batch_size=4, shuffle=True, seed=1)
    other.set_epoch(2)
    assert labels(other) == third
    other.set_epoch(0)
    assert labels(other) == first
    assert len({str(order) for order in (first, second, third)}) == 3
    assert labels(DataLoader(dataset, batch_size=4, shuffle=True, seed=2)) != first


def test_the_seeded_order_is_equal_in_memory_and_through_torch() -> None:
    loaders = [DataLoader(dataset, batch_size=4, shuffle=True, seed=1) for dataset in (tensors(9), Counting(9))]
    assert labels(loaders[0]) == labels(loaders[1])


@pytest.mark.parametrize("dataset", [tensors(20), Counting(20)])
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_seeded_loader_does_not_change_the_global_random_state(dataset: Any, shuffle: bool) -> None:
    before = torch.get_rng_state()
    list(DataLoader(dataset, batch_size=4, shuffle=shuffle, seed=1))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("dataset", [tensors(20), Counting(20)])
def test_two_concurrent_iterations_keep_their_orders(dataset: Any) -> None:
    loader = DataLoader(dataset, batch_size=4, shuffle=True, seed=1)
    expected = [labels(loader), labels(loader)]
    loader.set_epoch(0)
    older, newer = iter(loader), iter(loader)
    assert [labels(older), labels(newer)] == expected


def test_an_interrupted_iteration_ends_its_epoch() -> None:
    loader = DataLoader(tensors(20), batch_size=4, shuffle=True, seed=1)
    orders = [labels(loader), labels(loader)]
    again = DataLoader(tensors(20), batch_size=4, shuffle=True, seed=1)
    next(iter(again))
    assert again.epoch == 0
    assert labels(again) == orders[1]
    assert again.epoch == 2


def test_a_seed_and_a_generator_exclude_each_other() -> None:
    with pytest.raises(DataError, match="got both"):
        DataLoader(tensors(2), seed=1, generator=torch.Generator())


@pytest.mark.parametrize("batched", [False, True])
def test_set_epoch_reaches_a_sampler_that_has_one(batched: bool) -> None:
    sampler: DistributedSampler[Any] = DistributedSampler(tensors(10), num_replicas=2, rank=0)
    order: Options = {"batch_sampler": BatchSampler(sampler, 2, False)} if batched else {"sampler": sampler}
    DataLoader(tensors(10), **order).set_epoch(3)
    assert sampler.epoch == 3


# Skipping


@pytest.mark.parametrize("dataset", [tensors(11), Counting(11), SizedStream(11)])
@pytest.mark.parametrize("start", [0, 1, 3, 4, 5])
@pytest.mark.parametrize("seed", [None, 1])
def test_skipping_gives_the_tail_of_the_epoch(dataset: Any, start: int, seed: int | None) -> None:
    shuffle = not isinstance(dataset, IterableDataset)
    states = []
    for skipped in (0, start):
        torch.manual_seed(9)
        loader = DataLoader(dataset, batch_size=3, shuffle=shuffle, seed=seed)
        loader.skip(skipped)
        states.append((as_lists(loader), as_lists(loader), torch.get_rng_state().tolist(), len(loader)))
    whole, tail = states
    assert tail[0] == whole[0][start:]
    assert tail[1:] == whole[1:]


@pytest.mark.parametrize("start", [1, 2, 4])
def test_skipping_advances_a_generator_as_the_whole_epoch(start: int) -> None:
    states = []
    for skipped in (0, start):
        generator = torch.Generator().manual_seed(1)
        loader = DataLoader(tensors(9), batch_size=3, shuffle=True, generator=generator)
        loader.skip(skipped)
        list(loader)
        states.append(generator.get_state())
    assert torch.equal(states[0], states[1])


def test_skipped_samples_are_not_read() -> None:
    dataset = Counting(10)
    loader = DataLoader(dataset, batch_size=3)
    loader.skip(2)
    list(loader)
    assert dataset.read == [6, 7, 8, 9]


@pytest.mark.parametrize("dataset", [tensors(10), Counting(10)])
def test_after_a_skip_the_order_is_drawn_at_once(dataset: Any) -> None:
    torch.manual_seed(1)
    whole = labels(DataLoader(dataset, batch_size=3, shuffle=True))
    torch.manual_seed(1)
    loader = DataLoader(dataset, batch_size=3, shuffle=True)
    loader.skip(1)
    iterator = iter(loader)
    torch.manual_seed(2)
    assert labels(iterator) == whole[1:]


def test_a_negative_skip_is_rejected() -> None:
    with pytest.raises(DataError, match="not negative"):
        DataLoader(tensors(2)).skip(-1)


# Sharding


@pytest.mark.parametrize("dataset", [tensors(23), Counting(23), SizedStream(23)])
@pytest.mark.parametrize("num_replicas", [1, 2, 3, 9])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("batch_size", [4, 23])
def test_the_ranks_together_yield_the_batches_of_one_process(
    dataset: Any, num_replicas: int, drop_last: bool, batch_size: int
) -> None:
    shuffle = not isinstance(dataset, IterableDataset)
    options: Options = {"batch_size": batch_size, "shuffle": shuffle, "drop_last": drop_last, "seed": 1}
    whole = as_lists(DataLoader(dataset, **options))
    for rank in range(num_replicas):
        loader = DataLoader(dataset, num_replicas=num_replicas, rank=rank, **options)
        assert as_lists(loader) == whole[rank::num_replicas]
        assert len(loader) == len(whole[rank::num_replicas])


@pytest.mark.parametrize("dataset", [tensors(23), Subset(tensors(30), range(23)), Counting(23), Stream(23)])
@pytest.mark.parametrize("start", [1, 2, 3])
def test_a_rank_skips_its_batches(dataset: Any, start: int) -> None:
    loader = DataLoader(dataset, batch_size=4, num_replicas=2, rank=1)
    whole = as_lists(loader)
    loader.skip(start)
    assert as_lists(loader) == whole[start:]


def test_a_rank_reads_only_its_samples() -> None:
    dataset = Counting(8)
    list(DataLoader(dataset, batch_size=2, num_replicas=2, rank=1))
    assert dataset.read == [2, 3, 6, 7]


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_out_of_range_is_rejected(rank: int) -> None:
    with pytest.raises(DataError, match="rank"):
        DataLoader(tensors(2), num_replicas=2, rank=rank)


@pytest.mark.parametrize(
    "options",
    [{"seed": 1}, {"seed": 1, "shuffle": True}, {"seed": 1, "sampler": range(4)}, {"batch_sampler": [[1], [2]]}],
)
def test_a_loader_can_be_divided_among_ranks_afterwards(options: Options) -> None:
    loader = DataLoader(tensors(9), **options)
    shares = [DataLoader.from_torch(loader, num_replicas=2, rank=rank) for rank in range(2)]
    for _ in range(2):
        whole = labels(loader)
        assert [labels(share) for share in shares] == [whole[0::2], whole[1::2]]


@pytest.mark.parametrize("kind", [torch_data.DataLoader, DataLoader])
@pytest.mark.parametrize("batch_size", [2, None])
def test_a_seed_orders_a_loader_that_uses_the_global_generator(kind: Any, batch_size: int | None) -> None:
    shares = []
    for rank in range(2):
        torch.manual_seed(rank)
        loader = kind(tensors(9), batch_size, shuffle=True)
        shares.append(DataLoader.from_torch(loader, seed=5, num_replicas=2, rank=rank))
    whole = DataLoader(tensors(9), batch_size, shuffle=True, seed=5)
    for _ in range(2):
        expected = labels(whole)
        assert [labels(share) for share in shares] == [expected[0::2], expected[1::2]]


@pytest.mark.parametrize("options", [{}, {"sampler": range(4)}, {"batch_sampler": [[1], [2]]}])
def test_a_seed_does_not_change_an_order_from_another_generator(options: Options) -> None:
    loader = torch_data.DataLoader(tensors(9), **options)
    assert labels(DataLoader.from_torch(loader, seed=5)) == labels(loader)


@pytest.mark.parametrize("options", [{"seed": 4}, {"generator": torch.Generator()}])
def test_a_loader_keeps_its_generator_when_seeded(options: Options) -> None:
    def made(**seed: int) -> DataLoader[Any]:
        if "generator" in options:
            options["generator"].manual_seed(3)
        return DataLoader.from_torch(DataLoader(tensors(9), shuffle=True, **options), **seed)

    assert labels(made(seed=5)) == labels(made())


@pytest.mark.parametrize(
    "options",
    [
        {"sampler": RandomSampler(tensors(9), replacement=True)},
        {"sampler": RandomSampler(tensors(9), num_samples=4)},
        {"sampler": SubsetRandomSampler(range(4))},
        {"sampler": WeightedRandomSampler([1.0] * 9, 4)},
        {"batch_sampler": BatchSampler(RandomSampler(tensors(9)), 3, False)},
    ],
)
def test_a_seed_for_a_foreign_sampler_is_rejected(options: Options) -> None:
    with pytest.raises(DataError, match=r"give the .*RandomSampler a generator"):
        DataLoader.from_torch(torch_data.DataLoader(tensors(9), **options), seed=5)


# State


def seeded(dataset: Any) -> DataLoader[Any]:
    return DataLoader(dataset, batch_size=3, shuffle=True, seed=4)


def generated(dataset: Any) -> DataLoader[Any]:
    return DataLoader(dataset, batch_size=3, shuffle=True, generator=torch.Generator().manual_seed(4))


def sampled(dataset: Any) -> DataLoader[Any]:
    sampler = SubsetRandomSampler(range(10), generator=torch.Generator().manual_seed(4))
    return DataLoader(dataset, batch_size=3, sampler=sampler, generator=torch.Generator().manual_seed(5))


def batch_sampled(dataset: Any) -> DataLoader[Any]:
    sampler = RandomSampler(range(10), generator=torch.Generator().manual_seed(4))
    return DataLoader(dataset, batch_sampler=BatchSampler(sampler, 3, False))


def sharded(dataset: Any) -> DataLoader[Any]:
    return DataLoader(dataset, batch_size=1, shuffle=True, seed=4, num_replicas=2, rank=1)


@pytest.mark.parametrize("make", [seeded, generated, sampled, batch_sampled, sharded])
@pytest.mark.parametrize("dataset", [tensors(10), Counting(10)])
@pytest.mark.parametrize("position", [0, 1, 3, 4])
def test_a_restored_loader_continues_exactly(
    make: Callable[[Any], DataLoader[Any]], dataset: Any, position: int
) -> None:
    whole = make(dataset)
    expected = [labels(whole) for _ in range(4)]
    stopped = make(dataset)
    list(stopped)
    iterator = iter(stopped)
    for _ in range(position):
        next(iterator)
    state = stopped.state_dict()
    restored = make(dataset)
    restored.load_state_dict(state)
    assert [labels(restored) for _ in range(3)] == [expected[1][position:], *expected[2:]]


@pytest.mark.parametrize("make", [seeded, generated])
def test_the_state_between_two_epochs_is_that_of_the_next_epoch(make: Callable[[Any], DataLoader[Any]]) -> None:
    loader = make(tensors(10))
    list(loader)
    state = loader.state_dict()
    assert (state["epoch"], state["position"]) == (1, 0)
    restored = make(tensors(10))
    restored.load_state_dict(state)
    assert labels(restored) == labels(loader)


def test_a_restored_loader_that_has_not_started_yet_gives_the_same_state() -> None:
    loader = generated(tensors(10))
    next(iter(loader))
    state = loader.state_dict()
    restored = generated(tensors(10))
    restored.load_state_dict(state)
    again = restored.state_dict()
    assert torch.equal(again.pop("generators")[0], state.pop("generators")[0])
    assert again == state


def test_the_loader_state_consists_of_numbers_and_tensors() -> None:
    state = generated(tensors(3)).state_dict()
    assert all(type(item) is Tensor for item in state.pop("generators"))
    assert json.loads(json.dumps(state)) == state


def test_an_older_iterator_does_not_move_the_position() -> None:
    loader = seeded(tensors(10))
    older, newer = iter(loader), iter(loader)
    next(newer)
    list(older)
    assert (loader.state_dict()["epoch"], loader.state_dict()["position"]) == (1, 1)


def test_the_state_of_another_kind_of_loader_is_rejected() -> None:
    with pytest.raises(DataError, match="expected no seed and 1 generators, got a seed and 0 generators"):
        generated(tensors(3)).load_state_dict(seeded(tensors(3)).state_dict())


@pytest.mark.slow
@pytest.mark.parametrize("dataset", [tensors(10), Counting(10)])
def test_a_restored_loader_with_persistent_workers_continues_exactly(dataset: Any) -> None:
    def make() -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(4)
        return DataLoader(dataset, 3, True, num_workers=1, persistent_workers=True, generator=generator)

    whole = make()
    expected = [labels(whole) for _ in range(3)]
    stopped = make()
    list(stopped)
    iterator = iter(stopped)
    next(iterator)
    restored = make()
    restored.load_state_dict(stopped.state_dict())
    assert [labels(restored) for _ in range(2)] == [expected[1][1:], expected[2]]


@pytest.mark.slow
@pytest.mark.parametrize("dataset", [tensors(10), Counting(10)])
def test_the_seeded_order_does_not_depend_on_the_start_of_persistent_workers(dataset: Any) -> None:
    loaders = [DataLoader(dataset, 3, True, num_workers=1, persistent_workers=True, seed=1) for _ in range(2)]
    list(loaders[0])
    loaders[1].set_epoch(1)
    assert labels(loaders[0]) == labels(loaders[1])


@pytest.mark.slow
def test_persistent_workers_support_skipping_and_ranks() -> None:
    loader = DataLoader(Counting(10), batch_size=2, num_workers=1, persistent_workers=True, num_replicas=2, rank=0)
    found = []
    for start in (0, 1, 0):
        loader.skip(start)
        found.append(labels(loader))
    assert found == [[[0, 1], [4, 5], [8, 9]], [[4, 5], [8, 9]], [[0, 1], [4, 5], [8, 9]]]


# Any iterable


@pytest.mark.parametrize("start", [0, 1, 3, 9])
@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(tensors(10), batch_size=3, shuffle=True),
        lambda: torch_data.DataLoader(tensors(10), batch_size=3, shuffle=True),
        lambda: torch_data.DataLoader(Counting(10), batch_size=3, shuffle=True, drop_last=True),
        lambda: torch_data.DataLoader(Counting(10), batch_size=3, sampler=SubsetRandomSampler(range(8))),
        lambda: torch_data.DataLoader(Counting(10), batch_sampler=[[0, 1], [5], [3]]),
        lambda: torch_data.DataLoader(Counting(10), batch_size=None, shuffle=True, collate_fn=lambda pair: [pair[0]]),
        lambda: torch_data.DataLoader(Stream(10), batch_size=3, drop_last=True),
        lambda: list(torch_data.DataLoader(tensors(10), batch_size=3)),
        lambda: (batch for batch in torch_data.DataLoader(tensors(10), batch_size=3)),
    ],
)
def test_iterating_from_a_batch_gives_the_rest_of_the_epoch(make: Callable[[], Any], start: int) -> None:
    torch.manual_seed(3)
    whole = as_lists(make())
    after = torch.get_rng_state()
    torch.manual_seed(3)
    assert as_lists(iterate_from(make(), start)) == whole[start:]
    assert torch.equal(torch.get_rng_state(), after)


def test_iterating_a_torch_loader_from_a_batch_reads_no_sample_before_it() -> None:
    dataset = Counting(10)
    list(iterate_from(torch_data.DataLoader(dataset, batch_size=3), 2))
    assert dataset.read == [6, 7, 8, 9]


def test_iterating_a_torch_loader_from_a_batch_draws_its_order_at_once() -> None:
    loader = torch_data.DataLoader(Counting(10), batch_size=3, shuffle=True)
    torch.manual_seed(1)
    whole = labels(loader)
    torch.manual_seed(1)
    iterator = iterate_from(loader, 2)
    torch.manual_seed(2)
    assert labels(iterator) == whole[2:]


@pytest.mark.slow
def test_iterating_from_a_batch_works_with_workers() -> None:
    loader = torch_data.DataLoader(Counting(10), batch_size=3, shuffle=True, num_workers=1)
    torch.manual_seed(1)
    whole = labels(loader)
    torch.manual_seed(1)
    assert labels(iterate_from(loader, 2)) == whole[2:]


def test_a_loader_class_with_a_custom_iter_keeps_it() -> None:
    class Twice(torch_data.DataLoader[Any]):
        def __iter__(self) -> Any:
            for batch in super().__iter__():
                yield batch
                yield batch

    assert labels(iterate_from(Twice(tensors(2)), 1)) == [[0], [1], [1]]


class Drawing(Dataset[Any]):
    """Every sample draws from all that a worker has to draw from."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([index, random.random(), np.random.rand(), torch.rand(()).item()], dtype=torch.float64)


def drawn(epoch: int = 0, start: int = 0, **options: Any) -> list[Tensor]:
    loader = DataLoader(Drawing(), 4, shuffle=True, seed=3, **options)
    loader.set_epoch(epoch)
    return list(iterate_from(loader, start))


def test_random_numbers_of_samples_in_workers_depend_on_the_batch() -> None:
    whole = drawn(num_workers=1)
    assert_same(drawn(num_workers=2), whole)
    assert_same(drawn(num_workers=2, start=3), whole[3:])
    assert_same(drawn(num_workers=1, num_replicas=2, rank=1), whole[1::2])
    # Neither two samples nor two epochs draw the same.
    numbers = torch.cat([*whole, *drawn(epoch=1, num_workers=1)])[:, 1:]
    assert len(numbers.unique()) == numbers.numel()  # type: ignore[no-untyped-call]


def test_random_numbers_of_samples_in_process_use_its_generators() -> None:
    torch.manual_seed(5)
    whole = drawn()
    torch.manual_seed(5)
    assert torch.equal(torch.cat(whole)[0, 3], torch.rand(()).double())


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator to pin memory for")
def test_pin_memory_without_an_accelerator_is_silent() -> None:
    batches = list(DataLoader(Counting(4), 2, pin_memory=True))
    assert [rows.is_pinned() for rows, _ in batches] == [False, False]


class Damaged(Dataset[Any]):
    """Fails at one sample."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        if index == 5:
            raise KeyError("sample 5 is damaged")
        return index


def test_an_error_in_a_worker_names_the_line_of_the_dataset() -> None:
    with pytest.raises(KeyError) as caught:
        list(DataLoader(Damaged(), 2, num_workers=1))
    (note,) = caught.value.__notes__
    assert f"raised in data worker 0, which read batch 3 of the pass: {__file__}, line " in note
    assert "in __getitem__; num_workers=0 reads the data in this process" in note


def test_an_error_in_a_worker_stops_all_workers_at_once() -> None:
    before = set(multiprocessing.active_children())
    with pytest.raises(KeyError) as caught:
        list(DataLoader(Damaged(), 2, num_workers=2))
    # The traceback still refers to the iterator, so it is not the garbage collector that has stopped them.
    assert caught.value.__traceback__ is not None
    assert set(multiprocessing.active_children()) <= before


def test_persistent_workers_continue_after_an_error() -> None:
    loader = DataLoader(Damaged(), 2, num_workers=1, persistent_workers=True)
    for _ in range(2):
        with pytest.raises(KeyError, match="sample 5 is damaged"):
            list(loader)
