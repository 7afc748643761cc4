from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.errors import ConfigError, DataError, UnknownNameError
from dovetail.federated.data.partition import (
    Partition,
    all_inclusive,
    dirichlet,
    distribution,
    iid,
    label_quantity,
    make_partition,
    mixed,
    mixed_label_quantity,
    orthogonal,
    partitions,
    plot,
    sample_quantity,
    shards,
)

# Ten labels of a hundred samples, not in order.
LABELS = torch.arange(1000) * 7 % 10


# What each needs besides labels and clients.
WAYS: dict[str, dict[str, Any]] = {
    "iid": {},
    "dirichlet": {"alpha": 0.3},
    "shards": {},
    "label_quantity": {"classes_per_client": 2},
    "sample_quantity": {"size_alpha": 0.3},
    "mixed": {"non_iid_clients": 1, "alpha": 0.3},
    "orthogonal": {},
    "distribution": {"alpha": 0.3, "size_alpha": 0.3},
    "mixed_label_quantity": {"anchor_classes": [0], "num_anchored": 1, "kept_anchors": 1},
}


def same(left: Partition, right: Partition) -> bool:
    return len(left) == len(right) and all(map(torch.equal, left, right))


def rows(partition: Partition) -> list[list[int]]:
    return [samples.tolist() for samples in partition]


@pytest.mark.parametrize("name", WAYS)
@settings(max_examples=40)
@given(
    num_labels=st.integers(2, 6),
    num_samples=st.integers(60, 150),
    num_clients=st.integers(1, 6),
    seed=st.integers(0, 2**40),
)
def test_every_sample_belongs_to_exactly_one_client(
    name: str, num_labels: int, num_samples: int, num_clients: int, seed: int
) -> None:
    labels = np.arange(num_samples) % num_labels
    partition = make_partition(name, labels, num_clients, seed=seed, **WAYS[name])
    dealt = sorted(partition.indices.tolist())
    assert len(set(dealt)) == len(dealt)
    if "label_quantity" not in name or num_clients > num_labels:
        # With few clients and few labels per client, some labels have no client.
        assert dealt == list(range(num_samples))
    assert len(partition) == num_clients
    assert partition.sizes.tolist() == [len(samples) for samples in partition]
    assert int(partition.sizes.min()) >= 1


@pytest.mark.parametrize("name", WAYS)
def test_a_partition_is_a_function_of_its_seed(name: str) -> None:
    first, again, other = (make_partition(name, LABELS, 24, seed=seed, **WAYS[name]) for seed in (5, 5, 6))
    assert same(first, again)
    assert not same(first, other)


@pytest.mark.parametrize("name", WAYS)
def test_tensors_arrays_lists_and_names_are_the_same_labels(name: str) -> None:
    options = dict(WAYS[name])
    expected = make_partition(name, LABELS, 8, **options)
    for labels in (LABELS.numpy(), LABELS.tolist(), LABELS.to(torch.uint8)):
        assert same(make_partition(name, labels, 8, **options), expected)
    if "anchor_classes" in options:
        options["anchor_classes"] = ["0"]
    assert same(make_partition(name, [str(label) for label in LABELS.tolist()], 8, **options), expected)


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "dirichlet" else pytest.mark.torture) for name in WAYS]
)
def test_a_million_samples_can_be_split_over_a_hundred_thousand_clients(name: str) -> None:
    labels = np.arange(1_000_000) % 10
    partition = make_partition(name, labels, 100_000, **WAYS[name])
    assert int(partition.sizes.min()) >= 1
    assert len(np.unique(partition.indices.numpy())) == len(partition.indices)


# ------------------------------------------------------------------ the value


def test_client_ids_count_from_one() -> None:
    partition = Partition.from_lists([[4, 2], [], [7]])
    assert [partition.of(client_id).tolist() for client_id in (1, 2, 3)] == [[4, 2], [], [7]]
    assert rows(partition) == [[4, 2], [], [7]]
    for client_id in (0, 4, -1):
        with pytest.raises(ConfigError, match=f"client {client_id}: the ids of this partition go from 1 to 3"):
            partition.of(client_id)


def test_changing_returned_indices_does_not_change_the_partition() -> None:
    partition = Partition.from_lists([[1, 2]])
    partition.of(1).zero_()
    assert partition.of(1).tolist() == [1, 2]


