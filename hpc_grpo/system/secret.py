"""Recognize a secret by its name or its value, to keep it out of every file, argument, log and copy of the config.

`secret_keys` checks a config, `is_secret` a variable, and `without_secrets` masks a text. Some values have a service's
prefix. Others are judged by their name: a variable, key, option, header or part of a URL.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator
from typing import Any

MASK = "********"

_NAME = re.compile(
    r"(^|_)("
    r"(API_?)?KEYS?|TOKEN|SECRETS?|(PG)?PASSWORDS?|PASSWD|PASSPHRASE|CREDENTIALS?|COOKIE|WEBHOOK"
    r"|AUTHORIZATION|DSN|(DATABASE|DB|REDIS|MONGO(DB)?|POSTGRES(QL)?|MYSQL|BROKER)_UR[IL]"
    r")(_|$)|(^|_)((PG|SSH)?PASS|PAT)$|._PWD$",
    re.IGNORECASE,
)
_PLACE = re.compile(r"_(PATH|FILE|DIR|ENV|NAME|VAR|VARIABLE|FIELD|COLUMN|LIMIT|BUDGET)$", re.IGNORECASE)
"""A name with this ending names the place of a secret, or a number of tokens."""

_COUNT = re.compile(r"\d{1,3}")
"""A number as in `sort --key=2` and MAX_KEYS=16: too short for a secret."""

_VALUES = tuple(
    re.compile(pattern, re.DOTALL)
    for pattern in (
        r"(?<=://)[^\s/@:'\"$]*:[^\s/@'\"$]+(?=@)",  # scheme://user:password@
        r"(?<=https://)[^\s/@:'\"$]{16,}(?=@)",  # https://token@
        r"https://hooks\.slack\.com/\w+/[^\s'\"]+",
        r"https://(\w+\.)?discord(app)?\.com/api/webhooks/[^\s'\"]+",
        r"https://[\w.-]+\.webhook\.office\.com/[^\s'\"]+",
        r"\bhf_[A-Za-z0-9]{20,}",
        r"\bgh[pousr]_[A-Za-z0-9]{20,}",
        r"\bgithub_pat_\w{20,}",
        r"\bglpat-[\w-]{16,}",
        r"\bsk-(?:[A-Za-z0-9]+[-_])*[A-Za-z0-9]{20,}[\w-]*",  # does not match org/sk-news-articles-2024
        r"\bwandb_v\d_\w{20,}",
        r"\bxox[a-z]-[\w-]{10,}",
        r"\b(AKIA|ASIA)[A-Z0-9]{16}\b",
        r"\bAIza[\w-]{35}",
        r"\bpypi-[\w-]{50,}",
        r"\beyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]{10,}",  # JSON web token
        r"(?i)\b(?:bearer|basic)\s+(?![$<{])(?=[\w+/=.~-]*\d)[\w+/=.~-]{8,}",  # Authorization: Bearer TOKEN
        r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(-----END [A-Z ]*PRIVATE KEY-----|\Z)",
    )
)

_ASSIGNMENT = re.compile(
    r"(?<!\w)(?P<name>\w+)[\"']?\s*(?P<sign>[=:])\s*(?P<quote>[\"']?)(?P<value>(?!~/)[^\s\"'$`;#,()\[\]{}]+)(?P=quote)"
)
_SHORTEST_KEY = 16
_KEY_LIKE = re.compile(r"[\w+/=.-]*\d[\w+/=.-]*")
_RANDOM = re.compile(r"(?=[A-Za-z]*\d)(?=\d*[A-Za-z])[A-Za-z0-9]{12,}")
"""A run of letters and digits that is longer than words of a name: `final_answer_2024` has none."""

_ONLY_SECRET = re.compile(
    r"(^|_)(PASS(WORDS?|WD|PHRASE)|SECRET|API_?KEY|(ACCESS|AUTH|BEARER|API)_TOKEN|SECRET_KEY|AUTHORIZATION)$",
    re.IGNORECASE,
)
"""A name with this ending has no other meaning: every literal value counts as a secret."""

_OF_TEXT = re.compile(r"(^|_)(STOP|PAD|EOS|BOS|END|START|MASK|SEP|CLS|UNK|SPECIAL|IMAGE)_TOKEN$", re.IGNORECASE)
_SCHEME = re.compile(r"\A(bearer|basic|token)\s+", re.IGNORECASE)
_REFERENCE = re.compile(
    r"[-$`<~./{*%]|([A-Z][A-Z0-9]*(_[A-Z0-9]+)+|EMPTY|VALUE|(?i:none|null|true|false|auto)|\W*|\d{1,3})$"
)
"""A variable, a path, a placeholder or a number: not a secret, even if the name is a secret's."""

_WRITTEN = r"[\"']?(?P<value>[^\s\"'`;#,&|()\[\]{}]+)"
_SET = re.compile(r"(?:(?<![\w-])|(?<=-e))(?P<name>[A-Za-z_][\w-]*)=(?=" + _WRITTEN + r")")
_OPTION = re.compile(r"(?<!\S)--(?P<name>[A-Za-z][\w-]*)(?:=|[ \t]+)(?=" + _WRITTEN + r")")
_HEADER = re.compile(
    r"\b(?P<name>authorization|[\w-]*(?:api-key|-token|-secret))\s*:\s*(?:(?:bearer|basic|token)\s+)?" + _WRITTEN,
    re.IGNORECASE,
)
_SPACED = re.compile(r"(?<![\w-])(?P<name>[A-Za-z_]\w*)[\"']?(?:\s*:\s*|[ \t]+(?:<<<[ \t]*)?)(?=" + _WRITTEN + r")")
"""A name and a value after a blank or a colon, as in netrc, csh, YAML and JSON. Ordinary text may look the same."""

