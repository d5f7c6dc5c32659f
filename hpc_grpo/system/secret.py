"""Know a secret by its name or by its value: it must stay out of every file, argument, log and copy of the config.

The one place of this rule. Values are known by what services put in front of their keys, so that there are few false
alarms: a key that looks like any other word is known by the name it is given alone.
"""

from __future__ import annotations

import re

MASK = "********"

_NAME = re.compile(
    r"(^|_)("
    r"(API_?)?KEYS?|TOKEN|SECRETS?|(PG)?PASSWORDS?|PASSWD|PASSPHRASE|CREDENTIALS?|COOKIE|WEBHOOK"
    r"|DSN|(DATABASE|DB|REDIS|MONGO(DB)?|POSTGRES(QL)?|MYSQL|BROKER)_UR[IL]"
    r")(_|$)|(^|_)((PG|SSH)?PASS|PAT)$|._PWD$",
    re.IGNORECASE,
)
_PLACE = re.compile(r"_(PATH|FILE|DIR)$", re.IGNORECASE)
"""A name that ends so is of where a secret lies."""

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
        r"\bsk-(?:[A-Za-z0-9]+[-_])*[A-Za-z0-9]{20,}[\w-]*",  # not org/sk-news-articles-2024, Slovak ones
        r"\bwandb_v\d_\w{20,}",
        r"\bxox[a-z]-[\w-]{10,}",
        r"\b(AKIA|ASIA)[A-Z0-9]{16}\b",
        r"\bAIza[\w-]{35}",
        r"\bpypi-[\w-]{50,}",
        r"\beyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]{10,}",  # JSON web token
        r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(-----END [A-Z ]*PRIVATE KEY-----|\Z)",
    )
)

_ASSIGNMENT = re.compile(
    r"(?P<name>[A-Za-z_]\w*)[\"']?\s*(?P<sign>[=:])\s*(?P<quote>[\"']?)(?P<value>(?!~/)[^\s\"'$`;#,()\[\]{}]+)(?P=quote)"
)
_SHORTEST_KEY = 16
_KEY_LIKE = re.compile(r"[\w+/=.-]*\d[\w+/=.-]*")
_RANDOM = re.compile(r"(?=[A-Za-z]*\d)(?=\d*[A-Za-z])[A-Za-z0-9]{12,}")
"""A run of letters with digits among them, longer than the words of a name: `final_answer_2024` has none."""


def is_secret(name: str, value: str = "") -> bool:
    """Return whether a variable of this name, or with this value, holds a secret.

    >>> is_secret("DATABASE_URL"), is_secret("HF_TOKEN_PATH"), is_secret("X", "https://u:pw@proxy:3128")
    (True, False, True)
    """
    is_named = _NAME.search(name) and not _PLACE.search(name) and not _COUNT.fullmatch(value)
    return bool(is_named) or holds_secret(value)


def is_secret_argument(name: str, value: str) -> bool:
    """Return whether an argument holds a secret: many have a name of one (`answer_key`), so the value decides.

    >>> is_secret_argument("answer_key", "reference_solution"), is_secret_argument("judge_key", "c0ffee0123456789")
    (False, True)
    """
    is_key = len(value) >= _SHORTEST_KEY and _KEY_LIKE.fullmatch(value) and _RANDOM.search(value)
    return bool(is_key and is_secret(name)) or holds_secret(value)


def holds_secret(text: str) -> bool:
    """Return whether a secret that is known by its value is in the text."""
    return any(pattern.search(text) for pattern in _VALUES)


def assigns_secret(line: str) -> bool:
    """Return whether a shell line holds a secret, or gives a variable with a secret's name a value that is written out.

    >>> assigns_secret("export PGPASS=hunter2"), assigns_secret('export HF_TOKEN="$(cat ~/.token)"')
    (True, False)
    """
    assigned = (found for found in _ASSIGNMENT.finditer(line) if found["sign"] == "=")
    return holds_secret(line) or any(is_secret(found["name"], found["value"]) for found in assigned)


def without_secrets(text: str) -> str:
    """Return a text (a `git diff`, say) with MASK for each secret in it.

    Known are those with a service's mark, and long words with a digit that something with a secret's name is set to.

    >>> without_secrets('+API_KEY = "0123456789abcdef0123"')
    '+API_KEY = "********"'
    """
    for pattern in _VALUES:
        text = pattern.sub(MASK, text)
    return _ASSIGNMENT.sub(_masked_value, text)


def _masked_value(found: re.Match[str]) -> str:
    value = found["value"]
    is_key = len(value) >= _SHORTEST_KEY and _KEY_LIKE.fullmatch(value) is not None
    return found[0].replace(value, MASK) if is_key and is_secret(found["name"]) else found[0]