def test_a_partition_without_clients_is_rejected() -> None:
    with pytest.raises(ConfigError, match="at least one client"):
        Partition.from_lists([])


def test_the_partition_table_counts_labels() -> None:
    partition = Partition.from_lists([[0, 1, 2], [3], [], [3, 4]])
    assert partition.table([5, 5, 9, 9, 7]).tolist() == [[2, 0, 1], [0, 0, 1], [0, 0, 0], [0, 1, 1]]


def test_the_table_of_overlapping_partitions_counts_samples_per_client() -> None:
    assert all_inclusive(LABELS, 3).table(LABELS).tolist() == [[100] * 10] * 3


# ------------------------------------------------------------------ the ways to cut


def test_iid_sizes_differ_by_one_at_most() -> None:
    assert sorted(iid(11, 4).sizes.tolist()) == [2, 3, 3, 3]


def test_iid_gives_each_client_the_requested_size() -> None:
    partition = iid(100, 4, partition_size=7)
    assert partition.sizes.tolist() == [7] * 4
    assert len(set(partition.indices.tolist())) == 28


def test_iid_clients_may_draw_from_the_whole_dataset() -> None:
    partition = iid(10, 5, partition_size=8, overlap=True)
    assert [len(set(row)) for row in rows(partition)] == [8] * 5
    assert len({tuple(row) for row in rows(partition)}) > 1


def test_shares_of_a_label_have_the_spread_of_the_dirichlet_distribution() -> None:
    labels = np.repeat(np.arange(400), 1000)
    num_clients, alpha = 5, 0.5
    shares = dirichlet(labels, num_clients, alpha=alpha, min_samples=0).table(labels) / 1000
    second_moment = (alpha + 1) / (num_clients * (num_clients * alpha + 1))
    assert shares.mean().item() == pytest.approx(1 / num_clients, abs=1e-6)
    assert shares.square().mean().item() == pytest.approx(second_moment, rel=0.05)


def test_a_large_alpha_gives_similar_clients() -> None:
    table = dirichlet(LABELS, 5, alpha=1e12).table(LABELS)
    assert int((table - 20).abs().max()) <= 1


def test_a_small_alpha_gives_each_label_to_one_client() -> None:
    table = dirichlet(LABELS, 5, alpha=1e-9, min_samples=0).table(LABELS)
    assert (table == 100).sum(dim=0).tolist() == [1] * 10


def test_a_single_client_has_all_samples() -> None:
    assert dirichlet(LABELS, 1, alpha=0.1).of(1).tolist() == list(range(1000))


def test_the_largest_clients_give_samples_to_the_smallest() -> None:
    sizes = sorted(sample_quantity(100, 10, size_alpha=1e-9, min_samples=3).sizes.tolist())
    assert sizes == [3] * 9 + [73]


def test_only_the_largest_clients_give_samples() -> None:
    plain = dirichlet(LABELS, 20, alpha=0.05, min_samples=0, seed=3).sizes
    repaired = dirichlet(LABELS, 20, alpha=0.05, min_samples=20, seed=3).sizes
    lacking = plain < 20
    assert repaired[lacking].tolist() == [20] * int(lacking.sum())
    level = int(repaired.max())
    # Clients below the remaining level of the largest client keep their samples.
    untouched = ~lacking & (plain < level)
    assert int(lacking.sum()) > 0
    assert torch.equal(repaired[untouched], plain[untouched])


@settings(max_examples=40)
@given(min_samples=st.integers(0, 12), seed=st.integers(0, 1000))
def test_every_client_has_at_least_the_minimum_size(min_samples: int, seed: int) -> None:
    for partition in (
        dirichlet(LABELS[:120], 10, alpha=0.05, min_samples=min_samples, seed=seed),
        sample_quantity(120, 10, size_alpha=0.05, min_samples=min_samples, seed=seed),
        distribution(LABELS[:120], 10, size_alpha=0.05, min_samples=min_samples, seed=seed),
    ):
        assert int(partition.sizes.min()) >= min_samples
        assert int(partition.sizes.sum()) == 120


def test_dirichlet_clients_of_equal_size_have_different_label_mixes() -> None:
    partition = dirichlet(LABELS, 10, alpha=0.1, partition_size=50)
    assert partition.sizes.tolist() == [50] * 10
    assert len(set(partition.indices.tolist())) == 500
    assert (partition.table(LABELS).max(dim=1).values / 50).mean() > 0.4


