from __future__ import annotations

import pickle
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from dovetail.data import LeafSynthetic, digits
from dovetail.errors import ConfigError, DataError, UnknownNameError
from dovetail.federated.data import (
    Datasource,
    GeneratedData,
    Partition,
    PartitionedData,
    datasource,
    datasources,
    labels_of,
    leaf_synthetic,
)

X = torch.arange(20.0).unsqueeze(1)
Y = torch.arange(20) % 4
CUT = Partition.from_lists([range(10), range(10, 18), [18, 19], []])


class Squares(Dataset[tuple[int, int]]):
    """Samples that are made one by one."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> tuple[int, int]:
        return index * index, index % 4


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(3))


def there(data: Any | None) -> Any:
    assert data is not None
    return data


def make(client_id: int) -> tuple[Tensor, Tensor]:
    return torch.full((3, 2), float(client_id)), torch.zeros(3)


# ------------------------------------------------------------------ a dataset that is cut


@pytest.mark.parametrize("dataset", [(X, Y), (X.numpy(), Y.numpy()), TensorDataset(X, Y)])
def test_clients_get_tensors_if_the_data_is_in_memory(dataset: Any) -> None:
    data = PartitionedData(dataset, CUT)
    x, y = data.train_data(2)
    assert torch.equal(x, X[10:18])
    assert torch.equal(y, Y[10:18])
    assert [data.num_samples(client_id) for client_id in range(1, 5)] == [10, 8, 2, 0]
    assert data.num_clients == 4


def test_clients_get_subsets_of_other_datasets() -> None:
    part = PartitionedData(Squares(), CUT).train_data(3)
    assert isinstance(part, Subset)
    assert [part[0], part[1]] == [(324, 2), (361, 3)]


def test_test_data_belong_to_the_server() -> None:
    data = PartitionedData((X, Y), CUT, test=(X[:5], Y[:5]))
    x, y = there(data.central_test_data())
    assert (x.flatten().tolist(), y.tolist()) == ([0, 1, 2, 3, 4], [0, 1, 2, 3, 0])
    assert data.test_data(1) is None


def test_test_data_are_partitioned_as_configured() -> None:
    test_cut = Partition.from_lists([[4], [0, 1], [], [2]])
    data = PartitionedData((X, Y), CUT, test=(X[:5], Y[:5]), test_partition=test_cut)
    assert there(data.test_data(2))[1].tolist() == [0, 1]
    assert data.test_data(3) is None
    assert data.num_samples(1) == 10


def test_a_client_does_not_train_on_its_held_out_samples() -> None:
    data = PartitionedData((X, Y), CUT, held_out=0.25, seed=4)
    for client_id, (num_train, num_test) in {1: (8, 2), 2: (6, 2)}.items():
        train, test = data.train_data(client_id)[0], there(data.test_data(client_id))[0]
        assert (len(train), len(test), data.num_samples(client_id)) == (num_train, num_test, num_train)
        assert sorted(torch.cat([train, test]).flatten().tolist()) == CUT.of(client_id).tolist()
    other = PartitionedData((X, Y), CUT, held_out=0.25, seed=5)
    assert not torch.equal(data.train_data(1)[0], other.train_data(1)[0])


def test_a_client_keeps_at_least_one_training_sample() -> None:
    data = PartitionedData((X, Y), Partition.from_lists([[3], [4, 5]]), held_out=0.9)
    assert [data.num_samples(1), data.num_samples(2)] == [1, 1]
    assert data.test_data(1) is None
    assert len(there(data.test_data(2))[0]) == 1


def test_only_the_most_recent_clients_are_cached() -> None:
    data = PartitionedData((X, Y), CUT, keep=2)
    first, second = data.train_data(1), data.train_data(2)
    assert data.train_data(1) is first
    data.train_data(3)
    assert data.train_data(1) is first
    assert data.train_data(2) is not second


def test_the_client_cache_is_not_sent_to_workers() -> None:
    dataset = (torch.zeros(20, 1000), Y)
    data = PartitionedData(dataset, CUT)
    before = len(pickle.dumps(data))
    for client_id in range(1, 5):
        data.train_data(client_id)
    assert len(pickle.dumps(data)) == before
    assert torch.equal(pickle.loads(pickle.dumps(data)).train_data(2)[1], Y[10:18])


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"held_out": 1.0}, "held_out: expected a share"),
        ({"test_partition": CUT}, "test_partition: needs test data"),
        ({"test_partition": CUT, "test": (X, Y), "held_out": 0.5}, "test_partition: needs test data"),
        ({"test_partition": Partition.from_lists([[1]]), "test": (X, Y)}, "test_partition: expected 4 clients, got 1"),
        ({"test_partition": CUT, "test": (X[:5], Y[:5])}, "partition: expected samples from 0 to 4, got 19"),
    ],
)
def test_invalid_test_settings_are_rejected(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises((ConfigError, DataError), match=sentence):
        PartitionedData((X, Y), CUT, **options)


def test_a_partition_of_another_dataset_is_rejected() -> None:
    with pytest.raises(DataError, match="partition: expected samples from 0 to 9, got 19"):
        PartitionedData((X[:10], Y[:10]), CUT)
    with pytest.raises(DataError, match="partition: expected samples from 0 to 19, got -1"):
        PartitionedData((X, Y), Partition.from_lists([[-1]]))


@pytest.mark.parametrize("data", [Stream(), [(X, Y)]])
def test_data_without_indices_are_rejected(data: Any) -> None:
    with pytest.raises(DataError, match="dataset: expected samples that have indices"):
        PartitionedData(data, CUT)


def test_the_model_factory_is_called_for_every_new_model() -> None:
    data = PartitionedData((X, Y), CUT, model=lambda: nn.Linear(1, 4))
    assert data.default_model() is not data.default_model()
    with pytest.raises(ConfigError, match="PartitionedData proposes no model: give one"):
        PartitionedData((X, Y), CUT).default_model()


# ------------------------------------------------------------------ data that is made


def test_a_million_clients_are_pickled_in_a_few_bytes() -> None:
    data = GeneratedData(1_000_000, make)
    assert len(pickle.dumps(data)) < 500
    assert pickle.loads(pickle.dumps(data)).train_data(1_000_000)[0][0].tolist() == [1e6, 1e6]


def test_samples_are_counted_only_if_the_number_is_unknown() -> None:
    assert GeneratedData(5, make).num_samples(2) == 3
    assert GeneratedData(5, lambda client_id: 1 / 0, num_samples=lambda client_id: 10 * client_id).num_samples(2) == 20
    assert GeneratedData(5, lambda client_id: Squares()).num_samples(2) == 20


@pytest.mark.parametrize(
    "data",
    [[make(1), (torch.zeros(4, 2), torch.zeros(4))], DataLoader(TensorDataset(X[:7]), batch_size=3), torch.zeros(7, 2)],
    ids=["list", "loader", "tensor"],
)
def test_samples_are_counted_for_any_form_of_data(data: Any) -> None:
    assert GeneratedData(1, lambda client_id: data).num_samples(1) == 7


def test_the_samples_of_a_stream_are_counted_by_reading_it() -> None:
    assert GeneratedData(1, lambda client_id: Stream()).num_samples(1) == 3


def test_generated_sources_also_generate_test_data() -> None:
    assert GeneratedData(5, make).test_data(1) is None
    assert GeneratedData(5, make).central_test_data() is None
    data = GeneratedData(5, make, make_test=make, make_central_test=lambda: make(9))
    assert there(data.test_data(4))[0][0, 0] == 4
    assert there(data.central_test_data())[0][0, 0] == 9


@pytest.mark.parametrize("client_id", [0, 6])
def test_a_generated_source_rejects_client_ids_above_its_number(client_id: int) -> None:
    with pytest.raises(ConfigError, match=f"client {client_id}: the ids of these data go from 1 to 5"):
        GeneratedData(5, make).train_data(client_id)


def test_a_federation_without_clients_is_rejected() -> None:
    with pytest.raises(ConfigError, match="num_clients: expected 1 or more, got 0"):
        GeneratedData(0, make)


# ------------------------------------------------------------------ labels


class Vision(Dataset[int]):
    targets = [3, 1, 2]  # noqa: RUF012 - as torchvision has it


@pytest.mark.parametrize(
    ("dataset", "labels"),
    [
        ((X, Y), Y.tolist()),
        (TensorDataset(X, Y), Y.tolist()),
        (Squares(), Y.tolist()),
        (Vision(), [3, 1, 2]),
        (Subset(Vision(), [2, 0]), [2, 3]),
        (Subset(TensorDataset(X, Y), [5, 6]), [1, 2]),
    ],
)
def test_labels_of_a_dataset_are_detected(dataset: Any, labels: list[int]) -> None:
    assert labels_of(dataset).tolist() == labels


# ------------------------------------------------------------------ names


def test_digits_split_over_clients_contain_all_digits() -> None:
    data = datasource("digits", 10, sampler="noniid", concentration=0.3, seed=1)
    parts = [data.train_data(client_id) for client_id in range(1, 11)]
    assert sum(len(y) for _, y in parts) == len(digits((0.8, 0.2))[0])
    assert sum(data.num_samples(client_id) for client_id in range(1, 11)) == 1438
    assert data.default_model()(parts[0][0]).shape == (len(parts[0][1]), 10)
    test = data.central_test_data()
    assert test is not None
    assert len(test[0]) == 359


def test_another_seed_changes_the_partition_but_not_the_test_data() -> None:
    first, other = (datasource("digits", 10, seed=seed) for seed in (1, 2))
    assert not torch.equal(first.train_data(1)[0], other.train_data(1)[0])
    assert torch.equal(there(first.central_test_data())[0], there(other.central_test_data())[0])


def test_clients_of_a_named_source_may_have_test_data() -> None:
    held = datasource("digits", 10, held_out=0.1)
    assert len(there(held.test_data(1))[1]) == 14
    dealt = datasource("digits", 10, testset_sampler="iid", testset_size=100)
    assert [len(there(dealt.test_data(client_id))[1]) for client_id in (1, 10)] == [10, 10]
    assert len(there(dealt.central_test_data())[1]) == 100


@pytest.mark.parametrize("name", ["fashion_mnist", "FashionMNIST"])
def test_fashion_mnist_can_be_split_over_clients(name: str, tmp_path: Path) -> None:
    for part in ("train", "t10k"):
        images = b"\0\0\x08\x03" + struct.pack(">3I", 30, 4, 4) + bytes(30 * 16)
        (tmp_path / f"{part}-images-idx3-ubyte").write_bytes(images)
        (tmp_path / f"{part}-labels-idx1-ubyte").write_bytes(
            b"\0\0\x08\x01" + struct.pack(">I", 30) + bytes([4, 5] * 15)
        )
    data = datasource(name, 3, sampler="orthogonal", num_groups=2, folder=tmp_path)
    assert [set(data.train_data(client_id)[1].tolist()) for client_id in (1, 2, 3)] == [{4}, {5}, {4}]
    assert data.default_model()(data.train_data(2)[0]).shape == (15, 10)


def test_synthetic_data_follow_the_published_recipe() -> None:
    data, recipe = datasource("synthetic", 30, alpha=0.5, beta=0.5, seed=2), LeafSynthetic(0.5, 0.5, 2)
    assert torch.equal(data.train_data(30)[0], recipe.train(30)[0])
    assert torch.equal(there(data.test_data(30))[1], recipe.test(30)[1])
    assert data.num_samples(30) == recipe.num_train(30)
    assert data.default_model()(data.train_data(30)[0]).shape == (data.num_samples(30), 10)


def test_the_server_tests_on_the_test_data_of_the_first_clients() -> None:
    recipe = LeafSynthetic()
    test = leaf_synthetic(num_clients=1_000_000, num_central=3).central_test_data()
    assert test is not None
    assert torch.equal(test[1], torch.cat([recipe.test(client_id)[1] for client_id in (1, 2, 3)]))


def test_a_source_of_a_million_synthetic_clients_is_small() -> None:
    data = datasource("synthetic", 1_000_000)
    assert len(pickle.dumps(data)) < 1000
    again = pickle.loads(pickle.dumps(data))
    assert torch.equal(again.train_data(999_999)[0], data.train_data(999_999)[0])


def test_user_defined_data_can_be_registered() -> None:
    if "test: ours" not in datasources.names():
        datasources.register("test: ours", lambda num_clients, **options: GeneratedData(num_clients, make))
    assert isinstance(datasource("test: ours", 4), Datasource)


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("digts", {}, "unknown datasource 'digts': did you mean 'digits'"),
        ("digits", {"sampler": "idi"}, "unknown partition 'idi': did you mean 'iid'"),
        ("digits", {"alhpa": 1, "sampler": "dirichlet"}, "unknown option of the partition 'dirichlet' 'alhpa'"),
        ("digits", {"testset_size": 400}, "testset_size: expected 1 to 359, got 400"),
        ("synthetic", {"sampler": "iid"}, "sampler: synthetic data is created per client"),
        ("synthetic", {"alhpa": 1}, "unknown option of synthetic data 'alhpa': did you mean 'alpha'"),
    ],
)
def test_invalid_source_arguments_raise_one_sentence_errors(name: str, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises((ConfigError, UnknownNameError), match=sentence):
        datasource(name, 10, **options)
