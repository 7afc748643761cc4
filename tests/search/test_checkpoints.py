"""The checkpoints of trials, as those who run them see them."""

from __future__ import annotations

from pathlib import Path

import pytest

from dovetail.search.checkpoints import checkpoints_of, latest_checkpoint, remove_surplus


@pytest.mark.parametrize(
    "manifest",
    [
        # Of a web page, of anything.
        '{"name": "app", "icons": []}',
        "[]",
        "null",
        "not JSON",
        # Of ours, and damaged.
        '{"format": "dovetail-files"}',
        '{"format": "dovetail-files", "created": 3, "metadata": []}',
        '{"format": "dovetail-files", "created": "2026-01-01", "metadata": {}}',
        '{"format": "dovetail-files", "created": "2026-01-01", "metadata": {}, "files": {"a": {"size": 1}}}',
    ],
)
def test_a_folder_of_a_trial_that_is_no_checkpoint_is_left_alone(tmp_path: Path, manifest: str) -> None:
    (tmp_path / "pages" / "files").mkdir(parents=True)
    (tmp_path / "pages" / "files" / "a").touch()
    (tmp_path / "pages" / "manifest.json").write_text(manifest)
    assert latest_checkpoint(tmp_path) is None
    rules = {"experiment_best": 0, "trial_best": 0, "trial_latest": 1}
    assert remove_surplus({tmp_path: {}}, [tmp_path], **rules, smaller_is_better=True) == []
    assert (tmp_path / "pages" / "manifest.json").exists()


def test_a_manifest_that_is_not_ours_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "pages").mkdir()
    (tmp_path / "pages" / "manifest.json").write_text("{}")
    assert checkpoints_of(tmp_path) == []