@pytest.mark.parametrize("seed", [0, 1])
def test_overlapping_clients_differ_for_every_seed(seed: int) -> None:
    # Plato seeds a client with seed times id: of seed 0, or of id 0, there is only one distribution.
    table = dirichlet(LABELS, 6, alpha=0.2, partition_size=60, overlap=True, seed=seed).table(LABELS)
    assert len({tuple(row) for row in table.tolist()}) == 6


def test_overlapping_clients_have_no_sample_twice() -> None:
    partition = make_partition("noniid", LABELS, 30, concentration=0.5, partition_size=200, overlap=True)
    assert [len(set(row)) for row in rows(partition)] == [200] * 30
    assert len(set(partition.indices.tolist())) < 30 * 200


def test_overlapping_clients_draw_labels_by_weight() -> None:
    # With nearly all weight on one label, a client has all of that before it has any other.
    table = dirichlet(LABELS, 20, alpha=1e-6, partition_size=100, overlap=True).table(LABELS)
    assert table.max(dim=1).values.tolist() == [100] * 20


def test_shards_are_contiguous_in_sorted_labels() -> None:
    partition = shards(LABELS, 10, shards_per_client=2)
    table = partition.table(LABELS)
    # Twenty shards of fifty samples: half a label each.
    assert set(table.flatten().tolist()) <= {0, 50, 100}
    assert table.sum(dim=1).tolist() == [100] * 10


def test_shards_leave_no_sample_unassigned() -> None:
    partition = shards(LABELS[:103], 5, shards_per_client=2)
    assert int(partition.sizes.sum()) == 103
    assert int(partition.sizes.max() - partition.sizes.min()) <= 2


def test_each_client_has_k_labels_and_each_label_has_a_client() -> None:
    for k in range(1, 11):
        table = label_quantity(LABELS, 15, classes_per_client=k, seed=k).table(LABELS)
        assert (table > 0).sum(dim=1).tolist() == [k] * 15
        assert table.sum(dim=0).tolist() == [100] * 10
        held = [column[column > 0] for column in table.T]
        assert max(int(column.max() - column.min()) for column in held) <= 1


def test_a_label_with_too_few_samples_is_named_in_the_error() -> None:
    with pytest.raises(DataError, match="label 'rare' has 1 samples for 4 clients"):
        label_quantity(["rare"] + ["common"] * 20, 4, classes_per_client=2)


def test_anchored_clients_share_their_labels() -> None:
    cut = mixed_label_quantity(LABELS, 10, anchor_classes=[2, 3, 9], num_anchored=4, kept_anchors=1)
    held = [tuple(row.nonzero().flatten().tolist()) for row in cut.table(LABELS)]
    assert held.count((2, 3, 9)) == 4
    others = [row for row in held if row != (2, 3, 9)]
    assert [len(row) for row in others] == [3] * 6
    assert not {3, 9} & {label for row in others for label in row}


def test_sample_quantity_keeps_the_label_mix() -> None:
    labels = np.arange(100_000) % 2
    partition = sample_quantity(labels, 5, size_alpha=1.0, min_samples=5000)
    table = partition.table(labels)
    assert (table[:, 0] / table.sum(dim=1) - 0.5).abs().max() < 0.03
    assert partition.sizes.max() > 1.5 * partition.sizes.min()


def test_mixed_has_iid_and_skewed_clients() -> None:
    labels = np.arange(100_000) % 10
    partition = mixed(labels, 10, non_iid_clients=[2, 5, 7], alpha=0.05)
    table = partition.table(labels)
    skewed = torch.tensor([1, 4, 6])
    fair = torch.tensor([0, 2, 3, 5, 7, 8, 9])
    assert (table[fair] - 1000).abs().max() < 120
    # Each label of the skewed clients belongs almost entirely to one of them.
    assert (table[skewed].max(dim=0).values / table[skewed].sum(dim=0)).mean() > 0.8
    assert partition.sizes[fair].tolist() == [10_000] * 7


def test_mixed_accepts_the_number_of_skewed_clients() -> None:
    assert same(mixed(LABELS, 6, non_iid_clients=2), mixed(LABELS, 6, non_iid_clients=[1, 2]))


