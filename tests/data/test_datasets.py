from __future__ import annotations

import pytest
import torch

from dovetail.data import digits
from dovetail.errors import DataError


def test_digits_are_images_in_0_to_1_with_whole_number_labels() -> None:
    images, labels = digits((1.0,))[0].tensors
    assert (images.shape, images.dtype, labels.dtype) == ((1797, 1, 8, 8), torch.float32, torch.int64)
    assert (images.min().item(), images.max().item()) == (0, 1)


def test_the_parts_of_digits_make_up_the_whole() -> None:
    rows = [image.flatten().tolist() for part in digits() for image in part.tensors[0]]
    whole = [image.flatten().tolist() for image in digits((1.0,))[0].tensors[0]]
    assert sorted(rows) == sorted(whole)


def test_every_part_of_digits_has_the_same_mix() -> None:
    train, _, test = digits((0.5, 0.25, 0.25))
    counts = [part.tensors[1].bincount(minlength=10) for part in (train, test)]
    assert (counts[0] - 2 * counts[1]).abs().max() <= 2


def test_the_seed_decides_the_parts_of_digits() -> None:
    first, again, other = digits(seed=1), digits(seed=1), digits(seed=2)
    assert torch.equal(first[0].tensors[0], again[0].tensors[0])
    assert not torch.equal(first[0].tensors[0], other[0].tensors[0])


@pytest.mark.parametrize("split", [(), (0.7, 0.4), (-0.1, 0.5)])
def test_shares_that_are_none_are_refused(split: tuple[float, ...]) -> None:
    with pytest.raises(DataError, match="split"):
        digits(split)
