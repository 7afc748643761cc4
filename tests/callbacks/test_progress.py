from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from rich.console import Console
from rich.text import Text

from dovetail import Trainer
from dovetail.callbacks import EMA, Callbacks, LambdaCallback, ProgressDisplay
from dovetail.callbacks.progress import _Notebook
from dovetail.errors import ConfigError
from dovetail.trainers.context import TrainingContext
from dovetail.units import Batches, Epochs

ALWAYS, HARDLY = 1e9, 1e-9


def log() -> Console:
    return Console(file=io.StringIO(), width=40, force_terminal=False)


def terminal(width: int = 120) -> Console:
    # With an explicit terminal type, because TERM may be "dumb" when the tests run.
    environment = {"TERM": "xterm-256color"}
    return Console(
        file=io.StringIO(), width=width, height=24, force_terminal=True, color_system=None, _environ=environment
    )


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def untimed(text: str) -> list[str]:
    """Return the lines without the seconds at their ends."""
    return [re.sub(r"  \d+\.\d+s$", "", line) for line in text.splitlines()]


def screen(text: str, width: int = 120) -> list[str]:
    """Return the lines that a terminal shows after `text`: the few controls that rich uses, applied."""
    lines, row = [""], 0
    for token in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", text):
        if token == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif token.endswith("A") and token.startswith("\x1b"):
            row -= int(token[2:-1])
        elif token == "\x1b[2K":
            lines[row] = ""
        elif not token.startswith(("\x1b", "\r")):
            lines[row] += token
    return [line.rstrip() for line in lines if line.strip()]


def frames(console: Console) -> list[str]:
    """Return every bar that was drawn."""
    return re.findall(r"epoch[^\r\n\x1b]*  lr 0\.1[^\r\n\x1b]*", written(console))


def test_the_progress_log_has_one_line_per_epoch(scripted: Callable[..., Any]) -> None:
    console = log()
    trainer = scripted(ProgressDisplay(console=console)).script({"loss": 0.5, "accuracy": 0.25}, {"loss": 2e-4})
    history = trainer.fit(max_length=Epochs(2))
    first, second = history.get_metric_values("train_loss")
    assert untimed(written(console)) == [
        f"epoch 1/2  train loss {first:.4f}  valid loss 0.5000 accuracy 0.2500",
        f"epoch 2/2  train loss {second:.4f}  valid loss 2.00e-04",
    ]


def test_epoch_numbers_are_aligned(make: Callable[..., Any]) -> None:
    console = log()
    make(ProgressDisplay(console=console)).fit(max_length=Epochs(10))
    lines = untimed(written(console))
    assert (lines[0][:11], lines[9][:11]) == ("epoch  1/10", "epoch 10/10")
    assert len({len(line) for line in lines}) == 1