def test_orthogonal_clients_have_no_label_in_common() -> None:
    table = orthogonal(LABELS, 5).table(LABELS)
    assert table.nonzero()[:, 1].tolist() == list(range(10))
    assert table.sum(dim=1).tolist() == [200] * 5


def test_orthogonal_groups_share_their_labels_among_their_clients() -> None:
    table = orthogonal(LABELS, 4, num_groups=2).table(LABELS)
    assert (table > 0).tolist() == [[True] * 5 + [False] * 5, [False] * 5 + [True] * 5] * 2
    assert table.sum(dim=1).tolist() == [250] * 4


def test_orthogonal_groups_may_be_named() -> None:
    table = orthogonal(LABELS, 2, class_groups=[[0, 9], [4]]).table(LABELS)
    assert table.nonzero().tolist() == [[0, 0], [0, 9], [1, 4]]
    assert table.sum(dim=1).tolist() == [200, 100]


def test_all_inclusive_gives_all_samples_to_every_client() -> None:
    assert rows(all_inclusive(4, 3)) == [[0, 1, 2, 3]] * 3


def test_distribution_skews_sizes_and_labels() -> None:
    sharp = distribution(LABELS, 10, alpha=0.05, size_alpha=1e9)
    assert set(sharp.sizes.tolist()) <= {99, 100, 101}
    assert (sharp.table(LABELS).max(dim=1).values / sharp.sizes).mean() > 0.4
    sized = distribution(LABELS, 10, alpha=1e9, size_alpha=0.3)
    assert sized.sizes.float().std() > 50
    large = sized.sizes > 100
    shares = sized.table(LABELS)[large] / sized.sizes[large].unsqueeze(1)
    assert shares.max() < 0.3


# ------------------------------------------------------------------ names and mistakes


def test_the_partition_names_of_plato_are_accepted() -> None:
    names = "iid noniid mixed orthogonal all_inclusive distribution_noniid label_quantity_noniid"
    names += " mixed_label_quantity_noniid sample_quantity_noniid"
    assert set(names.split()) <= set(partitions.names())


def test_the_option_names_of_plato_are_accepted() -> None:
    ours = distribution(LABELS, 5, alpha=0.3, size_alpha=0.4, min_samples=7, seed=2)
    theirs = make_partition(
        "distribution_noniid",
        LABELS,
        5,
        label_concentration=0.3,
        client_quantity_concentration=0.4,
        min_partition_size=7,
        random_seed=2,
    )
    assert same(ours, theirs)