_OF_COMMANDS = {
    re.compile(
        r"\b(?:curl|wget)\b.*?\s(?:-[A-Za-z]*u|--user)[ \t=]*(?=[\"']?[^\s$\"']*:[^\s$])" + _WRITTEN
    ): "PASSWORD",
    re.compile(r"\b(?:(?:docker|podman|apptainer)\s+login\b.*?|sshpass)\s-p[ \t]*" + _WRITTEN): "PASSWORD",
    re.compile(r"\bwandb[ \t]+login\b[^\n;&|]*?[ \t](?!-)" + _WRITTEN): "key",
}
"""Command arguments without a name -> the name that they would have."""


def is_secret(name: str, value: str = "") -> bool:
    """Return whether a variable of this name, or with this value, holds a secret.

    >>> is_secret("DATABASE_URL"), is_secret("HF_TOKEN_PATH"), is_secret("X", "https://u:pw@proxy:3128")
    (True, False, True)
    """
    is_named = _NAME.search(name) and not _PLACE.search(name) and not _COUNT.fullmatch(value)
    return bool(is_named) or any(pattern.search(value) for pattern in _VALUES)


def environ_for(named: Collection[object]) -> dict[str, str]:
    """Return this process's variables for a process that runs a user's function: no secrets except the named ones."""
    return {name: value for name, value in os.environ.items() if name in named or not is_secret(name, value)}


def secret_keys(values: Any, prefix: str = "", name: str = "") -> list[str]:
    """Return the dotted keys of nested `values` whose texts hold a secret; `name` is the key of `values`.

    A list is also read as one command line: the text after `--token` may be its value.

    >>> secret_keys({"notify": ["send", "--token", "hunter2"], "args": {"api_key_env": "JUDGE_KEY", "password": "x"}})
    ['notify', 'args.password']
    """
    if isinstance(values, dict):
        return [key for name, value in values.items() for key in secret_keys(value, f"{prefix}.{name}", str(name))]
    if isinstance(values, list):
        texts = [value for value in values if isinstance(value, str)]
        is_lines = any(map(str.isspace, "".join(texts[:1])))
        found = [key for index, value in enumerate(values) for key in secret_keys(value, f"{prefix}.{index}", name)]
        is_secret_text = not found and _writes_secret(("\n" if is_lines else " ").join(texts))
        return found or ([prefix.removeprefix(".")] if is_secret_text else [])
    text = "" if values is None else str(values)
    return [prefix.removeprefix(".")] if _is_given(name, text) or _writes_secret(text) else []


def _writes_secret(text: str) -> bool:
    """Return whether a text contains a secret of a known form, or assigns one to a variable, an option or a header."""
    text = text.replace("\\\n", "")
    return any(pattern.search(text) for pattern in _VALUES) or any(_is_given(*pair) for pair in _pairs(text))


def _pairs(text: str) -> Iterator[tuple[str, str]]:
    """Yield each name that a text assigns a value to, with the value."""
    for pattern in (_SET, _HEADER):
        yield from ((found["name"], found["value"]) for found in pattern.finditer(text))
    for found in _OPTION.finditer(text):  # in a text, --token alone is not a token
        yield found["name"].upper() if found["name"].lower().endswith("token") else found["name"], found["value"]
    for pattern, name in _OF_COMMANDS.items():
        yield from ((name, found["value"]) for found in pattern.finditer(text))
    yield from ((found["name"], found["value"]) for found in _SPACED.finditer(text) if _RANDOM.search(found["value"]))


def _is_given(name: str, value: str) -> bool:
    """Return whether a value with this name is a secret. Many similar names are not secret: `answer_key`."""
    name = re.sub(r"-|(?<=[a-z0-9])(?=[A-Z])", "_", name)  # clientSecret
    value = _SCHEME.sub("", value.strip())
    if not is_secret(name) or _REFERENCE.match(value) or _OF_TEXT.search(name):
        return False
    is_key = len(value) >= _SHORTEST_KEY and _KEY_LIKE.fullmatch(value) and _RANDOM.search(value)
    return bool(name.isupper() or _ONLY_SECRET.search(name) or is_key)


def without_secrets(text: str) -> str:
    """Return a text, such as a `git diff`, with MASK for each secret in it.

    Masks values with a service's prefix, and long words with a digit that are assigned to a secret's name.

    >>> without_secrets('+API_KEY = "0123456789abcdef0123"')
    '+API_KEY = "********"'
    """

    def masked(found: re.Match[str]) -> str:
        value = found["value"]
        is_key = len(value) >= _SHORTEST_KEY and _KEY_LIKE.fullmatch(value) is not None
        return found[0].replace(value, MASK) if is_key and is_secret(found["name"]) else found[0]

    for pattern in _VALUES:
        text = pattern.sub(MASK, text)
    return _ASSIGNMENT.sub(masked, text)
