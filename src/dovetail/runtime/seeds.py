"""Seeds that are derived from other seeds and from counters."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b, sha256
from typing import Literal

Rule = Literal["text", "loader", "poisson", "trial", "rank", "sized_batches"]
"""A formula of `derive_seed`. Each name except the first is used in one place, whose numbers must not change."""

_64_BITS = 2**64 - 1


def derive_seed(*parts: int | str, rule: Rule = "text") -> int:
    """Return a seed that is a function of numbers and words.

    It is the same in every process and on every machine. New code uses the default rule. The other rules reproduce
    older formulas, because existing results and checkpoints depend on their numbers.

    Args:
        parts: Numbers or words; the first one is the seed of the whole run.
        rule: The formula. `text` returns 63 bits.

    Example:
        >>> derive_seed(0, 1, 2) == derive_seed(0, 1, 2), derive_seed(0, 1, 2) == derive_seed(0, 2, 1)
        (True, False)
    """
    if rule == "text":
        return int.from_bytes(blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest(), "little") >> 1
    if rule == "loader":
        return int.from_bytes(sha256(repr(parts).encode()).digest()[:8], "little")
    if rule == "poisson":
        return int.from_bytes(sha256(", ".join(map(str, parts)).encode()).digest()[:8], "little")
    if rule == "trial":
        return int.from_bytes(sha256("/".join(map(str, parts)).encode()).digest()[:4], "big") >> 1
    if rule == "rank":
        return _tuple_hash([int(part) for part in parts]) % 2**63
    seed, epoch = map(int, parts)
    return (seed + 0x9E3779B9 * epoch) % 2**63


def _tuple_hash(numbers: Sequence[int]) -> int:
    """Return the hash of a tuple of integers in 64-bit CPython 3.8 to 3.14 (xxHash), as an unsigned number.

    The built-in `hash` is not used, because it may change with the interpreter.
    """
    state = 2870177450012600261
    for number in numbers:
        # The hash of an integer is its remainder by a prime. CPython never returns -1, which marks an error.
        lane = (abs(number) % (2**61 - 1)) * (-1 if number < 0 else 1)
        state = (state + (-2 if lane == -1 else lane) * 14029467366897019727) & _64_BITS
        state = ((state << 31) | (state >> 33)) & _64_BITS
        state = (state * 11400714785074694791) & _64_BITS
    state = (state + (len(numbers) ^ 2870177450012600261 ^ 3527539)) & _64_BITS
    return 1546275796 if state == _64_BITS else state