def test_a_user_defined_partition_can_be_registered() -> None:
    registered = "test: first come"
    if registered not in partitions.names():

        @partitions.register(registered)
        def first_come(labels: Any, num_clients: int, *, seed: int = 0) -> Partition:
            return Partition.from_lists([range(len(labels))] + [[]] * (num_clients - 1))

    assert make_partition(registered, LABELS, 3).sizes.tolist() == [1000, 0, 0]


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("dirichlt", {}, "unknown partition 'dirichlt': did you mean 'dirichlet'"),
        ("dirichlet", {"alhpa": 1}, "unknown option of the partition 'dirichlet' 'alhpa': did you mean 'alpha'"),
        ("mixed", {}, "partition 'mixed': needs the option non_iid_clients"),
        ("dirichlet", {"alpha": 1, "concentration": 1}, "alpha is given twice, once as concentration"),
        ("dirichlet", {"alpha": 0}, "alpha: expected a number above 0, got 0"),
        ("dirichlet", {"alpha": float("nan")}, "alpha: expected a number above 0, got nan"),
        ("sample_quantity", {"size_alpha": -1}, "size_alpha: expected a number above 0, got -1"),
        ("dirichlet", {"overlap": True}, "overlap: .* need a partition_size"),
        ("dirichlet", {"partition_size": 0}, "partition_size: expected 1 or more, got 0"),
        ("dirichlet", {"partition_size": 1001, "overlap": True}, "need 1001, and the dataset has 1000"),
        ("iid", {"partition_size": 300}, "4 clients with 300 or more samples each need 1200, and the dataset has 1000"),
        ("dirichlet", {"min_samples": 251}, "4 clients with 251 or more samples each need 1004"),
        ("dirichlet", {"min_samples": -1}, "expected 0 or more, got -1"),
        ("shards", {"shards_per_client": 0}, "shards_per_client: expected 1 or more, got 0"),
        ("label_quantity", {"classes_per_client": 11}, "classes_per_client: expected 1 to 10, .* got 11"),
        ("mixed", {"non_iid_clients": [5]}, r"non_iid_clients: expected ids from 1 to 4 or a number, got \[5\]"),
        ("mixed", {"non_iid_clients": -1}, "non_iid_clients: .* got -1"),
        ("orthogonal", {"num_groups": 5}, "num_groups: expected 1 to 4, .* got 5"),
        ("orthogonal", {"class_groups": [[0], [0]]}, "class_groups: expected every label at most once, got 0 twice"),
        ("orthogonal", {"class_groups": [[77]]}, "class_groups: the dataset has no label 77; it has 0, 1, 2"),
        (
            "mixed_label_quantity",
            {"anchor_classes": [1], "num_anchored": 5},
            "num_anchored: expected 0 to 4, .* got 5",
        ),
        (
            "mixed_label_quantity",
            {"anchor_classes": [], "num_anchored": 4},
            r"anchor_classes: expected one label or more, each once, got \[\]",
        ),
        (
            "mixed_label_quantity",
            {"anchor_classes": [1, 1], "num_anchored": 1},
            r"anchor_classes: expected one label or more, each once, got \[1, 1\]",
        ),
        (
            "mixed_label_quantity",
            {"anchor_classes": range(6), "num_anchored": 1},
            "anchor_classes: expected at most 4, as many as there are labels for the other clients, got 6",
        ),
        ("iid", {"seed": -1}, "seed: expected 0 or more, got -1"),
    ],
)
def test_invalid_partition_arguments_raise_one_sentence_errors(
    name: str, options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises((ConfigError, DataError, UnknownNameError), match=sentence) as caught:
        make_partition(name, LABELS, 4, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", WAYS)
def test_more_clients_than_samples_are_rejected(name: str) -> None:
    with pytest.raises(DataError, match=r"11 clients with . or more samples each need"):
        make_partition(name, LABELS[:10], 11, **WAYS[name])
    with pytest.raises(ConfigError, match="num_clients: expected 1 or more, got 0"):
        make_partition(name, LABELS, 0, **WAYS[name])


@pytest.mark.parametrize("labels", [torch.zeros(4, 2, dtype=torch.int64), torch.zeros(4), []])
def test_invalid_labels_are_rejected(labels: Any) -> None:
    with pytest.raises(DataError, match="labels: expected"):
        dirichlet(labels, 2)


@pytest.mark.parametrize("samples", [[[0, 1]], [0.5, 1.0], [True, False, True]])
def test_client_indices_are_a_one_dimensional_array(samples: Any) -> None:
    with pytest.raises(DataError, match="client 2: expected a one-dimensional array of sample indices, got shape"):
        Partition.from_lists([[0, 1], samples])


@pytest.mark.parametrize("cut", [iid, sample_quantity, all_inclusive])
def test_a_dataset_without_samples_is_rejected(cut: Any) -> None:
    for count in (0, -1):
        with pytest.raises(DataError, match=f"labels: expected at least one sample, got {count}"):
            cut(count, 2)


def test_labels_of_another_length_are_rejected_by_the_table() -> None:
    with pytest.raises(DataError, match="labels: expected the labels of the whole dataset, at least 10, got 9"):
        iid(10, 2).table([0] * 9)


# ------------------------------------------------------------------ the picture


def test_the_bars_of_the_plot_equal_the_table(tmp_path: Path) -> None:
    partition = dirichlet(LABELS, 6, alpha=0.3)
    figure = plot(partition, LABELS, tmp_path / "new" / "bars.png")
    widths = [[bar.get_width() for bar in container] for container in figure.axes[0].containers]
    assert widths == partition.table(LABELS).T.tolist()
    assert (tmp_path / "new" / "bars.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_many_clients_are_plotted_as_rows_of_shares() -> None:
    partition = shards(LABELS, 100)
    image = plot(partition, LABELS).axes[0].images[0].get_array()
    assert np.array_equal(np.asarray(image), partition.table(LABELS).numpy() / 10)


def test_only_a_sample_of_very_many_clients_is_plotted() -> None:
    axes = plot(iid(LABELS, 1000), LABELS).axes[0]
    assert (len(axes.images[0].get_array()), axes.get_ylabel()) == (500, "client, one in 2")
