"""Models of transformers in every style and layer, against loops by hand."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

transformers = pytest.importorskip("transformers")

from transformers import (  # noqa: E402
    BertConfig,
    BertForSequenceClassification,
    BertForTokenClassification,
    DataCollatorWithPadding,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

from dovetail import Batches, Epochs, Trainer  # noqa: E402
from dovetail.callbacks import EMA, Callback, Timer  # noqa: E402
from dovetail.errors import ConfigError  # noqa: E402
from dovetail.huggingface import GenerateSamples, save_pretrained  # noqa: E402
from dovetail.trainers import AMPTrainer, DDPTrainer, FSDPTrainer, TimedTrainer  # noqa: E402
from dovetail.trainers.composable import ComposableTrainer  # noqa: E402
from dovetail.trainers.named_batches import named_batch  # noqa: E402

Batch = dict[str, Tensor]

SETTINGS: dict[str, Any] = {"optim_function": "SGD", "learning_rate": 0.1, "verbose": False, "seed": 5}
SETTINGS |= {"momentum": 0.0, "weight_decay": 0.0}
SMALL: dict[str, Any] = {"vocab_size": 30, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
SMALL |= {"num_hidden_layers": 2, "max_position_embeddings": 16, "pad_token_id": 0}


def bert(dropout: float = 0.0, kind: Any = BertForSequenceClassification) -> Any:
    torch.manual_seed(0)
    rates: dict[str, Any] = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout, "num_labels": 3}
    return kind(BertConfig(**rates, **SMALL)).double()


def llama() -> Any:
    torch.manual_seed(0)
    kind: Any = LlamaForCausalLM
    return kind(LlamaConfig(num_key_value_heads=2, bos_token_id=1, eos_token_id=2, **SMALL)).double()


def gpt2() -> Any:
    torch.manual_seed(0)
    kind: Any = GPT2LMHeadModel
    rates: dict[str, Any] = {
        "resid_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return kind(GPT2Config(vocab_size=30, n_embd=16, n_layer=2, n_head=2, n_positions=16, **rates)).double()


def exact_loss(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
    """The causal loss of transformers, which is in float32, in the precision of the model."""
    return cross_entropy(logits[:, :-1].reshape(-1, vocab_size), labels[:, 1:].reshape(-1))


def tokens(lengths: list[int], seed: int = 0) -> Batch:
    """Return padded sequences, whose labels are the tokens; the padding is masked."""
    generator = torch.Generator().manual_seed(100 * seed + sum(lengths))
    mask = torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]
    ids = torch.randint(3, 30, mask.shape, generator=generator).where(mask, 0)
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": ids.where(mask, -100)}


def joined(batches: list[Batch]) -> Batch:
    width = max(batch["labels"].shape[1] for batch in batches)
    fill = {"input_ids": 0, "attention_mask": 0, "labels": -100}
    return {
        name: torch.cat([pad(it[name], (0, width - it[name].shape[1]), value=fill[name]) for it in batches])
        for name in fill
    }


PADDED = [tokens([8, 3]), tokens([2, 2, 5]), tokens([10, 1]), tokens([4])]


def classes(number: int = 3, size: int = 4) -> list[Batch]:
    batches = [tokens([3 + (i + j) % 5 for j in range(size)], seed=i) for i in range(number)]
    generator = torch.Generator().manual_seed(1)
    return [{**it, "labels": torch.randint(3, (size,), generator=generator)} for it in batches]


def weights(trainer: Any) -> Tensor:
    return torch.cat([it.detach().double().flatten() for it in trainer.core.model.parameters()])


def by_hand(model: Any, batches: list[Batch], epochs: int) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.train()
    for _ in range(epochs):
        for batch in batches:
            optimizer.zero_grad()
            model(**batch).loss.backward()
            optimizer.step()
    return model


def fitted(model: Any, batches: Any, *, wrap: Any = None, style: Any = Trainer, epochs: int = 2, **more: Any) -> Any:
    trainer = style(model, **{**SETTINGS, **more})
    layer = trainer if wrap is None else wrap(trainer)
    layer.fit(batches, max_length=Epochs(epochs))
    return layer


# ------------------------------------------------------------------ equal to a loop by hand


@pytest.mark.parametrize("style", [Trainer, ComposableTrainer, TimedTrainer, DDPTrainer, FSDPTrainer])
def test_every_style_trains_a_classifier_like_a_loop_by_hand(style: Any) -> None:
    torch.manual_seed(5)
    expected = by_hand(bert(), classes(), 2)
    layered = style not in (Trainer, ComposableTrainer)
    ours = fitted(bert(), classes(), wrap=style if layered else None, style=Trainer if layered else style)
    pairs = zip(expected.parameters(), ours.core.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("make", [gpt2, llama])
def test_a_causal_model_trains_like_a_loop_by_hand(make: Any) -> None:
    expected = by_hand(make(), PADDED, 2)
    ours = fitted(make(), PADDED)
    assert all(torch.equal(a, b) for a, b in zip(expected.parameters(), ours.model.parameters(), strict=True))


def test_dropout_draws_as_in_a_loop_by_hand() -> None:
    expected = bert(0.1)
    torch.manual_seed(5)
    by_hand(expected, classes(), 2)
    ours = fitted(bert(0.1), classes())
    assert all(torch.equal(a, b) for a, b in zip(expected.parameters(), ours.model.parameters(), strict=True))


def test_evaluation_and_predictions_equal_those_by_hand() -> None:
    trainer, batches = Trainer(bert(0.1), **SETTINGS), classes()
    model = copy.deepcopy(trainer.model).eval()
    with torch.no_grad():
        outputs = [model(**batch) for batch in batches]
    logits, labels = torch.cat([it.logits for it in outputs]), torch.cat([it["labels"] for it in batches])
    metrics = trainer.evaluate(batches)
    assert metrics["loss"] == pytest.approx(float(torch.stack([it.loss for it in outputs]).mean()), abs=1e-12)
    assert metrics["accuracy"] == pytest.approx(float((logits.argmax(1) == labels).double().mean()), abs=1e-12)
    predicted = trainer.predict(batches)
    assert type(predicted) is type(outputs[0])
    assert predicted.loss is None
    assert torch.equal(predicted.logits, logits)


# ------------------------------------------------------------------ masked labels are weights


@pytest.mark.parametrize("make", [gpt2, llama])
@pytest.mark.parametrize("wrap", [None, FSDPTrainer])
def test_accumulation_of_padded_batches_equals_one_large_batch(make: Any, wrap: Any) -> None:
    def model() -> Any:
        made = make()
        made.loss_function = exact_loss
        return made

    large = fitted(model(), [joined(PADDED)], epochs=3)
    small = fitted(model(), PADDED, epochs=3, accumulation_steps=4, wrap=wrap)
    # Llama computes its norms in float32, also in a model of float64.
    tolerance = 1e-7 if make is llama else 1e-12
    assert (weights(large) - weights(small)).abs().max() < tolerance
    losses = [it.core.history.get_metric_values("train_loss") for it in (large, small)]
    assert losses[1] == pytest.approx(losses[0], abs=tolerance)


def test_the_perplexity_is_that_of_all_tokens() -> None:
    trainer = Trainer(gpt2(), metrics=["perplexity"], **SETTINGS)
    trainer.model.loss_function = exact_loss
    loss = trainer.model(**joined(PADDED)).loss.detach()
    assert trainer.evaluate(PADDED)["perplexity"] == pytest.approx(loss.exp().item(), abs=1e-10)


def test_the_items_of_a_loss_are_the_labels_that_transformers_compares() -> None:
    t5 = T5ForConditionalGeneration(T5Config(vocab_size=30, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2))
    batch = tokens([6, 4])
    for model, expected in ((llama(), 8), (gpt2(), 8), (t5, 10), (bert(kind=BertForTokenClassification), 10)):
        context = Trainer(model, verbose=False).context
        named = named_batch(context, nn.CrossEntropyLoss(), batch)
        assert named is not None
        assert int(named.num_items) == expected, type(model).__name__


# ------------------------------------------------------------------ layers


def test_mixed_precision_equals_autocast_by_hand() -> None:
    expected, batches = bert().float(), classes()
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    expected.train()
    for batch in batches:
        with torch.autocast("cpu", torch.bfloat16):
            loss = expected(**batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    ours = fitted(bert().float(), batches, wrap=lambda it: AMPTrainer(it, precision="bf16"), epochs=1)
    assert all(torch.equal(a, b) for a, b in zip(expected.parameters(), ours.core.model.parameters(), strict=True))


def test_gradient_checkpointing_changes_no_number() -> None:
    def model(checkpoints: bool) -> Any:
        made = bert(0.1)
        if checkpoints:
            made.gradient_checkpointing_enable()
        return made

    for settings in ({}, {"accumulation_steps": 2}, {"wrap": lambda it: AMPTrainer(it, precision="bf16")}):
        plain, saving = (fitted(model(it), classes(4), **settings) for it in (False, True))
        assert torch.equal(weights(plain), weights(saving)), settings


def test_the_average_of_the_weights_is_validated() -> None:
    ema = EMA(decay=0.5)
    trainer = Trainer(bert(), callbacks=[ema], **SETTINGS)
    history = trainer.fit(classes(), classes(), max_length=Epochs(2))
    ema.apply_to(trainer.model)
    assert trainer.evaluate(classes())["loss"] == pytest.approx(history.get_latest_metric("valid_loss"), abs=1e-12)


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    def trainer(folder: str, **more: Any) -> Any:
        settings = {**SETTINGS, "checkpoint_dir": tmp_path / folder, "accumulation_steps": 2, **more}
        return Trainer(bert(0.1), **settings)

    whole = trainer("whole")
    whole.fit(classes(4), max_length=Epochs(2))
    trainer("parts").fit(classes(4), max_length=Batches(6), checkpoint_period=Batches(2))
    parts = trainer("parts")
    parts.fit(classes(4), max_length=Epochs(2), resume="auto")
    assert torch.equal(weights(whole), weights(parts))
    assert parts.history.get_metric_values("train_loss") == whole.history.get_metric_values("train_loss")
    assert parts.history.get_metric_values("train_tokens") == whole.history.get_metric_values("train_tokens")


def test_a_dry_run_and_the_explanation_leave_the_trainer_unchanged(capsys: pytest.CaptureFixture[str]) -> None:
    trainer = Trainer(llama(), **{**SETTINGS, "verbose": True})
    before = weights(trainer)
    trainer.fit(PADDED, PADDED, dry_run=True)
    assert "dry run: 1 training, 1 validation batch" in capsys.readouterr().out
    assert "LlamaForCausalLM" in trainer.explain()
    assert torch.equal(before, weights(trainer))


# ------------------------------------------------------------------ data


def tokenizer() -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    words = ["[PAD]", "[BOS]", "[EOS]", *(f"w{number}" for number in range(27))]
    made = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token="[PAD]"))
    made.pre_tokenizer = Whitespace()
    kind: Any = PreTrainedTokenizerFast
    return kind(tokenizer_object=made, pad_token="[PAD]", bos_token="[BOS]", eos_token="[EOS]")


SENTENCES = [{"input_ids": [3 + i % 7] * (2 + i % 5), "label": i % 3} for i in range(12)]


def test_a_data_collator_serves_every_stage_and_form_of_data() -> None:
    datasets = pytest.importorskip("datasets")
    collator = DataCollatorWithPadding(tokenizer())
    settings: dict[str, Any] = {"collate_fn": collator, "batch_size": 4, "num_workers": 0, "shuffle": False}
    results = []
    for data in (SENTENCES, datasets.Dataset.from_list(SENTENCES)):
        trainer = Trainer(bert(), **SETTINGS, **settings)
        trainer.fit(data, data, max_length=Epochs(2))
        results.append((weights(trainer), trainer.predict(data).logits, trainer.evaluate(data)["loss"]))
    expected = fitted(bert(), [dict(collator(SENTENCES[i : i + 4])) for i in (0, 4, 8)])
    for trained, logits, loss in results:
        assert torch.equal(trained, weights(expected))
        assert len(logits) == 12
        assert loss == pytest.approx(expected.evaluate([dict(collator(SENTENCES))])["loss"], abs=1e-12)


def test_tokens_are_counted_in_the_history_and_by_the_timer() -> None:
    seconds = iter(range(100))
    timer = Timer(clock=lambda: float(next(seconds)))
    trainer = Trainer(llama(), callbacks=[timer], **SETTINGS)
    history = trainer.fit(PADDED, max_length=Epochs(2))
    number = sum(int(batch["attention_mask"].sum()) for batch in PADDED)
    assert history.get_metric_values("train_tokens") == [number, number]
    assert timer.tokens_per_second == pytest.approx(number)


# ------------------------------------------------------------------ files and generation


def test_saved_models_are_loaded_bit_by_bit(tmp_path: Path) -> None:
    trainer = fitted(gpt2().float(), PADDED)
    folder = save_pretrained(trainer, tmp_path / "model", tokenizer())
    loaded = GPT2LMHeadModel.from_pretrained(folder)
    ours = trainer.model.state_dict()
    assert loaded.state_dict().keys() == ours.keys()
    assert all(torch.equal(it, ours[name]) for name, it in loaded.state_dict().items())
    assert PreTrainedTokenizerFast.from_pretrained(folder).pad_token == "[PAD]"
    with pytest.raises(ConfigError, match=r"a Linear has no save_pretrained; .* trainer.save_model"):
        save_pretrained(Trainer(nn.Linear(2, 2), verbose=False), tmp_path)


def test_generation_during_training_changes_no_number(tmp_path: Path) -> None:
    def run(callbacks: list[Callback]) -> Any:
        trainer = Trainer(llama(), callbacks=callbacks, **SETTINGS)
        trainer.fit(PADDED, PADDED, max_length=Epochs(2))
        return trainer

    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": True, "pad_token_id": 0}
    generate = GenerateSamples(["w1 w2", "w3"], tokenizer(), path=tmp_path / "samples.jsonl", **options)
    trainer = run([generate])
    assert torch.equal(weights(trainer), weights(run([])))
    assert [(it["epoch"], it["prompt"]) for it in generate.samples] == [(1, 0), (1, 1), (2, 0), (2, 1)]
    assert generate.samples[0]["text"].startswith("w1 w2 ")
    lines = (tmp_path / "samples.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == generate.samples
    again = GenerateSamples([[4, 5], [6]], **options)
    run([again])
    texts = [tokenizer().decode(it["ids"], skip_special_tokens=True) for it in again.samples]
    assert texts == [it["text"] for it in generate.samples]


def test_generation_needs_a_tokenizer_for_texts_and_a_model_that_generates() -> None:
    with pytest.raises(ConfigError, match="texts need a tokenizer"):
        GenerateSamples(["a text"])
    trainer = Trainer(nn.Linear(2, 2), callbacks=[GenerateSamples([[1]])], verbose=False)
    with pytest.raises(ConfigError, match="a Linear has no method generate"):
        trainer.fit((torch.zeros(4, 2), torch.zeros(4, dtype=torch.long)))
