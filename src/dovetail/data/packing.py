"""Packing of token sequences into rows of equal length, for language models."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.utils.data import Dataset

from dovetail.errors import DataError
from dovetail.units import check_count

__all__ = ["PackedRows", "pack"]

_MASK = -100


class PackedRows(Dataset[dict[str, Tensor]]):
    """Dataset of rows of tokens; a sample is a dictionary, as causal models of transformers expect it.

    Attributes:
        tensors: `input_ids`, `labels` and `position_ids`, each of shape (rows, length).

    Example:
        >>> len(pack([[5, 6, 7]], 2)), pack([[5, 6, 7]], 2)[0]["input_ids"]
        (2, tensor([5, 6]))
    """

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    def __len__(self) -> int:
        return len(self.tensors["input_ids"])

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: rows[index] for name, rows in self.tensors.items()}


def pack(
    sequences: Iterable[Sequence[int]],
    length: int,
    *,
    end: int | None = None,
    labels: Iterable[Sequence[int]] | None = None,
    split: bool = True,
) -> PackedRows:
    """Return token sequences packed into rows of one length, so that no row is mostly padding.

    The position of the first token of each sequence is 0. Models of transformers that receive these positions and no
    attention mask attend within a sequence only, if they use no cache; a trainer turns the cache off for such batches.
    The label of the first token is masked with -100, because the token before it belongs to another sequence. A row
    that is not full is filled up with `end` and masked labels.

    Args:
        sequences: The token ids of each document.
        length: The number of tokens in a row.
        end: The token that is appended to each sequence, and that fills rows up; None appends nothing and fills up
            with 0.
        labels: One label for each token, such as -100 for the tokens of a prompt; None means the tokens themselves.
        split: True to cut sequences at the end of a row, and to continue them in the next row with positions from 0.
            False to keep each sequence whole, in the first row that has room for it.

    Returns:
        A dataset of rows with `input_ids`, `labels` and `position_ids`; `tensors` has all rows at once.

    Raises:
        ConfigError: The length is not a whole number above 0.
        DataError: There is no token, a sequence has another number of labels than of tokens, or a sequence is longer
            than a row and may not be split.

    Example:
        >>> for name, rows in pack([[5, 6, 7], [8], [9, 9]], 4, end=1).tensors.items():
        ...     print(name, rows.tolist())
        input_ids [[5, 6, 7, 1], [8, 1, 9, 9], [1, 1, 1, 1]]
        labels [[-100, 6, 7, 1], [-100, 1, -100, 9], [-100, -100, -100, -100]]
        position_ids [[0, 1, 2, 3], [0, 1, 0, 1], [0, 0, 1, 2]]
    """
    check_count("pack: length", length)
    pieces = _with_labels(sequences, labels, end)
    rows = _cut(pieces, length) if split else _first_fit(pieces, length)
    if not rows:
        raise DataError("pack: there is no token in the sequences")
    packed: dict[str, list[list[int]]] = {"input_ids": [], "labels": [], "position_ids": []}
    for row in rows:
        missing = length - sum(len(ids) for ids, _ in row)
        row = [*row, ([0 if end is None else end] * missing, [_MASK] * missing)]
        packed["input_ids"].append([token for ids, _ in row for token in ids])
        packed["labels"].append([label for _, own in row for label in (_MASK, *own[1:])[: len(own)]])
        packed["position_ids"].append([position for ids, _ in row for position in range(len(ids))])
    return PackedRows({name: torch.tensor(values) for name, values in packed.items()})


_Piece = tuple[list[int], list[int]]


def _with_labels(
    sequences: Iterable[Sequence[int]], labels: Iterable[Sequence[int]] | None, end: int | None
) -> list[_Piece]:
    documents = [list(sequence) for sequence in sequences]
    targets = documents if labels is None else [list(own) for own in labels]
    if len(targets) != len(documents):
        raise DataError(f"pack: expected labels for {len(documents)} sequences, got them for {len(targets)}")
    last = [] if end is None else [end]
    pieces = []
    for number, (ids, own) in enumerate(zip(documents, targets, strict=True)):
        if len(ids) != len(own):
            raise DataError(f"pack: sequence {number} has {len(ids)} tokens and {len(own)} labels; give one for each")
        if ids:
            pieces.append((ids + last, own + last))
    return pieces


def _cut(pieces: Iterable[_Piece], length: int) -> list[list[_Piece]]:
    rows: list[list[_Piece]] = []
    room = 0
    for ids, own in pieces:
        start = 0
        while start < len(ids):
            if not room:
                rows.append([])
                room = length
            stop = min(len(ids), start + room)
            rows[-1].append((ids[start:stop], own[start:stop]))
            room -= stop - start
            start = stop
    return rows


def _first_fit(pieces: Iterable[_Piece], length: int) -> list[list[_Piece]]:
    rows: list[list[_Piece]] = []
    rooms: list[int] = []
    for ids, own in pieces:
        if len(ids) > length:
            raise DataError(
                f"pack: a sequence has {len(ids)} tokens, with its end token, and a row only {length}; shorten it, "
                "choose longer rows, or set split=True"
            )
        row = next((number for number, room in enumerate(rooms) if room >= len(ids)), len(rooms))
        if row == len(rooms):
            rows.append([])
            rooms.append(length)
        rows[row].append((ids, own))
        rooms[row] -= len(ids)
    return rows
