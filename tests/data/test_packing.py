from __future__ import annotations

from typing import Any

import pytest
import torch

from dovetail import Trainer
from dovetail.data import PackedRows, pack
from dovetail.errors import ConfigError, DataError


def lists(packed: PackedRows) -> list[list[list[int]]]:
    return [packed.tensors[name].tolist() for name in ("input_ids", "labels", "position_ids")]


def test_sequences_are_concatenated_with_an_end_token_and_cut() -> None:
    ids, labels, positions = lists(pack([[5, 6], [7, 8, 9, 5, 6]], 3, end=1))
    assert ids == [[5, 6, 1], [7, 8, 9], [5, 6, 1]]
    assert labels == [[-100, 6, 1], [-100, 8, 9], [-100, 6, 1]]
    assert positions == [[0, 1, 2], [0, 1, 2], [0, 1, 2]]


def test_the_next_document_of_a_row_starts_at_position_zero() -> None:
    ids, labels, positions = lists(pack([[5], [6, 7, 8], [9]], 4, end=1))
    assert ids == [[5, 1, 6, 7], [8, 1, 9, 1]]
    assert labels == [[-100, 1, -100, 7], [-100, 1, -100, 1]]
    assert positions == [[0, 1, 0, 1], [0, 1, 0, 1]]


def test_whole_sequences_go_to_the_first_row_with_room() -> None:
    ids, labels, positions = lists(pack([[5, 6, 7], [8, 9, 5], [6], [7]], 5, end=1, split=False))
    assert ids == [[5, 6, 7, 1, 1], [8, 9, 5, 1, 1], [6, 1, 7, 1, 1]]
    assert labels == [[-100, 6, 7, 1, -100], [-100, 9, 5, 1, -100], [-100, 1, -100, 1, -100]]
    assert positions == [[0, 1, 2, 3, 0], [0, 1, 2, 3, 0], [0, 1, 0, 1, 0]]
    assert lists(pack([[5, 6, 7], [8, 9], [6], [7, 7]], 4, split=False))[0] == [[5, 6, 7, 6], [8, 9, 7, 7]]


def test_labels_of_prompts_are_masked() -> None:
    ids, labels, _ = lists(pack([[5, 6, 7], [8, 9]], 6, end=1, labels=[[-100, -100, 7], [-100, 9]], split=False))
    assert ids == [[5, 6, 7, 1, 1, 1], [8, 9, 1, 1, 1, 1]]
    assert labels == [[-100, -100, 7, 1, -100, -100], [-100, 9, 1, -100, -100, -100]]


def test_without_an_end_token_nothing_is_appended() -> None:
    ids, labels, _ = lists(pack([[5, 6], [], [7]], 4))
    assert ids == [[5, 6, 7, 0]]
    assert labels == [[-100, 6, -100, -100]]


@pytest.mark.parametrize(
    ("arguments", "more", "message"),
    [
        (([[5, 6, 7]], 3), {"end": 1, "split": False}, "a sequence has 4 tokens, with its end token, and a row only 3"),
        (([[5, 6]], 3), {"labels": [[5]]}, "sequence 0 has 2 tokens and 1 labels"),
        (([[5, 6]], 3), {"labels": []}, "expected labels for 1 sequences, got them for 0"),
        (([[], []], 3), {}, "there is no token in the sequences"),
    ],
)
def test_invalid_sequences_and_labels_are_rejected(arguments: Any, more: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        pack(*arguments, **more)


def test_a_length_is_a_positive_number() -> None:
    with pytest.raises(ConfigError, match="pack: length"):
        pack([[1]], 0)


def llama(**more: Any) -> Any:
    pytest.importorskip("transformers")
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    kind: Any = LlamaForCausalLM
    size: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    more |= {"num_attention_heads": 2, "bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0}
    return kind(LlamaConfig(vocab_size=20, **size, **more)).eval()


DOCUMENTS = [[5, 6, 7, 8], [9, 10], [11, 12, 13]]


def test_a_packed_row_gives_the_outputs_and_the_loss_of_its_documents() -> None:
    model = llama(use_cache=False)
    packed = model(**pack(DOCUMENTS, 12, end=1).tensors)
    alone = [model(**pack([document], len(document) + 1, end=1).tensors) for document in DOCUMENTS]
    logits = torch.cat([each.logits[0] for each in alone])
    assert torch.allclose(packed.logits[0], logits, atol=1e-6)
    # The first token of each document has no label.
    numbers = [len(document) for document in DOCUMENTS]
    mean = sum(each.loss * number for each, number in zip(alone, numbers, strict=True)) / sum(numbers)
    assert torch.isclose(packed.loss, mean, atol=1e-6)


@pytest.mark.parametrize("wrap", [False, True])
def test_a_trainer_keeps_packed_documents_apart_though_the_model_has_a_cache(wrap: bool) -> None:
    """The default configuration has a cache, with which transformers does not see where documents start."""
    model = llama()
    if wrap:
        peft = pytest.importorskip("peft")
        adapters = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, adapters).eval()
    trainer = Trainer(model, "cpu", num_workers=0, verbose=False)
    rows = pack(DOCUMENTS, 12, end=1)
    alone = [pack([document], len(document) + 1, end=1) for document in DOCUMENTS]
    expected = torch.cat([trainer.predict(each).logits[0] for each in alone])
    assert torch.allclose(trainer.predict(rows).logits[0], expected, atol=1e-6)
    assert (model(**rows.tensors).logits[0] - expected).abs().max() > 1e-3
    losses = [trainer.evaluate(each)["loss"] * len(document) for each, document in zip(alone, DOCUMENTS, strict=True)]
    assert trainer.evaluate(rows)["loss"] == pytest.approx(sum(losses) / sum(map(len, DOCUMENTS)), abs=1e-6)
