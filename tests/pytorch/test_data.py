from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data as torch_data
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, IterableDataset, TensorDataset
from trials import Classifier, make, make_data

from dovetail import data, pytorch
from dovetail.errors import DataError
from dovetail.pytorch.data import DataLoader, EndlessLoader


class Counting(Dataset[int]):
    """Numbers, with a record of which were read."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        self.read.append(index)
        return index


class Stream(IterableDataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.length))


def lists(loader: Iterable[Any], number: int | None = None) -> list[list[int]]:
    return [batch.tolist() for batch in islice(loader, number)]


def shuffled(length: int = 10, batch_size: int = 3, **options: Any) -> DataLoader[int]:
    return DataLoader(Counting(length), batch_size, shuffle=True, **options)


# The constructor


def test_the_data_loader_has_the_arguments_of_torch_in_order() -> None:
    ours = inspect.signature(DataLoader.__init__).parameters
    theirs = inspect.signature(torch_data.DataLoader.__init__).parameters
    assert list(ours)[: len(theirs)] == list(theirs)


def test_the_data_loader_gives_the_batches_of_torch() -> None:
    torch.manual_seed(0)
    expected = lists(torch_data.DataLoader(Counting(10), 3, True))
    torch.manual_seed(0)
    assert lists(DataLoader(Counting(10), 3, True)) == expected


# A seed


def test_the_order_of_a_seeded_loader_depends_only_on_seed_and_epoch() -> None:
    loader = shuffled().seeded(7)
    epochs = [lists(loader) for _ in range(3)]
    again = shuffled().seeded(7)
    again.set_epoch(2)
    torch.manual_seed(123)
    assert lists(again) == epochs[2] != epochs[1]


def test_seeding_a_loader_equals_constructing_it_with_the_seed() -> None:
    assert lists(shuffled().seeded(7)) == lists(shuffled(seed=7))


def test_a_seeded_loader_keeps_every_other_setting() -> None:
    loader = DataLoader(
        Counting(8),
        batch_size=3,
        shuffle=True,
        num_workers=1,
        collate_fn=list,
        pin_memory=False,
        drop_last=True,
        timeout=5,
        worker_init_fn=print,
        multiprocessing_context="spawn",
        prefetch_factor=3,
        persistent_workers=True,
        in_order=False,
        num_replicas=2,
        rank=1,
    )
    seeded = loader.seeded(1)
    names = (
        *("dataset", "batch_size", "num_workers", "collate_fn", "pin_memory", "drop_last", "timeout", "worker_init_fn"),
        *("multiprocessing_context", "prefetch_factor", "persistent_workers", "in_order", "num_replicas", "rank"),
    )
    assert {name: getattr(seeded, name) for name in names} == {name: getattr(loader, name) for name in names}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"shuffle": True, "seed": 3},
        {"shuffle": True, "generator": torch.Generator()},
        {"sampler": torch_data.RandomSampler(range(10), replacement=True)},
        {"sampler": torch_data.RandomSampler(range(10), num_samples=4)},
        {"batch_sampler": torch_data.BatchSampler(torch_data.RandomSampler(range(10)), 2, drop_last=False)},
    ],
    ids=lambda options: "-".join(options) or "in order",
)
def test_a_loader_with_a_custom_order_keeps_it(options: dict[str, Any]) -> None:
    loader = DataLoader(Counting(10), **options)
    assert loader.seeded(1) is loader


def test_seeding_a_seeded_loader_again_changes_nothing() -> None:
    loader = shuffled().seeded(1)
    assert loader.seeded(2) is loader


def test_a_loader_of_a_subclass_keeps_its_type() -> None:
    class Own(DataLoader[int]):
        pass

    loader = Own(Counting(3), shuffle=True)
    assert loader.seeded(1) is loader


def test_a_stream_needs_no_seed() -> None:
    loader = DataLoader(Stream(5))
    assert loader.seeded(1) is loader


# One pass


def test_a_loader_of_one_pass_ends() -> None:
    assert lists(DataLoader(Counting(5), 2).get_data_loader()) == [[0, 1], [2, 3], [4]]


def test_skipped_batches_are_left_out_of_the_first_pass_and_never_read() -> None:
    samples = Counting(6)
    loader = DataLoader(samples, 2).get_data_loader(skip=2)
    assert lists(loader) == [[4, 5]]
    assert samples.read == [4, 5]
    assert lists(loader) == [[0, 1], [2, 3], [4, 5]]


@given(length=st.integers(1, 12), batch_size=st.integers(1, 4), num_replicas=st.integers(1, 4))
def test_the_shards_of_a_pass_form_the_whole(length: int, batch_size: int, num_replicas: int) -> None:
    loader = shuffled(length, batch_size, seed=1)
    shares = [loader.get_data_loader(num_replicas=num_replicas, rank=rank) for rank in range(num_replicas)]
    assert sorted(batch for share in shares for batch in lists(share)) == sorted(
        lists(shuffled(length, batch_size, seed=1))
    )


def test_sharding_an_unseeded_order_is_rejected() -> None:
    sentence = "shuffle: processes that share the batches must agree on their order: give the loader a seed"
    for repeat in (False, True):
        with pytest.raises(DataError, match=sentence):
            shuffled().get_data_loader(repeat, num_replicas=2, rank=0)


# Endless passes


def test_a_repeating_loader_starts_each_epoch_in_a_new_order() -> None:
    loader = shuffled(seed=1)
    epochs = [lists(loader) for _ in range(3)]
    repeated = shuffled(seed=1).get_data_loader(repeat=True)
    assert len(repeated) == 4
    assert lists(repeated, 12) == [batch for epoch in epochs for batch in epoch]


@settings(max_examples=50)
@given(
    length=st.integers(1, 9),
    batch_size=st.integers(1, 3),
    num_replicas=st.integers(1, 4),
    skip=st.integers(0, 12),
)
def test_endless_shards_alternate_and_skip_their_batches(
    length: int, batch_size: int, num_replicas: int, skip: int
) -> None:
    whole = lists(shuffled(length, batch_size, seed=1).get_data_loader(repeat=True), (skip + 5) * num_replicas)
    for rank in range(num_replicas):
        share = shuffled(length, batch_size, seed=1).get_data_loader(True, skip, num_replicas, rank)
        assert lists(share, 5) == whole[rank::num_replicas][skip:]
        assert len(share) == len(range(rank, -(-length // batch_size), num_replicas))


def test_skipping_whole_epochs_reads_no_sample() -> None:
    samples = Counting(6)
    repeated = DataLoader(samples, 2, shuffle=True, seed=1).get_data_loader(repeat=True, skip=3000)
    assert len(lists(repeated, 1)[0]) == 2
    assert len(samples.read) == 2


@pytest.mark.parametrize("skip", [0, 1, 4, 5, 9])
def test_after_skipped_epochs_a_generator_is_advanced(skip: int) -> None:
    def repeated(skip: int) -> list[list[int]]:
        loader = shuffled(generator=torch.Generator().manual_seed(5))
        return lists(loader.get_data_loader(repeat=True, skip=skip), 12 - skip)

    assert repeated(skip) == repeated(0)[skip:]


def test_in_memory_data_repeats_in_the_same_order_as_any_other() -> None:
    in_memory = DataLoader(TensorDataset(torch.arange(10)), 3, shuffle=True, seed=1)
    batches = [batch.tolist() for (batch,) in islice(in_memory.get_data_loader(repeat=True, skip=2), 9)]
    assert batches == lists(shuffled(seed=1).get_data_loader(repeat=True, skip=2), 9)


def test_two_iterations_of_a_repeating_loader_are_equal() -> None:
    repeated = shuffled(seed=1).get_data_loader(repeat=True, skip=1)
    assert lists(repeated, 6) == lists(repeated, 6)


def test_a_stream_repeats_and_is_sharded_in_turn() -> None:
    loader = DataLoader(Stream(5), 2)
    assert lists(loader.get_data_loader(True, skip=1, num_replicas=2, rank=1), 3) == [[0, 1], [4], [2, 3]]


@pytest.mark.parametrize("samples", [Counting(0), Stream(0)])
def test_repeating_empty_data_raises_instead_of_looping(samples: Any) -> None:
    with pytest.raises(DataError, match="a loader without batches cannot be repeated"):
        next(iter(DataLoader(samples).get_data_loader(repeat=True)))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"skip": -1}, "skip: expected a number of batches that is not negative, got -1"),
        ({"num_replicas": 2, "rank": 2}, "rank: expected 0 <= rank < num_replicas = 2, got 2"),
    ],
)
@pytest.mark.parametrize("repeat", [True, False])
def test_a_shard_out_of_range_is_rejected(options: dict[str, int], sentence: str, repeat: bool) -> None:
    with pytest.raises(DataError, match=sentence):
        DataLoader(Counting(3)).get_data_loader(repeat, **options)


def test_any_loader_of_the_library_can_be_repeated() -> None:
    assert lists(EndlessLoader(data.DataLoader(Counting(2))), 3) == [[0], [1], [0]]


# ------------------------------------------------------------------ batches


class Movable:
    """An object that moves itself, as batches of other libraries do."""

    def __init__(self, device: Any = None) -> None:
        self.device = device

    def to(self, device: Any) -> Movable:
        return Movable(device)


def test_arrays_become_tensors_and_objects_with_to_are_moved(caplog: pytest.LogCaptureFixture) -> None:
    words = np.array(["a", "b"])
    values = {"x": np.arange(3), "pair": (torch.ones(2), [np.float32(2.0), True]), "it": Movable(), "words": words}
    moved = pytorch.to_device({**values, "text": ["a", None, []]}, torch.device("meta"))
    assert (moved["x"].device.type, moved["x"].dtype, moved["pair"][0].device.type) == ("meta", torch.int64, "meta")
    assert moved["pair"][1] == [np.float32(2.0), True]
    assert moved["it"].device == torch.device("meta")
    assert moved["text"] == ["a", None, []]
    assert moved["words"] is words
    assert caplog.messages == ["a ndarray in the data cannot be moved to the device and is left unchanged"]


def test_a_type_that_cannot_be_moved_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    known: set[type] = set()
    for _ in range(2):
        pytorch.to_device([object(), {1, 2}], "cpu", known)
    assert known == {object, set}
    assert len(caplog.messages) == 2


def test_a_module_in_the_data_is_logged_and_not_moved(caplog: pytest.LogCaptureFixture) -> None:
    module = torch.nn.Linear(2, 2)
    assert pytorch.to_device([module], "meta")[0].weight.device.type == "cpu"
    assert caplog.messages == ["a Linear in the data cannot be moved to the device and is left unchanged"]


def test_data_on_the_device_is_not_copied() -> None:
    batch = (torch.ones(2), {"y": torch.zeros(1)})
    assert pytorch.to_device(batch, "cpu") is batch


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: [x], lambda x: (x, x), lambda x: {"a": x}])
@pytest.mark.parametrize("kind", [torch.zeros, np.zeros])
def test_the_length_of_data_is_the_length_of_its_first_array(wrap: Any, kind: Any) -> None:
    assert pytorch.data_length(wrap(kind((4, 2)))) == 4


def test_a_trial_gets_arrays_as_tensors() -> None:
    seen: list[Any] = []

    class Arrays(Classifier):
        def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
            seen.append(type(batch["x"]))
            return super().train_batch((batch["x"], batch["y"]), epoch_idx, batch_idx)

    x, y = make_data(8).tensors
    trial, context = make(trial_class=Arrays)
    context.fit(trial, [{"x": x.numpy(), "y": y.numpy()}] * 2, max_length=pytorch.Batch(2), val_data=[(x, y)])
    assert seen == [torch.Tensor] * 2
