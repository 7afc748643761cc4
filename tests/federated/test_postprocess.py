"""Chains: order and reverse, seeds, state, sizes, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from safetensors.torch import load, save

from dovetail.errors import ConfigError, DataError, UnknownNameError
from dovetail.federated.messages import Task, Update, Weights
from dovetail.federated.postprocess import (
    QSGD,
    Bfloat16,
    Chain,
    Gathering,
    NormClip,
    PairwiseMasks,
    Postprocessor,
    Quantization,
    TopK,
    Upload,
    Weighting,
    Zstd,
    postprocessors,
)


@dataclass
class Noted(Postprocessor):
    """Records the side that called it."""

    name: str
    calls: list[str]

    def encode(self, update: Update, upload: Upload) -> Update:
        self.calls.append(f"encode {self.name}")
        return update

    def decode(self, update: Update, gathering: Gathering) -> Update:
        self.calls.append(f"decode {self.name}")
        return update

    def combine(self, updates: Sequence[Update], gathering: Gathering) -> Sequence[Update]:
        self.calls.append(f"combine {self.name}")
        return updates

    def aggregated(self, mean: Weights, updates: Sequence[Update], gathering: Gathering) -> Weights:
        self.calls.append(f"aggregated {self.name}")
        return mean


class Dice(Postprocessor):
    """Sends a random number, adds another to the mean, and counts in the client's state."""

    def encode(self, update: Update, upload: Upload) -> Update:
        upload.state["rounds"] = upload.state.get("rounds", 0) + 1
        return update.with_delta(
            {**update.delta, f"dice{len(update.delta)}": torch.rand(1, generator=upload.generator())}
        )

    def aggregated(self, mean: Weights, updates: Sequence[Update], gathering: Gathering) -> Weights:
        return {**mean, f"dice{len(mean)}": torch.rand(1, generator=gathering.generator())}


WEIGHTS = {"w": torch.zeros(40, 5), "b": torch.zeros(5), "steps": torch.tensor(0)}


def update(seed: int = 0, client_id: int = 1) -> Update:
    generator = torch.Generator().manual_seed(seed)
    delta = {"w": torch.randn(40, 5, generator=generator), "b": torch.randn(5, generator=generator)}
    return Update(client_id, 1, 10, delta={**delta, "steps": torch.tensor(7)})


def task(seed: int = 0, client_id: int = 1, **config: Any) -> Task:
    return Task(1, client_id, WEIGHTS, seed=seed, config=config)


GATHERING = Gathering(1, [1, 2, 3], WEIGHTS)


def test_a_chain_runs_in_order_upward_and_in_reverse_downward() -> None:
    calls: list[str] = []
    chain = Chain([Noted("a", calls), Noted("b", calls)])
    sent = chain.encode(update(), task(), {})
    updates, _ = chain.decode([sent, sent], GATHERING)
    chain.aggregated(updates[0].delta, updates, GATHERING)
    assert calls == [
        *("encode a", "encode b"),
        *("decode b", "decode b", "combine b", "decode a", "decode a", "combine a"),
        *("aggregated b", "aggregated a"),
    ]


def test_an_empty_chain_changes_nothing() -> None:
    chain, sent, state = Chain(), update(), dict[str, Any]()
    assert chain.encode(sent, task(), state) is sent
    assert chain.decode([sent], GATHERING) == ([sent], [])
    assert chain.aggregated(sent.delta, [sent], GATHERING) is sent.delta
    assert chain.pack(WEIGHTS, seed=0) is WEIGHTS
    assert state == chain.state_dict() == {}


def test_every_postprocessor_draws_separate_numbers_from_the_task_seed() -> None:
    chain = Chain([Dice(), Dice()])
    first, again, other = (chain.encode(update(), task(seed), {}).delta for seed in (3, 3, 4))
    assert first["dice3"] == again["dice3"]
    assert first["dice4"] == again["dice4"]
    assert len({float(value) for value in (first["dice3"], first["dice4"], other["dice3"], other["dice4"])}) == 4


