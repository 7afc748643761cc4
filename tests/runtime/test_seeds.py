"""Numbers that existing results and checkpoints depend on."""

from __future__ import annotations

import random
import sys

import numpy as np
import pytest

from dovetail.runtime.seeds import Rule, derive_seed

LARGE = 2**63 - 1


@pytest.mark.parametrize(
    ("rule", "parts", "seed"),
    [
        ("text", (0, 1, 2), 3662037204992188296),
        ("text", (1, "model"), 5566775913157763593),
        ("loader", (7, 0, 1), 18068382795455712304),
        ("loader", (LARGE, 3, 2, 11), 11976391378807979148),
        ("poisson", (7, 0), 11485058616536959814),
        ("poisson", (LARGE, 3), 17253158435953743864),
        ("trial", (5, 0), 732641518),
        ("trial", (0, 17), 1758478021),
        ("rank", (0, 0, 0), 3010437511937009226),
        ("rank", (7, 120, 3), 6821187075924118994),
        ("rank", (LARGE, 5, 1), 4956206811246768857),
        ("rank", (-1, 0, 1), 5003556802939907908),
        ("sized_batches", (7, 0), 7),
        ("sized_batches", (LARGE, 3), 7963307306),
    ],
)
def test_every_seed_rule_gives_its_recorded_numbers(rule: Rule, parts: tuple[int | str, ...], seed: int) -> None:
    assert derive_seed(*parts, rule=rule) == seed


@pytest.mark.skipif(sys.implementation.name != "cpython" or sys.maxsize < 2**62, reason="the hash of 64-bit CPython")
def test_the_seed_of_a_rank_is_the_hash_of_its_numbers() -> None:
    draw = random.Random(0)
    rows = [(draw.randrange(-(2**bits), 2**bits), draw.randrange(10**6), draw.randrange(64)) for bits in range(1, 70)]
    rows += [(2**61 - 1, 0, 0), (2**61 - 2, 0, 0), (1 - 2**61, 0, 0), (2**61, 1, 1)]
    assert [derive_seed(*row, rule="rank") for row in rows] == [hash(row) % 2**63 for row in rows]
    assert derive_seed(int(np.int64(7)), 1, 2, rule="rank") == hash((7, 1, 2)) % 2**63
