from __future__ import annotations

import gzip
import struct
from pathlib import Path

import pytest
import torch

from dovetail.data import LeafSynthetic, digits, fashion_mnist
from dovetail.errors import ConfigError, DataError


def test_digits_are_images_in_0_to_1_with_integer_labels() -> None:
    images, labels = digits((1.0,))[0].tensors
    assert (images.shape, images.dtype, labels.dtype) == ((1797, 1, 8, 8), torch.float32, torch.int64)
    assert (images.min().item(), images.max().item()) == (0, 1)


def test_the_parts_of_digits_are_disjoint_and_complete() -> None:
    rows = [image.flatten().tolist() for part in digits() for image in part.tensors[0]]
    whole = [image.flatten().tolist() for image in digits((1.0,))[0].tensors[0]]
    assert sorted(rows) == sorted(whole)


def test_every_part_of_digits_has_the_same_label_mix() -> None:
    train, _, test = digits((0.5, 0.25, 0.25))
    counts = [part.tensors[1].bincount(minlength=10) for part in (train, test)]
    assert (counts[0] - 2 * counts[1]).abs().max() <= 2


def test_the_seed_determines_the_parts_of_digits() -> None:
    first, again, other = digits(seed=1), digits(seed=1), digits(seed=2)
    assert torch.equal(first[0].tensors[0], again[0].tensors[0])
    assert not torch.equal(first[0].tensors[0], other[0].tensors[0])


@pytest.mark.parametrize("split", [(), (0.7, 0.4), (-0.1, 0.5)])
def test_invalid_shares_are_rejected(split: tuple[float, ...]) -> None:
    with pytest.raises(DataError, match="split"):
        digits(split)


# ------------------------------------------------------------------ Fashion-MNIST

DEBIAN = Path("/usr/share/datasets/fashion-mnist")


def write_images(folder: Path, *, suffix: str = "", labels: bytes = b"\x03\x09", part: str = "") -> None:
    """Two images of two by two pixels for training, and the same for tests."""
    for name in (part,) if part else ("train", "t10k"):
        images = b"\0\0\x08\x03" + struct.pack(">3I", 2, 2, 2) + bytes([0, 51, 102, 153, 204, 255, 0, 0])
        content = {"images-idx3": images, "labels-idx1": b"\0\0\x08\x01" + struct.pack(">I", len(labels)) + labels}
        for kind, data in content.items():
            path = folder / f"{name}-{kind}-ubyte{suffix}"
            path.write_bytes(gzip.compress(data) if suffix else data)


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_fashion_mnist_is_read_from_idx_files(suffix: str, tmp_path: Path) -> None:
    write_images(tmp_path, suffix=suffix)
    for part in fashion_mnist(tmp_path):
        images, labels = part.tensors
        assert (images.shape, images.dtype, labels.dtype) == ((2, 1, 2, 2), torch.float32, torch.int64)
        assert torch.equal(images[0, 0], torch.tensor([[0.0, 0.2], [0.4, 0.6]]))
        assert labels.tolist() == [3, 9]


def test_the_folder_may_come_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_images(tmp_path)
    monkeypatch.setenv("DOVETAIL_FASHION_MNIST", str(tmp_path))
    assert len(fashion_mnist()[0]) == 2


def test_a_missing_file_names_the_package_to_install(tmp_path: Path) -> None:
    write_images(tmp_path, part="train")
    with pytest.raises(DataError, match=r"has no t10k-images.* apt-get install dataset-fashion-mnist"):
        fashion_mnist(tmp_path)


@pytest.mark.parametrize(
    ("labels", "sentence"),
    [
        (b"\1\2\3", r"expected one byte for each of 2 images, got uint8 of shape \(3,\)"),
        (b"\1\x0a", "expected labels from 0 to 9, got 10"),
    ],
)
def test_labels_that_do_not_fit_the_images_are_rejected(labels: bytes, sentence: str, tmp_path: Path) -> None:
    write_images(tmp_path, labels=labels)
    with pytest.raises(DataError, match=sentence):
        fashion_mnist(tmp_path)


def test_images_that_are_labels_are_rejected(tmp_path: Path) -> None:
    write_images(tmp_path)
    (tmp_path / "train-images-idx3-ubyte").write_bytes((tmp_path / "train-labels-idx1-ubyte").read_bytes())
    with pytest.raises(DataError, match="expected bytes in three dimensions"):
        fashion_mnist(tmp_path)