def test_every_postprocessor_draws_separate_numbers_from_the_round_seed() -> None:
    mean = Chain([Dice(), Dice()]).aggregated({}, [], GATHERING)
    assert mean["dice0"] != mean["dice1"]


def test_every_postprocessor_has_separate_state() -> None:
    chain, state = Chain([Dice(), "weighting", Dice()]), {"algorithm": {"c": 1}}
    for _ in range(2):
        chain.encode(update(), task(), state)
    assert state == {"algorithm": {"c": 1}, "postprocessors": {"0": {"rounds": 2}, "2": {"rounds": 2}}}


def test_a_given_state_is_not_changed_in_place() -> None:
    before = {"postprocessors": {"0": {"rounds": 1}}}
    given = dict(before)
    Chain([Dice()]).encode(update(), task(), given)
    assert before == {"postprocessors": {"0": {"rounds": 1}}}
    assert given == {"postprocessors": {"0": {"rounds": 2}}}


def test_postprocessors_report_sizes() -> None:
    sent = Chain([{"quantization": {"bits": 8}}]).encode(update(), task(), {})
    assert sent.metrics["raw_bytes"] == 205 * 4 + 8
    # One byte per number, two floats of range per tensor, and the whole number.
    assert sent.metrics["sent_bytes"] == 205 + 2 * 8 + 8 == sent.num_bytes


CODECS = [Quantization(8), Quantization(4), QSGD(), Bfloat16(), TopK(0.1), Zstd()]


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_codecs_restore_names_shapes_and_dtypes(codec: Postprocessor) -> None:
    weights = {
        "a/b": torch.randn(3, 5),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "half": torch.randn(7).half(),
        "brain": torch.randn(2, 1, 3).bfloat16(),
        "empty": torch.empty(0, 3),
        "whole": torch.arange(4),
        "flag": torch.tensor(True),
    }
    back = Chain([codec]).unpack(Chain([codec]).pack(weights, seed=1))
    assert list(back) == list(weights)
    assert {n: (v.shape, v.dtype) for n, v in back.items()} == {n: (v.shape, v.dtype) for n, v in weights.items()}
    assert torch.equal(back["whole"], weights["whole"])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_codecs_keep_values_that_are_not_finite(codec: Postprocessor, bad: float) -> None:
    value = torch.randn(100)
    value[17] = bad
    back = Chain([codec]).unpack(Chain([codec]).pack({"w": value}, seed=1))
    assert not back["w"].isfinite().all()


@pytest.mark.parametrize("step", [*CODECS, PairwiseMasks()], ids=repr)
def test_encoded_updates_can_be_serialized_as_arrays(step: Postprocessor) -> None:
    chain = Chain([step])
    sent = chain.encode(update(), task(cohort=[1]), {})
    gathering = Gathering(1, [1], WEIGHTS)
    (straight,), _ = chain.decode([sent], gathering)
    arrays = {name: value.numpy().copy() for name, value in sent.delta.items()}
    for delta in (load(save(dict(sent.delta))), {name: torch.from_numpy(value) for name, value in arrays.items()}):
        (carried,), faults = chain.decode([sent.with_delta(delta)], gathering)
        assert not faults
        assert all(torch.equal(carried.delta[name], value) for name, value in straight.delta.items())


def test_lossless_and_lossy_codecs_can_be_chained() -> None:
    lossy, all_of_them = Chain([TopK(0.2), Quantization(8)]), Chain([TopK(0.2), Quantization(8), Zstd()])
    sent = all_of_them.encode(update(), task(), {})
    assert set(sent.delta) == {"zstd"}
    (there,), _ = lossy.decode([lossy.encode(update(), task(), {})], GATHERING)
    (here,), faults = all_of_them.decode([sent], GATHERING)
    assert not faults
    assert all(torch.equal(here.delta[name], there.delta[name]) for name in WEIGHTS)


