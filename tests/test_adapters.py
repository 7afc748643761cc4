"""Adapters of peft: training, small checkpoints, and export with and without merging."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from peft import LoraConfig, PeftModel, get_peft_model  # noqa: E402
from transformers import BertConfig, BertForSequenceClassification, LlamaConfig, LlamaForCausalLM  # noqa: E402

from dovetail import Batches, Epochs, Trainer, checkpoint  # noqa: E402
from dovetail.errors import CheckpointError, ConfigError  # noqa: E402
from dovetail.huggingface import save_pretrained  # noqa: E402

SMALL: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2}
SETTINGS: dict[str, Any] = {"optim_function": "AdamW", "learning_rate": 0.02, "verbose": False, "seed": 5}


def llama(seed: int = 0, vocabulary: int = 30) -> Any:
    torch.manual_seed(seed)
    kind: Any = LlamaForCausalLM
    ends: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    return kind(LlamaConfig(vocab_size=vocabulary, num_key_value_heads=2, max_position_embeddings=16, **SMALL, **ends))


def bert() -> Any:
    torch.manual_seed(0)
    kind: Any = BertForSequenceClassification
    more: dict[str, Any] = {"num_labels": 3, "max_position_embeddings": 16}
    return kind(BertConfig(vocab_size=30, **more, **SMALL))


def adapted(model: Any) -> Any:
    torch.manual_seed(1)
    is_causal = isinstance(model, LlamaForCausalLM)
    targets = ["q_proj", "v_proj"] if is_causal else ["query", "value"]
    task = "CAUSAL_LM" if is_causal else "SEQ_CLS"
    return get_peft_model(model, LoraConfig(r=2, lora_dropout=0.1, target_modules=targets, task_type=task))


def batches(*, is_causal: bool) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(3, 30, (3, 4, 8), generator=generator)
    labels = ids if is_causal else torch.randint(3, (3, 4), generator=generator)
    return [{"input_ids": one, "labels": other} for one, other in zip(ids, labels, strict=True)]


@pytest.mark.parametrize("make", [llama, bert])
def test_lora_trains_like_a_loop_by_hand(make: Any) -> None:
    parts = batches(is_causal=make is llama)
    model = adapted(make())
    frozen = {name: it.clone() for name, it in model.named_parameters() if not it.requires_grad}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    torch.manual_seed(5)
    model.train()
    for batch in parts * 2:
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()
    rates = {"optim_function": "SGD", "learning_rate": 0.5, "momentum": 0.0, "weight_decay": 0.0}
    trainer = Trainer(adapted(make()), "cpu", **{**SETTINGS, **rates})
    losses = trainer.fit(parts, parts, max_length=Epochs(2)).get_metric_values("valid_loss")
    for (name, ours), (_, theirs) in zip(trainer.model.named_parameters(), model.named_parameters(), strict=True):
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-6), name
        assert name not in frozen or torch.equal(ours, frozen[name])
    assert losses[1] < losses[0]


def test_a_resumed_adapter_equals_an_uninterrupted_one_and_is_small(tmp_path: Path) -> None:
    parts = batches(is_causal=True)

    def trainer(model: Any, folder: str = "ours") -> Trainer:
        more: dict[str, Any] = {"checkpoint_dir": tmp_path / folder, "save_only_trainable": True, "save_every": 2}
        return Trainer(model, "cpu", **SETTINGS, **more)

    straight = trainer(adapted(llama(vocabulary=3000)), "straight")
    straight.fit(parts, max_length=Epochs(3))
    trainer(adapted(llama(vocabulary=3000))).fit(parts, max_length=Batches(5))
    resumed = trainer(adapted(llama(vocabulary=3000)))
    resumed.fit(parts, max_length=Epochs(3), resume="auto")
    for (name, ours), (_, theirs) in zip(
        resumed.model.named_parameters(), straight.model.named_parameters(), strict=True
    ):
        assert torch.equal(ours, theirs), name
    newest = tmp_path / "ours" / "ck_epoch_3_iter_9"
    assert all("lora_" in name for name in checkpoint.load(newest)["model"])
    # The embeddings and the head of the base have 384 kB; the adapters have 1 kB, and their optimizer twice of this.
    assert sum(it.numel() * it.element_size() for it in straight.model.parameters()) > 384_000
    assert sum(path.stat().st_size for path in newest.iterdir()) < 50_000
    with pytest.raises(CheckpointError, match="holds only what was trained, on a frozen base"):
        trainer(adapted(llama(seed=9, vocabulary=3000))).load_checkpoint(newest)


@pytest.mark.parametrize("make", [llama, bert])
def test_adapters_are_written_alone_or_merged(make: Any, tmp_path: Path) -> None:
    parts = batches(is_causal=make is llama)
    trainer = Trainer(adapted(make()), "cpu", **SETTINGS)
    trainer.fit(parts, max_length=Epochs(2))
    weights = copy.deepcopy(trainer.model.state_dict())
    expected = trainer.predict(parts).logits
    plain = Trainer(make(), "cpu", **SETTINGS).predict(parts).logits

    alone = save_pretrained(trainer, tmp_path / "alone")
    assert {path.name for path in alone.iterdir()} >= {"adapter_config.json", "adapter_model.safetensors"}
    loaded = PeftModel.from_pretrained(make(), alone)
    assert torch.allclose(Trainer(loaded, "cpu", **SETTINGS).predict(parts).logits, expected, rtol=0, atol=1e-6)

    merged = type(make()).from_pretrained(save_pretrained(trainer, tmp_path / "merged", merge_adapters=True))
    assert not isinstance(merged, PeftModel)
    assert merged.state_dict().keys() == make().state_dict().keys()
    assert torch.allclose(Trainer(merged, "cpu", **SETTINGS).predict(parts).logits, expected, rtol=0, atol=1e-6)
    assert (plain - expected).abs().max() > 1e-3
    # The export changes nothing, so training can continue.
    assert all(torch.equal(it, weights[name]) for name, it in trainer.model.state_dict().items())


def test_a_model_without_adapters_cannot_be_merged(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a LlamaForCausalLM has no adapters to merge; make them with peft"):
        save_pretrained(Trainer(llama(), "cpu", **SETTINGS), tmp_path / "model", merge_adapters=True)
    assert not list(tmp_path.iterdir())


def test_a_frozen_body_needs_no_peft(tmp_path: Path) -> None:
    model = bert()
    model.bert.requires_grad_(False)
    trainer = Trainer(model, "cpu", save_only_trainable=True, **SETTINGS)
    trainer.fit(batches(is_causal=False), max_length=Epochs(1), checkpoint_period=None)
    stored = checkpoint.load(trainer.save_checkpoint(tmp_path / "head"))["model"]
    assert set(stored) == {"classifier.weight", "classifier.bias"}
    other = bert()
    nn.init.zeros_(other.classifier.weight)
    again = Trainer(other, "cpu", **SETTINGS)
    again.load_model(tmp_path / "head")
    assert torch.equal(again.model.classifier.weight, trainer.model.classifier.weight)
