"""Hugging Face models: export with `save_pretrained`, and texts that a model generates during training."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from dovetail.callbacks.base import Callback, is_new_run
from dovetail.distributed import is_part
from dovetail.errors import ConfigError
from dovetail.trainers.base import Trainer
from dovetail.trainers.context import TrainingContext
from dovetail.trainers.export import write_pretrained
from dovetail.trainers.randomness import seed_everything
from dovetail.trainers.run_scope import evaluating
from dovetail.units import Epochs, Progress, TrainUnit, check_count

__all__ = ["GenerateSamples", "save_pretrained"]


@runtime_checkable
class Saves(Protocol):
    """Any object with transformers' `save_pretrained`: a model, a model of peft, a tokenizer or a processor."""

    def save_pretrained(self, save_directory: Any, **kwargs: Any) -> Any:
        """Write the object into a folder."""


@runtime_checkable
class Generates(Protocol):
    """Any model with transformers' `generate`."""

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Return the tokens of the prompts and their continuations."""


@runtime_checkable
class Merges(Protocol):
    """Any model with adapters of peft that can be merged into its weights."""

    def merge_and_unload(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model without adapters, whose weights contain them."""


def save_pretrained(
    trainer: Trainer, folder: str | Path, tokenizer: Saves | None = None, *, merge_adapters: bool = False
) -> Path:
    """Write the model of a trainer into a folder that `from_pretrained` of transformers reads, and return the folder.

    In a run of several processes all of them call this, and the first one writes. A sharded model is written whole. Of
    a model of peft only the adapters are written, for `PeftModel.from_pretrained`, unless they are merged.

    Args:
        trainer: The trainer, with or without layers.
        folder: The folder; it is created if it does not exist.
        tokenizer: A tokenizer or processor to write beside the model, or None.
        merge_adapters: True to write a plain model of transformers whose weights contain the adapters of peft. The
            model of the trainer is not changed.

    Raises:
        ConfigError: The model has no `save_pretrained`, or no adapters that can be merged, or it is sharded.

    Example:
        >>> import tempfile
        >>> from transformers import BertConfig, BertModel
        >>> from dovetail import Trainer
        >>> size = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
        >>> trainer = Trainer(BertModel(BertConfig(vocab_size=10, **size)), "cpu", verbose=False)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = save_pretrained(trainer, folder)
        ...     BertModel.from_pretrained(folder).config.vocab_size
        10
    """
    context, folder = trainer.context, Path(folder)
    model: Any = context.model
    if not isinstance(model, Saves):
        raise ConfigError(
            f"save_pretrained: a {type(model).__name__} has no save_pretrained; give a model of transformers, or write "
            "the weights alone with trainer.save_model(path)"
        )
    assert context.model is not None
    is_sharded = any(map(is_part, context.model.parameters()))
    if merge_adapters and (is_sharded or not isinstance(model, Merges)):
        reason = "the model is sharded" if is_sharded else f"a {type(model).__name__} has no adapters to merge"
        raise ConfigError(f"merge_adapters: {reason}; {_MERGE_LATER if is_sharded else _MAKE_ADAPTERS}")
    if merge_adapters and context.process.is_main:
        # Merging changes a model and removes its adapters, so merge a copy.
        adapted: Any = copy.deepcopy(context.model)
        model = adapted.merge_and_unload()
    write_pretrained(model, folder, is_main=context.process.is_main)
    if tokenizer is not None and context.process.is_main:
        tokenizer.save_pretrained(folder)
    return folder


_MAKE_ADAPTERS = "make them with peft.get_peft_model, or write the model without merge_adapters"
_MERGE_LATER = (
    "write the adapters alone, load them in one process with PeftModel.from_pretrained, and call merge_and_unload"
)