def test_a_redirected_output_gets_lines_even_with_forced_colour(
    make: Callable[..., Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    make(ProgressDisplay(ALWAYS)).fit(max_length=Epochs(3))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert not any("\x1b[2K" in line or "━" in line for line in lines)


def test_the_reason_of_a_stop_is_the_last_line(scripted: Callable[..., Any]) -> None:
    console = log()
    stop = LambdaCallback(on_epoch_end=lambda context, _: context.stop("enough"))
    scripted(ProgressDisplay(console=console), stop).script(1.0).fit(max_length=Epochs(3))
    assert written(console).splitlines()[-1] == "stopped: enough"


def test_a_validation_inside_an_epoch_has_a_line(scripted: Callable[..., Any]) -> None:
    console = log()
    trainer = scripted(ProgressDisplay(console=console)).script(3.0, 2.0)
    trainer.fit(max_length=Batches(4), validation_period=Batches(3))
    lines = untimed(written(console))
    first, second = trainer.context.history.losses[:3], trainer.context.history.losses
    assert lines == [
        f"epoch 1/1  batch 3/5  train loss {sum(first) / 3:.4f}  valid loss 3.0000",
        f"epoch 1/1  batch 4/5  train loss {sum(second) / 4:.4f}  valid loss 2.0000",
    ]


def test_an_unfinished_epoch_has_a_line(make: Callable[..., Any]) -> None:
    console = log()
    history = make(ProgressDisplay(console=console)).fit(max_length=Batches(7))
    mean = sum(history.losses[5:]) / 2
    assert untimed(written(console))[1:] == [f"epoch 2/2  batch 2/5  train loss {mean:.4f}"]


@pytest.mark.parametrize(("period", "count"), [(Batches(5), 2), (Epochs(1), 2), (Epochs(2), 3)])
def test_a_validation_at_the_end_of_an_epoch_is_in_its_line(
    scripted: Callable[..., Any], period: Any, count: Any
) -> None:
    console = log()
    num_epochs = 3 if period == Epochs(2) else 2
    trainer = scripted(ProgressDisplay(console=console)).script(3.0, 2.0, 1.0)
    trainer.fit(max_length=Epochs(num_epochs), validation_period=period)
    shown = re.findall(r"valid loss (\d)", written(console))
    assert shown == ["3", "2"]
    trains = [line for line in written(console).splitlines() if "train loss" in line]
    assert len(trains) == num_epochs == count


def test_the_progress_bar_shows_all_values(make: Callable[..., Any]) -> None:
    console = terminal()
    make(ProgressDisplay(ALWAYS, console), print_every=1).fit(max_length=Epochs(2))
    bars = frames(console)
    assert re.fullmatch(
        r"epoch 1/2  ━+ +3/5  loss \d\.\d{4}  lr 0\.1  \d+ it/s  eta \d:\d\d\s*",
        next(bar for bar in bars if "3/5" in bar),
    )
    assert {bar[:9] for bar in bars} == {"epoch 1/2", "epoch 2/2"}


def test_the_bar_is_removed_at_the_end_and_the_lines_remain(scripted: Callable[..., Any]) -> None:
    console = terminal()
    trainer = scripted(ProgressDisplay(ALWAYS, console), print_every=1).script(2.0, 1.0)
    trainer.fit(max_length=Epochs(2))
    lines = screen(written(console))
    assert [line[:9] for line in lines] == ["epoch 1/2", "epoch 2/2"]
    assert all("valid loss" in line and "━" not in line for line in lines)
    assert frames(console)


def test_a_running_validation_is_shown(make: Callable[..., Any], data: Any) -> None:
    console, seen = terminal(), []

    def test_step(trainer: Any, batch: Any) -> dict[str, torch.Tensor]:
        seen.append(screen(written(console))[-1])
        return {"loss": torch.tensor(1.0)}

    make(ProgressDisplay(ALWAYS, console), print_every=1, test_step=test_step, metrics=[]).fit(
        None, data, max_length=Epochs(1)
    )
    assert re.fullmatch(r"epoch 1/1  ━+  5/5  loss \d\.\d{4}  validating", seen[0])


def test_redrawing_the_bar_is_throttled(make: Callable[..., Any]) -> None:
    console = terminal()
    make(ProgressDisplay(HARDLY, console), print_every=1).fit(max_length=Epochs(4))
    assert len(frames(console)) == 1
    assert len(screen(written(console))) == 4


def test_a_narrow_terminal_gets_one_line_with_fewer_metrics(make: Callable[..., Any]) -> None:
    console = terminal(width=60)

    def train_step(trainer: Any, batch: Any) -> dict[str, Any]:
        loss = trainer.criterion(trainer.model(batch[0]), batch[1])
        return {"loss": loss, "first_metric": loss, "second_metric": loss}

    make(ProgressDisplay(ALWAYS, console), print_every=1, train_step=train_step).fit(max_length=Epochs(1))
    bar = next(bar for bar in frames(console) if "3/5" in bar)
    assert len(bar) <= 60
    assert "loss" in bar
    assert "second_metric" not in bar


def test_without_a_known_length_the_bar_shows_a_count(make: Callable[..., Any], data: Any) -> None:
    class Endless:
        def __iter__(self) -> Iterator[Any]:
            return iter([data, data, data])

    console = terminal()
    make(ProgressDisplay(ALWAYS, console), print_every=1).fit(Endless(), max_length=Epochs(1))
    assert re.search(r"epoch 1/1  batch 2  loss \d\.\d{4}  lr 0\.1", written(console))


def test_a_loss_that_is_not_finite_is_red() -> None:
    from dovetail.callbacks.progress import _measure

    assert [str(span.style) for span in _measure("loss", float("nan")).spans] == ["dim", "bold red"]


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_an_error_clears_the_bar_and_is_raised(make: Callable[..., Any], error: Any) -> None:
    console, before = terminal(), sys.stdout

    def fail(context: TrainingContext, output: Any) -> None:
        if context.progress.batches == 7:
            raise error

    trainer = make(ProgressDisplay(ALWAYS, console), LambdaCallback(on_step_end=fail), print_every=1)
    with pytest.raises(error):
        trainer.fit(max_length=Epochs(3))
    assert [line[:9] for line in screen(written(console))] == ["epoch 1/3"]
    assert written(console).rindex("\x1b[?25h") > written(console).rindex("\x1b[?25l")
    assert sys.stdout is before


def test_text_printed_during_training_is_kept(make: Callable[..., Any]) -> None:
    console = terminal()
    speak = LambdaCallback(on_step_end=lambda context, _: print("hello", context.progress.batches))
    make(ProgressDisplay(ALWAYS, console), speak, print_every=1).fit(max_length=Epochs(1))
    lines = screen(written(console))
    assert "hello 5" in lines
    assert lines[-1].startswith("epoch 1/1")


def test_an_epoch_resumed_in_its_middle_is_shown_from_there(make: Callable[..., Any]) -> None:
    started = make()
    started.fit(max_length=Batches(8))
    console = terminal()
    resumed = make(ProgressDisplay(ALWAYS, console), print_every=1)
    resumed.load_state_dict(started.state_dict())
    resumed.fit(max_length=Epochs(2))
    assert re.search(r"epoch 2/2 .*4/5", frames(console)[0])


def test_a_notebook_has_one_output_that_is_updated(make: Callable[..., Any]) -> None:
    outputs: list[list[Any]] = []

    class Handle:
        def update(self, content: Any, *, raw: Any) -> None:
            assert raw
            outputs[-1].append(content)

    def display(content: Any, *, raw: Any, display_id: Any) -> Handle:
        assert raw
        assert display_id
        outputs.append([content])
        return Handle()

    notebook = _Notebook(1e-9, display)
    for number in range(120):
        notebook.print(Text(f"line {number}"))
    notebook.show(Text("the bar"))
    during = outputs[0][-1]
    notebook.close()
    after = outputs[0][-1]
    assert len(outputs) == 1
    assert during["text/plain"].split("\n")[0] == "… 70 earlier lines"
    assert "the bar" in during["text/html"]
    assert "the bar" not in after["text/html"]
    assert "line 119" in after["text/plain"]


def test_short_epochs_do_not_flood_a_notebook() -> None:
    messages: list[Any] = []

    class Handle:
        def update(self, content: Any, *, raw: Any) -> None:
            messages.append(content)

    def display(content: Any, *, raw: Any, display_id: Any) -> Handle:
        messages.append(content)
        return Handle()

    notebook = _Notebook(1e9, display)
    for number in range(1000):
        notebook.print(Text(f"line {number}"))
    notebook.close()
    assert len(messages) == 2
    assert "line 999" in messages[-1]["text/plain"]


def test_the_progress_display_runs_no_hook_per_step() -> None:
    callbacks = Callbacks([ProgressDisplay])
    assert not callbacks.on_step_start + callbacks.on_step_end + callbacks.on_update + callbacks.on_gradients


def test_the_progress_display_does_not_change_weights(make: Callable[..., Any]) -> None:
    plain, shown = make(), make(ProgressDisplay(ALWAYS, terminal()), print_every=1)
    for trainer in (plain, shown):
        trainer.fit(max_length=Epochs(2))
    assert torch.equal(plain.model[0].weight, shown.model[0].weight)


def test_an_invalid_refresh_rate_is_rejected() -> None:
    with pytest.raises(ConfigError, match="refresh_per_second: expected more than 0, got 0"):
        ProgressDisplay(0)


@pytest.mark.parametrize(("validates_average", "label"), [(True, "valid (EMA) loss"), (False, "valid loss")])
def test_a_line_marks_a_validation_of_the_ema_weights(validates_average: bool, label: str) -> None:
    console = log()
    x = torch.randn(8, 2, generator=torch.Generator().manual_seed(0))
    callbacks = [EMA(validate_with_average=validates_average), ProgressDisplay(console=console)]
    trainer = Trainer(torch.nn.Linear(2, 2), "cpu", callbacks=callbacks, verbose=False)
    trainer.fit((x, (x[:, 0] > 0).long()), (x, (x[:, 0] > 0).long()), max_length=Epochs(1))
    assert label in written(console)