def test_an_undecodable_update_is_a_fault_and_the_others_are_used() -> None:
    chain = Chain([TopK(0.2), Quantization(4), Zstd()])
    good = chain.encode(update(client_id=1), task(), {})
    bad = Update(2, 1, 10, delta={"zstd": torch.zeros(9, dtype=torch.uint8)})
    plain = update(client_id=3)
    updates, faults = chain.decode([bad, good, plain], GATHERING)
    assert [each.client_id for each in updates] == [1]
    assert [(fault.client_id, fault.round, fault.kind) for fault in faults] == [
        (2, 1, "wrong shape"),
        (3, 1, "wrong shape"),
    ]
    assert faults[0].reason.startswith("client 2: Zstd cannot read its update: no zstd frame: ")


def test_weights_are_encoded_once_for_all_clients() -> None:
    chain = Chain(["qsgd", "zstd"])
    packed = chain.pack(update().delta, seed=5)
    assert torch.equal(packed["zstd"], chain.pack(update().delta, seed=5)["zstd"])
    assert list(chain.unpack(packed)) == list(WEIGHTS)


def test_only_codecs_apply_to_weights_sent_to_clients() -> None:
    with pytest.raises(ConfigError, match="NormClip processes updates only: inbound_processors accepts codecs only"):
        Chain([NormClip(1.0), "qsgd"]).pack(WEIGHTS, seed=0)


@pytest.mark.parametrize("encoding", [QSGD(), PairwiseMasks()])
def test_postprocessors_that_need_model_tensors_precede_codecs(encoding: Postprocessor) -> None:
    with pytest.raises(
        ConfigError, match=f"NormClip after {type(encoding).__name__} would not see the model's tensors"
    ):
        Chain([encoding, NormClip(1.0)])


def test_postprocessors_are_given_as_objects_names_or_names_with_arguments() -> None:
    chain = Chain([Weighting("uniform"), "weighting", {"norm_clip": {"max_norm": 2.0}}, {"zstd": None}])
    assert chain.steps == (Weighting("uniform"), Weighting(), NormClip(2.0), Zstd())
    assert len(chain) == 4


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("qsdg", "unknown postprocessor 'qsdg': did you mean 'qsgd'?"),
        ({"top_k": {"ration": 0.1}}, "unknown argument of postprocessor 'top_k' 'ration': did you mean 'ratio'?"),
        ("norm_clip", "postprocessor 'norm_clip' needs max_norm"),
        ({"top_k": 3}, "postprocessor 'top_k': expected its arguments by name, got 3"),
        ({"top_k": {}, "zstd": {}}, "postprocessor: expected a name, or one name with its arguments, got"),
        (5, "postprocessor: expected a name, or one name with its arguments, got 5"),
    ],
)
def test_invalid_postprocessor_lists_raise_one_sentence_errors(spec: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Chain([spec])
    assert str(caught.value).startswith(message)


def test_the_postprocessor_names_of_plato_have_their_meaning() -> None:
    names = {name: postprocessors.get(name) for name in ("model_quantize", "model_quantize_qsgd", "model_compress")}
    assert names == {"model_quantize": Bfloat16, "model_quantize_qsgd": QSGD, "model_compress": Zstd}
    with pytest.raises(UnknownNameError, match="did you mean 'model_compress'"):
        postprocessors.get("model_decompress")


def test_tensors_not_written_by_the_codec_are_rejected() -> None:
    with pytest.raises(DataError, match="'w' was not written by QSGD"):
        QSGD().unpack({"w": torch.zeros(1)})


def test_the_server_state_of_postprocessors_is_checkpointed() -> None:
    chain, resumed = (Chain(["weighting", "gaussian_noise"]) for _ in range(2))
    chain.aggregated({"w": torch.zeros(1)}, [update()], GATHERING)
    assert set(chain.state_dict()) == {"1"}
    resumed.load_state_dict(chain.state_dict())
    assert resumed.state_dict() == chain.state_dict()