class GenerateSamples(Callback):
    """Generate from fixed prompts after validations, in evaluation mode and without any effect on training.

    Sampling starts from the same seed every time, and the random state of training is restored. In a run of several
    processes all of them generate, because a sharded model needs all of them. To generate with the average weights of
    `EMA`, put this callback before it.

    Args:
        prompts: Texts, if there is a tokenizer; else lists or tensors of token ids.
        tokenizer: Converts texts to ids and back; None means that prompts and samples are ids.
        max_new_tokens: The largest number of tokens after a prompt.
        every: Generate after the first validation that follows every n-th epoch, batch or update.
        path: A file to which the main process appends one line of JSON for each sample; None writes no file.
        seed: The seed for `do_sample=True`.
        options: Further arguments of `generate`, such as `do_sample=True` or `num_beams=4`.

    Attributes:
        samples: All samples so far: the keys `epoch`, `batches`, `prompt` (its number), and `text` or `ids`.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from dovetail import Epochs, Trainer
        >>> config = GPT2Config(vocab_size=10, n_embd=8, n_layer=1, n_head=1, bos_token_id=0, eos_token_id=0)
        >>> generate = GenerateSamples([[1, 2]], max_new_tokens=3, pad_token_id=0)
        >>> trainer = Trainer(GPT2LMHeadModel(config), "cpu", callbacks=[generate], verbose=False)
        >>> ids = torch.tensor([[1, 2, 3, 4]])
        >>> data = [{"input_ids": ids, "labels": ids}]
        >>> history = trainer.fit(data, data, max_length=Epochs(1))
        >>> generate.samples[0]["ids"][:2]
        [1, 2]
    """

    def __init__(
        self,
        prompts: Sequence[Any],
        tokenizer: Any = None,
        max_new_tokens: int = 20,
        every: TrainUnit | None = None,
        path: str | Path | None = None,
        seed: int = 0,
        **options: Any,
    ) -> None:
        check_count("GenerateSamples: max_new_tokens", max_new_tokens)
        if isinstance(prompts, str) or not len(prompts):
            raise ConfigError(f"GenerateSamples: prompts: expected a list of at least one prompt, got {prompts!r}")
        if tokenizer is None and any(isinstance(prompt, str) for prompt in prompts):
            raise ConfigError("GenerateSamples: prompts: texts need a tokenizer; give one, or lists of token ids")
        self.prompts = list(prompts)
        self.tokenizer = tokenizer
        self.every = Epochs(1) if every is None else every
        self.path = None if path is None else Path(path)
        self.seed = seed
        self.options = {"max_new_tokens": max_new_tokens, **options}
        self.samples: list[dict[str, Any]] = []
        self._last = Progress()
        self._is_loaded = False

    def on_train_start(self, context: TrainingContext) -> None:
        model: Any = context.model
        if not isinstance(model, Generates):
            kind = type(context.model).__name__
            raise ConfigError(f"GenerateSamples: a {kind} has no method generate; give a model of transformers")
        if is_new_run(context) and not self._is_loaded:
            self.samples, self._last = [], Progress()
        self._is_loaded = False

    def on_validation_end(self, context: TrainingContext, metrics: Mapping[str, float]) -> None:
        progress = context.progress
        if not self.every.due(self._last, progress):
            return
        self._last = progress.copy()
        position = {"epoch": progress.epoch, "batches": progress.batches}
        with evaluating(context, "predict"), _resharding(context):
            seed_everything(self.seed)
            fresh = [
                {**position, "prompt": number, **self._generate(context, prompt)}
                for number, prompt in enumerate(self.prompts)
            ]
        self.samples += fresh
        if self.path is not None and context.process.is_main:
            with self.path.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(sample, ensure_ascii=False) + "\n" for sample in fresh)

    def _generate(self, context: TrainingContext, prompt: Any) -> dict[str, Any]:
        model: Any = context.model
        # One prompt at a time: padding would change the outputs of some models.
        ids = self.tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt
        ids = torch.as_tensor(ids, device=context.device).reshape(1, -1)
        tokens = model.generate(ids, attention_mask=torch.ones_like(ids), **self.options)[0]
        if self.tokenizer is None:
            return {"ids": tokens.tolist()}
        return {"text": self.tokenizer.decode(tokens, skip_special_tokens=True)}

    def state_dict(self) -> dict[str, Any]:
        return {"samples": [dict(sample) for sample in self.samples], "last": self._last.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.samples, self._is_loaded = [dict(sample) for sample in state["samples"]], True
        self._last.load_state_dict(state["last"])


@contextmanager
def _resharding(context: TrainingContext) -> Iterator[None]:
    """Shard the blocks of the model again that stay gathered after a forward pass, as after a validation."""
    try:
        yield
    finally:
        if context.process.peers is not None and context.model is not None:
            from torch.distributed.fsdp import FSDPModule

            for module in context.model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
