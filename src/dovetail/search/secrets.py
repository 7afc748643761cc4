"""Masking of secrets in logs, reports and databases."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote

HIDDEN = "***"
"""The replacement of a secret."""

_STORAGE = ("access_key", "account_url", "connection_string", "credential", "secret_key")


def masked(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration without its secrets: values of environment variables, and credentials of its storage.

    Example:
        >>> masked({"environment": {"environment_variables": {"TOKEN": "abc"}}, "checkpoint_storage": "s3://a:b@c/d"})
        {'environment': {'environment_variables': {'TOKEN': '***'}}, 'checkpoint_storage': 's3://***@c/d'}
    """
    found = dict(config)
    environment, storage = found.get("environment"), found.get("checkpoint_storage")
    if isinstance(environment, Mapping):
        found["environment"] = {
            name: _all_hidden(value) if name in ("environment_variables", "registry_auth") else value
            for name, value in environment.items()
        }
    if isinstance(storage, str):
        found["checkpoint_storage"] = masked_url(storage)
    elif isinstance(storage, Mapping):
        found["checkpoint_storage"] = {
            name: HIDDEN if name in _STORAGE else masked_url(value) if isinstance(value, str) else value
            for name, value in storage.items()
        }
    return found


def masked_url(url: str) -> str:
    """Return a URL without user and password, and without query values that may be secret.

    Example:
        >>> masked_url("s3://key:secret@bucket/runs?token=abc"), masked_url("s3://bucket/runs")
        ('s3://***@bucket/runs?***', 's3://bucket/runs')
    """
    # If an @ follows a query, it is part of the query, or everything before it is a password.
    url = re.sub(r"(?<=://).*\?.*=.*@.*", HIDDEN, url)
    # A password may have characters that should have been quoted, such as the slashes in keys of AWS.
    url = re.sub(r"(?<=://)(?:[^/?#:@]*:.*|[^/?#]*)@", f"{HIDDEN}@", url)
    return re.sub(r"(?<=\?).+", HIDDEN, url) if "://" in url else url


def without_secrets(text: str, url: str) -> str:
    """Return a message without the passwords of a URL, and without parts of them.

    Example:
        >>> without_secrets("no host 'ret@db'", "postgresql://me:sec/ret@db/lab")
        "no host '***@db'"
    """
    account, _, place = url.partition("://")[2].rpartition("@")
    secrets = [account.partition(":")[2], *re.findall(r"=([^&]+)", place)]
    parts = [part for secret in secrets for part in (secret, unquote(secret), *re.split(r"[@/:?#&=]", secret))]
    # The longest first: otherwise a part could be replaced inside of the whole password, and leave its rest.
    for part in sorted({*parts} - {""}, key=len, reverse=True):
        text = text.replace(part, HIDDEN)
    return text


def write_private(path: Path, text: str) -> None:
    """Write a new file that only its owner can read."""
    # Before the text is written: with a later chmod, other users could read it in between.
    path.touch(mode=0o600)
    path.write_text(text, encoding="utf-8")


def _all_hidden(value: Any) -> Any:
    return {name: _all_hidden(item) for name, item in value.items()} if isinstance(value, Mapping) else HIDDEN
