from __future__ import annotations

import copy
import json
import math
import pickle
import resource
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.errors import ConfigError, UnknownNameError
from dovetail.history import History, LossTracker, RunHistory


def small_run() -> History:
    history = History()
    for epoch, (train, valid, accuracy) in enumerate([(0.9, 1.0, 0.5), (0.5, 0.6, 0.8), (0.3, 0.7, 0.75)], 1):
        history.extend_losses([train + 0.1, train - 0.1])
        history.record("train", {"loss": train}, epoch=epoch, batches=2 * epoch, updates=2 * epoch)
        history.record("valid", {"loss": valid, "accuracy": accuracy}, epoch=epoch, batches=2 * epoch)
    return history


# RunHistory


@pytest.mark.parametrize("kind", [RunHistory, History])
def test_the_history_keeps_every_metric_value_in_order(kind: type[RunHistory]) -> None:
    history = kind()
    history.update_metric("loss", 2)
    history.update_metric("loss", torch.tensor(1.5, requires_grad=True))
    assert history.get_metric_names() == {"loss"}
    assert history.get_metric_values("loss") == [2.0, 1.5]
    assert history.get_latest_metric("loss") == 1.5


@pytest.mark.parametrize("kind", [RunHistory, History])
def test_an_unknown_metric_has_no_values(kind: type[RunHistory]) -> None:
    assert kind().get_metric_values("loss") == []


@pytest.mark.parametrize("kind", [RunHistory, History])
def test_the_latest_value_of_an_unknown_metric_suggests_the_nearest(kind: type[RunHistory]) -> None:
    history = kind()
    history.update_metric("train_loss", 1.0)
    with pytest.raises(ValueError, match="unknown metric 'trainloss': did you mean 'train_loss'"):
        history.get_latest_metric("trainloss")


@pytest.mark.parametrize("kind", [RunHistory, History])
def test_the_latest_value_of_an_empty_history_raises_an_error(kind: type[RunHistory]) -> None:
    with pytest.raises(ValueError, match="'loss' has no value: nothing has been recorded yet"):
        kind().get_latest_metric("loss")


@pytest.mark.parametrize("kind", [RunHistory, History])
def test_reset_clears_the_history(kind: type[RunHistory]) -> None:
    history = kind()
    history.update_metric("loss", 1.0)
    history.reset()
    assert history.get_metric_names() == set()


def test_returned_values_are_copies() -> None:
    history = RunHistory()
    history.update_metric("loss", 1.0)
    history.get_metric_values("loss").clear()
    assert history.get_metric_values("loss") == [1.0]


# LossTracker


def test_the_average_is_weighted_by_samples() -> None:
    tracker = LossTracker()
    tracker.update(torch.tensor(1.0), batch_size=3)
    tracker.update(torch.tensor(2.0), batch_size=1)
    assert (tracker.average, tracker.total_loss, tracker.running_count) == (1.25, 5.0, 4)


def test_an_empty_tracker_averages_to_nan() -> None:
    tracker = LossTracker()
    assert math.isnan(tracker.average)
    assert math.isnan(tracker.loss_value)
    assert tracker.total_loss == 0.0


def test_tensors_and_numbers_mix_in_any_order() -> None:
    tracker = LossTracker()
    for loss in (1.0, torch.tensor(2.0), 3, torch.tensor(4.0, dtype=torch.float64)):
        tracker.update(loss)
    assert (tracker.average, tracker.loss_value) == (2.5, 4.0)


