"""Claims about devices that lack a precision: bfloat16 only by emulation."""

from __future__ import annotations

import torch
from pretend_device import NAME, PretendDevice, emulated_bfloat16
from run_claims import make_trainer
from styles import make_batches

from dovetail import Epochs
from dovetail.accelerators import supports_bfloat16
from dovetail.trainers import AMPTrainer
from dovetail.trainers.precision import Precision


def auto_precision_is_float16_if_bfloat16_is_emulated() -> None:
    assert Precision("auto", NAME).dtype is torch.bfloat16
    with emulated_bfloat16(), PretendDevice():
        assert torch.get_device_module(NAME).is_bf16_supported()
        assert not supports_bfloat16(NAME)
        assert Precision("auto", NAME).dtype is torch.float16
        trainer = AMPTrainer(make_trainer(), precision=["bf16", "fp16"])
        trainer.fit(make_batches(), max_length=Epochs(1))
        assert trainer._get_precision().dtype is torch.float16


PRECISION_CLAIMS = {
    claim.__name__.replace("_", " "): claim for claim in (auto_precision_is_float16_if_bfloat16_is_emulated,)
}