@pytest.mark.skipif(
    not DEBIAN.is_dir(), reason="FASHION-MNIST IS MISSING, SO IT IS NOT TESTED: apt-get install dataset-fashion-mnist"
)
def test_the_fashion_mnist_package_of_debian_is_complete() -> None:
    train, test = fashion_mnist(DEBIAN)
    assert train.tensors[0].shape == (60_000, 1, 28, 28)
    assert train.tensors[1].bincount().tolist() == [6000] * 10
    assert test.tensors[1].bincount().tolist() == [1000] * 10
    # The first labels, and the mean of all pixels, as its authors and many after them give it.
    assert train.tensors[1][:5].tolist() == [9, 0, 0, 3, 0]
    assert train.tensors[0].mean(dtype=torch.float64).item() == pytest.approx(0.2860, abs=1e-4)


# ------------------------------------------------------------------ Synthetic(α, β)


def test_synthetic_labels_follow_the_model_of_the_client() -> None:
    data = LeafSynthetic(1, 1, seed=3)
    for client_id in (1, 2, 50):
        weight, bias = data.model(client_id)
        for x, y in (data.train(client_id), data.test(client_id)):
            # Inputs are rounded to single precision after their labels are known.
            agree = (x.double() @ weight + bias).argmax(dim=1) == y
            assert agree.double().mean() > 0.999


def test_synthetic_data_have_the_shape_of_the_paper() -> None:
    data = LeafSynthetic()
    x, y = data.train(1)
    assert (x.shape[1], x.dtype, y.dtype) == (60, torch.float32, torch.int64)
    assert 0 <= int(y.min()) <= int(y.max()) <= 9


def test_one_in_five_synthetic_samples_is_for_tests() -> None:
    data = LeafSynthetic()
    for client_id in range(1, 6):
        train, test = len(data.train(client_id)[1]), len(data.test(client_id)[1])
        assert train + test == data.num_samples(client_id)
        assert train == data.num_train(client_id)
        assert test == round(0.2 * (train + test))


def test_synthetic_inputs_have_the_variances_of_the_paper() -> None:
    data = LeafSynthetic(min_samples=50_000, log_size=(0.0, 0.0))
    x, _ = data.train(1)
    expected = torch.arange(1, 61) ** -1.2
    assert torch.allclose(x.var(dim=0) / expected, torch.ones(60), atol=0.05)


def test_synthetic_sizes_are_fifty_plus_log_normal() -> None:
    data = LeafSynthetic()
    sizes = torch.tensor([data.num_samples(client_id) for client_id in range(1, 4001)], dtype=torch.float64)
    assert sizes.min() >= 50
    # The median of the log-normal part is e^4, and 84 % of it is below e^6.
    assert (sizes - 50).median().item() == pytest.approx(torch.e**4, rel=0.1)
    assert ((sizes - 50) < torch.e**6).double().mean().item() == pytest.approx(0.8413, abs=0.02)


@pytest.mark.parametrize("spread", [0.0, 0.5, 2.0])
def test_alpha_and_beta_control_the_spread_between_clients(spread: float) -> None:
    data = LeafSynthetic(alpha=spread, beta=spread, min_samples=4, log_size=(0.0, 0.0))
    models = torch.stack([data.model(client_id)[0].mean() for client_id in range(1, 1001)])
    inputs = torch.stack([data.train(client_id)[0].mean() for client_id in range(1, 1001)])
    # The mean of 600 weights, and of 60 input means, adds its own spread.
    assert models.std().item() == pytest.approx((spread**2 + 1 / 600) ** 0.5, rel=0.08)
    assert inputs.std().item() == pytest.approx((spread**2 + 1 / 60) ** 0.5, rel=0.08)


def test_iid_clients_have_one_model_and_inputs_around_zero() -> None:
    data = LeafSynthetic(iid=True, min_samples=20_000, log_size=(0.0, 0.0))
    assert torch.equal(data.model(1)[0], data.model(2)[0])
    assert not torch.equal(data.train(1)[0], data.train(2)[0])
    assert data.train(1)[0].mean(dim=0).abs().max() < 0.05


def test_a_synthetic_client_is_a_function_of_seed_and_id() -> None:
    first, again, other = LeafSynthetic(seed=1), LeafSynthetic(seed=1), LeafSynthetic(seed=2)
    assert torch.equal(first.train(7)[0], again.train(7)[0])
    assert first.num_samples(7) != first.num_samples(8)
    assert not torch.equal(first.model(7)[0], other.model(7)[0])


def test_the_largest_size_can_be_bounded() -> None:
    data = LeafSynthetic(max_samples=60)
    assert max(data.num_samples(client_id) for client_id in range(1, 200)) == 60


@pytest.mark.parametrize("options", [{"alpha": -1}, {"seed": -1}, {"test_share": 1}, {"max_samples": 10}])
def test_invalid_synthetic_arguments_are_rejected(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=f"^{next(iter(options))}: expected"):
        LeafSynthetic(**options)  # type: ignore[arg-type]  # a seed is whole, and a share is not


def test_synthetic_client_ids_start_at_one() -> None:
    with pytest.raises(ConfigError, match="client 0: ids count from 1"):
        LeafSynthetic().train(0)