class Identity(torch.autograd.Function):
    """A node of the graph that holds on to an object."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, held: Any) -> torch.Tensor:
        ctx.held = held
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[torch.Tensor, None]:
        return gradient, None


class Activation:
    pass


def test_the_tracker_keeps_no_graph() -> None:
    tracker = LossTracker()
    activation = Activation()
    alive = weakref.ref(activation)
    loss = Identity.apply(torch.ones((), requires_grad=True), activation)  # type: ignore[no-untyped-call]
    tracker.update(loss)
    del activation
    assert alive() is not None
    del loss
    assert alive() is None


def test_a_loss_overwritten_in_place_keeps_its_recorded_value() -> None:
    tracker = LossTracker()
    loss = torch.tensor(1.0, dtype=torch.float64)
    tracker.update(loss)
    loss.fill_(7.0)
    assert (tracker.loss_value, tracker.average) == (1.0, 1.0)


def test_low_precision_losses_do_not_saturate_the_sum() -> None:
    tracker = LossTracker()
    loss = torch.tensor(1.0, dtype=torch.bfloat16)
    for _ in range(1000):
        tracker.update(loss)
    assert tracker.total_loss == 1000.0


def test_losses_of_inference_mode_mix_with_others() -> None:
    tracker = LossTracker()
    with torch.inference_mode():
        tracker.update(torch.tensor(1.0))
    tracker.update(torch.tensor(2.0, requires_grad=True) * 1)
    assert tracker.average == 1.5


def test_a_reset_tracker_equals_a_new_one() -> None:
    tracker = LossTracker()
    tracker.update(torch.tensor(3.0), 2)
    tracker.reset()
    tracker.update(1.0)
    assert (tracker.average, tracker.running_count) == (1.0, 1)


# History: recording and reading


def test_a_row_holds_stage_position_and_metrics() -> None:
    history = History()
    history.record("train", {"loss": torch.tensor(0.5), "correct": 3}, epoch=1, batches=10, updates=5)
    assert history.rows == [{"stage": "train", "epoch": 1, "batches": 10, "updates": 5, "loss": 0.5, "correct": 3.0}]


def test_metric_names_have_the_stage_and_positions_are_not_metrics() -> None:
    assert small_run().get_metric_names() == {"train_loss", "valid_loss", "valid_accuracy"}


def test_metric_values_are_views_of_the_rows() -> None:
    history = small_run()
    assert history.get_metric_values("valid_accuracy") == [0.5, 0.8, 0.75]
    assert history.get_latest_metric("valid_loss") == 0.7


def test_a_custom_metric_has_its_bare_name() -> None:
    history = small_run()
    history.update_metric("fid", 12)
    assert history.rows[-1] == {"stage": "custom", "fid": 12.0}
    assert history.get_latest_metric("fid") == 12.0


def test_a_metric_may_not_have_the_name_of_a_position() -> None:
    with pytest.raises(ConfigError, match="metric 'epoch' of stage 'train' has the same name as a position"):
        History().record("train", {"epoch": 1.0}, epoch=1)


def test_the_stage_of_the_batch_losses_is_reserved() -> None:
    with pytest.raises(ConfigError, match="'batches' is reserved"):
        History().record("batches", {"loss": 1.0})


@pytest.mark.parametrize("value", ["0.5", None])
def test_a_metric_that_is_not_a_number_is_named(value: Any) -> None:
    with pytest.raises(ConfigError, match=f"metric 'loss': expected a number or a tensor with one, got {value!r}"):
        History().record("train", {"loss": value})


def test_a_position_must_be_an_integer() -> None:
    with pytest.raises(TypeError):
        History().record("train", {"loss": 1.0}, epoch=0.5)  # type: ignore[arg-type]


def test_best_finds_the_row_of_the_smallest_or_largest_value() -> None:
    history = small_run()
    assert history.best("valid_loss", mode="min") is history.rows[3]
    assert history.best("valid_accuracy", mode="max") is history.rows[3]


def test_best_derives_the_mode_from_the_metric_name() -> None:
    history = small_run()
    assert history.best("valid_loss") is history.best("valid_loss", "min")
    assert history.best("valid_accuracy") is history.best("valid_accuracy", "max")


def test_best_requires_a_mode_for_an_ambiguous_name() -> None:
    history = History()
    history.record("valid", {"height": 2.0}, epoch=1)
    assert history.best("valid_height", "max") is history.rows[0]
    with pytest.raises(ConfigError, match="'valid_height': give mode='min' or mode='max'"):
        history.best("valid_height")


def test_best_is_the_earliest_of_equal_values_and_never_nan() -> None:
    history = History()
    for loss in (math.nan, 2.0, 1.0, 1.0):
        history.record("valid", {"loss": loss})
    assert history.best("valid_loss") is history.rows[2]
    assert history.best("valid_loss", "max") is history.rows[1]


def test_best_of_a_metric_without_values_is_none() -> None:
    assert small_run().best("test_loss") is None


def test_best_rejects_an_unknown_mode() -> None:
    with pytest.raises(ConfigError, match="expected 'min', 'max' or None, got 'maximum'"):
        small_run().best("valid_loss", "maximum")  # type: ignore[arg-type]


def test_last_is_the_newest_row_with_the_metric() -> None:
    history = small_run()
    assert history.last("train_loss") is history.rows[4]
    assert history.last("test_loss") is None


def test_length_and_iteration_cover_the_rows() -> None:
    history = small_run()
    assert len(history) == 6
    assert list(history) == history.rows


def test_columns_have_one_entry_per_row() -> None:
    history = History()
    history.record("train", {"loss": 0.5}, epoch=1)
    history.record("valid", {"accuracy": 0.9}, epoch=1)
    assert history.to_dict() == {
        "stage": ["train", "valid"],
        "epoch": [1, 1],
        "loss": [0.5, None],
        "accuracy": [None, 0.9],
    }


def test_the_data_frame_keeps_integers() -> None:
    history = small_run()
    frame = history.to_pandas()
    assert frame["updates"].dtype == "Int64"
    assert frame["accuracy"].dropna().tolist() == [0.5, 0.8, 0.75]
    assert frame["accuracy"].isna().sum() == 3


def test_histories_are_equal_by_content() -> None:
    first, second = small_run(), small_run()
    first.update_metric("x", math.nan)
    second.update_metric("x", math.nan)
    assert first == second
    second.extend_losses([0.0])
    assert first != second


def test_repr_shows_counts_and_latest_metrics() -> None:
    assert repr(small_run()) == ("History(6 rows, 6 batch losses: train_loss=0.3, valid_loss=0.7, valid_accuracy=0.75)")
    assert repr(History()) == "History(0 rows)"


# History: files

FLOATS = st.floats(allow_nan=True, allow_infinity=True)


@settings(max_examples=40)
@given(metrics=st.dictionaries(st.text(), FLOATS), losses=st.lists(FLOATS), epoch=st.integers())
def test_every_float_survives_the_file_and_the_state(
    tmp_path_factory: pytest.TempPathFactory, metrics: dict[str, float], losses: list[float], epoch: int
) -> None:
    metrics.pop("stage", None)
    metrics.pop("epoch", None)
    history = History()
    history.record("NaN", metrics, epoch=epoch)
    history.extend_losses(losses)
    path = tmp_path_factory.getbasetemp() / "every_float.jsonl"
    history.save(path)
    assert repr(History.load(path).rows) == repr(history.rows)
    assert repr(History.load(path).losses) == repr(history.losses)

    restored = History()
    restored.load_state_dict(json.loads(json.dumps(history.state_dict(), allow_nan=False)))
    assert repr(restored.rows) == repr(history.rows)
    assert repr(restored.losses) == repr(history.losses)


def test_the_file_is_strict_json_lines_after_a_header(tmp_path: Path) -> None:
    history = History()
    history.record("train", {"loss": math.nan, "up": math.inf, "down": -math.inf}, epoch=1)
    history.extend_losses([0.5, math.nan])
    history.save(tmp_path / "h.jsonl")
    assert (tmp_path / "h.jsonl").read_text().splitlines() == [
        '{"dovetail_history": 1}',
        '{"stage": "train", "epoch": 1, "loss": "NaN", "up": "Infinity", "down": "-Infinity"}',
        '{"stage": "batches", "losses": [0.5, "NaN"]}',
    ]


def test_many_batch_losses_are_written_in_several_lines(tmp_path: Path) -> None:
    history = History()
    history.extend_losses(range(2500))
    history.save(tmp_path / "h.jsonl")
    assert len((tmp_path / "h.jsonl").read_text().splitlines()) == 4
    assert History.load(tmp_path / "h.jsonl").losses.tolist() == list(range(2500))


def test_saving_creates_folders_and_no_other_file(tmp_path: Path) -> None:
    small_run().save(tmp_path / "a" / "b" / "h.jsonl")
    assert [path.name for path in (tmp_path / "a" / "b").iterdir()] == ["h.jsonl"]


def test_a_failed_save_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "h.jsonl"
    small_run().save(path)
    before = path.read_bytes()
    history = small_run()
    history.extend_losses(range(100_000))
    with full_disk(10_000), pytest.raises(OSError):
        history.save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_an_attached_file_holds_the_history_after_every_event(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "h.jsonl"
    history = small_run()
    history.attach(path)
    assert History.load(path) == history
    history.record("test", {"loss": 0.4}, epoch=3)
    assert History.load(path) == history
    history.extend_losses([0.1, 0.2])
    history.sync()
    assert History.load(path) == history
    history.extend_losses([0.3])
    history.update_metric("fid", 1.0)
    assert History.load(path) == history


def test_a_restored_history_writes_the_same_bytes(tmp_path: Path) -> None:
    whole, cut = History(), History()
    whole.attach(tmp_path / "whole.jsonl")
    for history in (whole, cut):
        history.extend_losses([0.5, 0.25])
        history.record("train", {"loss": 0.375}, epoch=1)
        history.extend_losses([0.125])
        history.sync()
    resumed = History()
    resumed.load_state_dict(cut.state_dict())
    resumed.attach(tmp_path / "resumed.jsonl")
    for history in (whole, resumed):
        history.extend_losses([0.0])
        history.record("train", {"loss": 0.0625}, epoch=2)
    assert (tmp_path / "whole.jsonl").read_bytes() == (tmp_path / "resumed.jsonl").read_bytes()


def test_a_detached_file_is_no_longer_written(tmp_path: Path) -> None:
    history = small_run()
    history.attach(tmp_path / "h.jsonl")
    history.detach()
    history.record("test", {"loss": 0.4})
    assert History.load(tmp_path / "h.jsonl") == small_run()


def test_an_attached_file_keeps_its_folder_after_chdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    history = History()
    history.attach("h.jsonl")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    history.record("test", {"loss": 0.4})
    assert History.load(tmp_path / "h.jsonl") == history


def test_a_truncated_last_line_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "h.jsonl"
    history = small_run()
    history.attach(path)
    whole = path.read_bytes()
    history.record("test", {"loss": 0.123456789}, epoch=3)
    added = path.read_bytes()[len(whole) :]
    for cut in range(len(added) - 1):
        path.write_bytes(whole + added[:cut])
        assert History.load(path) == small_run()


def test_trailing_zero_bytes_are_ignored(tmp_path: Path) -> None:
    path = tmp_path / "h.jsonl"
    small_run().save(path)
    path.write_bytes(path.read_bytes() + bytes(512))
    assert History.load(path) == small_run()


def test_a_complete_last_line_without_newline_is_read(tmp_path: Path) -> None:
    path = tmp_path / "h.jsonl"
    small_run().save(path)
    path.write_bytes(path.read_bytes().rstrip(b"\n"))
    assert History.load(path) == small_run()


def test_resuming_from_a_checkpoint_neither_loses_nor_repeats_rows(tmp_path: Path) -> None:
    path = tmp_path / "h.jsonl"
    straight = small_run()
    straight.record("test", {"loss": 0.4}, epoch=3)

    lost = small_run()
    lost.attach(path)
    checkpoint = json.loads(json.dumps(lost.state_dict()))
    lost.record("test", {"loss": 9.9}, epoch=3)
    lost.extend_losses([9.9])
    with path.open("ab") as file:
        file.write(b'{"stage": "tes')

    resumed = History()
    resumed.load_state_dict(checkpoint)
    resumed.attach(path)
    assert History.load(path) == small_run()
    resumed.record("test", {"loss": 0.4}, epoch=3)
    assert History.load(path) == straight


def test_a_history_attached_before_it_is_restored_writes_the_same_file(tmp_path: Path) -> None:
    history = History()
    history.attach(tmp_path / "h.jsonl")
    history.load_state_dict(small_run().state_dict())
    assert History.load(tmp_path / "h.jsonl") == small_run()


def test_reset_empties_the_attached_file(tmp_path: Path) -> None:
    history = small_run()
    history.attach(tmp_path / "h.jsonl")
    history.reset()
    assert History.load(tmp_path / "h.jsonl") == History()


def test_a_row_that_did_not_fit_on_the_disk_leaves_no_trace(tmp_path: Path) -> None:
    path = tmp_path / "h.jsonl"
    history = small_run()
    history.attach(path)
    with full_disk(path.stat().st_size + 10), pytest.raises(OSError):
        history.record("test", {"loss": 0.4}, epoch=3)
    assert history == small_run()
    assert History.load(path) == history
    history.record("test", {"loss": 0.4}, epoch=3)
    assert History.load(path) == history


@pytest.mark.parametrize("make_copy", [copy.deepcopy, lambda history: pickle.loads(pickle.dumps(history))])
def test_a_copied_history_does_not_write_to_the_file(tmp_path: Path, make_copy: Callable[[Any], Any]) -> None:
    history = small_run()
    history.attach(tmp_path / "h.jsonl")
    twin = make_copy(history)
    assert twin == history
    twin.record("test", {"loss": 0.4})
    assert History.load(tmp_path / "h.jsonl") == history


def test_killing_the_process_keeps_every_row(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys\n"
        "from dovetail.history import History\n"
        "history = History(); history.attach(sys.argv[1])\n"
        "for epoch in range(5): history.record('train', {'loss': epoch}, epoch=epoch)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    path = tmp_path / "h.jsonl"
    result = subprocess.run([sys.executable, "-c", program, str(path)], check=False)
    assert result.returncode == -signal.SIGKILL
    assert History.load(path).get_metric_values("train_loss") == [0.0, 1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize("content", ["", "epoch,loss\n1,0.5\n", '{"stage": "train"}\n', "[1]\n", "\x80\n"])
def test_a_foreign_history_file_is_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "h.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"h\.jsonl, line 1: not a Dovetail history"):
        History.load(path)


def test_a_future_history_format_is_named(tmp_path: Path) -> None:
    path = tmp_path / "h.jsonl"
    path.write_text('{"dovetail_history": 2}\n')
    with pytest.raises(ConfigError, match=r"h\.jsonl, line 1: a history of format 2, this Dovetail reads"):
        History.load(path)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("not json", "expected a JSON object with a 'stage'"),
        ("[]", "expected a JSON object with a 'stage'"),
        ('{"loss": 1.0}', "expected a JSON object with a 'stage'"),
        ('{"stage": "train", "loss": "low"}', "'loss' should be a number, not 'low'"),
        ('{"stage": "train", "loss": [1.0]}', r"'loss' should be a number, not \[1.0\]"),
        ('{"stage": "batches", "losses": 1.0}', "expected the batch losses as a list of floats"),
    ],
)
def test_a_damaged_line_is_named_by_its_number(tmp_path: Path, line: str, complaint: str) -> None:
    path = tmp_path / "h.jsonl"
    path.write_text(f'{{"dovetail_history": 1}}\n{{"stage": "train"}}\n{line}\n{{"stage": "train"}}\n')
    with pytest.raises(ConfigError, match=rf"h\.jsonl, line 3: {complaint}"):
        History.load(path)


def test_attaching_does_not_destroy_a_foreign_file(tmp_path: Path) -> None:
    path = tmp_path / "thesis.txt"
    path.write_text("the only copy\n")
    with pytest.raises(ConfigError, match=r"thesis\.txt, line 1: not a Dovetail history"):
        History().attach(path)
    assert path.read_text() == "the only copy\n"


def test_attaching_to_an_empty_file_works(tmp_path: Path) -> None:
    (tmp_path / "h.jsonl").touch()
    history = small_run()
    history.attach(tmp_path / "h.jsonl")
    assert History.load(tmp_path / "h.jsonl") == history


def test_the_history_module_imports_without_torch() -> None:
    program = "import sys, dovetail.history; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


# History: pictures


def test_the_plot_is_an_image_and_does_not_use_pyplot(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from dovetail.history import History\n"
        "history = History()\n"
        "history.record('valid', {'loss': 1.0, 'accuracy': float('nan'), 'lr': 0.1, 'speed': 9}, epoch=1)\n"
        "history.update_metric('val_loss', 2.0)\n"
        "history.plot(sys.argv[1])\n"
        "sys.exit('matplotlib.pyplot' in sys.modules)\n"
    )
    path = tmp_path / "plots" / "curves.png"
    assert subprocess.run([sys.executable, "-c", program, str(path)], check=False).returncode == 0
    assert path.read_bytes().startswith(b"\x89PNG")


def test_the_plot_marks_the_best_validation(tmp_path: Path) -> None:
    small_run().plot(tmp_path / "curves.svg", names=["valid_loss", "valid_accuracy"])
    picture = (tmp_path / "curves.svg").read_text()
    assert "valid, best 0.6 " in picture
    assert "valid, best 0.8 " in picture
    assert "train" not in picture


def test_an_unknown_metric_in_a_plot_suggests_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'valid_loss'"):
        small_run().plot(tmp_path / "curves.png", names=["val_loss"])


def test_a_plot_without_a_path_returns_a_figure_for_notebooks() -> None:
    figure = small_run().plot()
    assert figure.axes[0].get_title(loc="left") == "loss"
    assert figure._repr_png_().startswith(b"\x89PNG")


def test_a_notebook_shows_the_last_rows_of_a_history() -> None:
    history = History()
    for epoch in range(1, 23):
        history.record("<b>", {"loss": 1 / 3}, epoch=epoch)
    shown = history._repr_html_()
    assert shown.count('<tr style="text-align:right">') == 21
    assert "<td>&lt;b&gt;</td><td>22</td><td>0.3333</td>" in shown
    assert "2 earlier rows" in shown


def test_plotting_an_empty_history_raises_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot draw an empty history"):
        History().plot(tmp_path / "curves.png")


class full_disk:
    """A disk that fills up when a file reaches `size` bytes: the kernel's limit on file sizes."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __enter__(self) -> None:
        self.handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        self.limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (self.size, self.limit[1]))

    def __exit__(self, *error: object) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, self.limit)
        signal.signal(signal.SIGXFSZ, self.handler)


def test_a_history_is_not_written_with_the_suffix_of_a_table(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"history\.csv: a history is written as JSON lines.*to_pandas"):
        History().save(tmp_path / "history.csv")
    assert list(tmp_path.iterdir()) == []
