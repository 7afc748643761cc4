from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dovetail.errors import ConfigError
from dovetail.search.schema import read_experiment
from dovetail.search.secrets import masked, masked_url, write_private
from dovetail.search.starting import backend_for


def test_values_that_are_not_secret_are_unchanged() -> None:
    config: dict[str, Any] = {
        "name": "a",
        "environment": {"image": "b"},
        "checkpoint_storage": {"type": "s3", "bucket": "c", "save_trial_best": 2},
        "hyperparameters": {"token": "kept", "password": {"type": "int"}},
    }
    assert masked(config) == config


def test_masking_does_not_change_the_configuration() -> None:
    config = {"environment": {"environment_variables": {"TOKEN": "a"}, "registry_auth": {"password": "b"}}}
    hidden = {"environment_variables": {"TOKEN": "***"}, "registry_auth": {"password": "***"}}
    assert masked(config) == {"environment": hidden}
    assert config["environment"]["environment_variables"] == {"TOKEN": "a"}


@pytest.mark.parametrize("name", ["access_key", "secret_key", "credential", "connection_string", "account_url"])
def test_storage_credentials_are_masked(name: str) -> None:
    assert masked({"checkpoint_storage": {"bucket": "a", name: "b"}}) == {
        "checkpoint_storage": {"bucket": "a", name: "***"}
    }


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("s3://bucket/a@b", "s3://bucket/a@b"),
        ("s3://key:secret@bucket/a", "s3://***@bucket/a"),
        ("s3://key:sec/ret@bucket/a", "s3://***@bucket/a"),
        ("s3://key:sec?re#t@bucket/a", "s3://***@bucket/a"),
        ("postgresql://host:5432/lab", "postgresql://host:5432/lab"),
        ("az://box?sig=abc", "az://box?***"),
        ("postgresql://host:5432/lab?password=a@b", "postgresql://***"),
        ("/folder/what?", "/folder/what?"),
    ],
)
def test_a_masked_url_has_no_user_password_or_query(url: str, expected: str) -> None:
    assert masked_url(url) == expected


def test_an_error_message_contains_no_password() -> None:
    given = {"entrypoint": "true", "searcher": {"name": "single", "metric": "loss"}}
    config = read_experiment({**given, "checkpoint_storage": "s3://key:secret@bucket/a"})
    with pytest.raises(ConfigError, match=r"'s3://\*\*\*@bucket/a' is a URL"):
        backend_for(config, 1)


def test_a_private_file_is_readable_only_by_its_owner(tmp_path: Path) -> None:
    write_private(tmp_path / "a", "text")
    assert ((tmp_path / "a").stat().st_mode & 0o777, (tmp_path / "a").read_text()) == (0o600, "text")
