"""Redaction: `redact` replaces secrets by `***` in everything that is written to a file, database, page or terminal."""

import os
import re
from collections.abc import Mapping
from typing import Any, TypeVar

HIDDEN = "***"
# Endings and words in the names of secrets: PGPASSWORD, --client-secret, comet.api_key, SENTRY_DSN.
SECRET_ENDINGS = ("password", "passwd", "passphrase", "apikey", "secretkey", "accesskey", "authtoken", "accesstoken")
SECRET_WORDS = {"secret", "secrets", "credential", "credentials", "authorization", "dsn", "jwt", "webhook"}
# A name that ends so says where the secret lies.
PLACES = {"path", "file", "dir", "folder", "name", "type"}
# A key is secret only after one of these words (`api_key`, `AWS_ACCESS_KEY_ID`).
KEY_OWNERS = {
    "access", "account", "admin", "anthropic", "api", "auth", "aws", "azure", "client", "comet", "deploy", "encryption",
    "google", "hf", "kaggle", "license", "master", "neptune", "openai", "private", "service", "session", "shared",
    "signing", "ssh", "storage", "subscription", "wandb",
}  # fmt: skip
# A token is secret unless it is one of a text's (`--pad_token`).
TOKEN_OWNERS = {
    "additional", "assistant", "audio", "begin", "blank", "bos", "class", "cls", "decoder", "end", "eos", "fim",
    "first", "forced", "image", "img", "last", "latent", "mask", "max", "min", "n", "new", "next", "num", "pad",
    "patch", "per", "placeholder", "prefix", "prompt", "query", "response", "sep", "space", "special", "start",
    "stop", "suffix", "trigger", "unk", "video", "word",
}  # fmt: skip
# In a name in capitals, a variable of the environment, these are enough: WANDB_KEY, GITHUB_PAT, REDIS_AUTH.
LOUD_WORDS = {"key", "pat", "auth", "pass", "pwd"}
# Values that are no secrets, whatever their name: `use_auth_token=True`.
HARMLESS = {"", "true", "false", "yes", "no", "on", "off", "none", "null", "auto", "0", "1", "default", HIDDEN}
# Characters of the shortest secret, and of the shortest plain word, to search for in texts; others occur by chance.
LEAST_KNOWN, LEAST_WORD = 8, 16

# Lengths are bounded, so that a very long word in a log does not take very long.
_NAME = r"[A-Za-z_][\w.-]{0,80}"
_VALUE = r"\"(?:[^\"\\\n]|\\.)*\"|'(?:[^'\\\n]|\\.)*'|[^\s\"'&;]+"
_ASSIGNED = re.compile(rf"(?P<before>(?<![\w.])(?P<name>{_NAME})=)(?P<value>{_VALUE})")
_FLAG = re.compile(rf"(?P<before>(?<![\w-])--?(?P<name>{_NAME})\s+)(?!-)(?P<value>{_VALUE})")
_QUOTED = re.compile(
    rf"(?P<before>([\"'])(?P<name>{_NAME})\2\s*:\s*)(?P<value>\"(?:[^\"\\\n]|\\.)*\"|'(?:[^'\\\n]|\\.)*')"
)
# User and password of a URL. A database's password may contain anything, so it ends at the last @.
_DATABASES = "postgres|postgresql|mysql|mariadb|mssql|oracle|cockroachdb|mongodb|redis|rediss|amqp|amqps"
_LOGINS = (
    re.compile(rf"(\b(?:{_DATABASES})(?:\+\w{{1,20}})?://[^\s:/@?\"'<>]{{0,200}}):[^\s\"'<>]{{0,1000}}@"),
    re.compile(r"(\b[A-Za-z][A-Za-z0-9+.-]{0,30}://[^\s:/@?#\"'<>]{0,200}):[^\s/\"'<>]{0,1000}@"),
)
_QUERY = re.compile(r"([?&](?:x-amz-signature|x-amz-credential|signature|sig|key)=)[^&\s\"']+", re.IGNORECASE)
_HEADER = re.compile(r"(?i)(\bbearer\s+|\bauthorization[\"']?\s*[:=]\s*[\"']?(?:basic|token)\s+)[A-Za-z0-9._~+/=-]{8,}")
# Tokens of known form: Hugging Face, OpenAI, GitHub, GitLab, Slack, AWS, Google, npm, PyPI, JSON web tokens, keys.
_SHAPES = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{20,}|sk-(?=[A-Za-z_-]*[0-9])[A-Za-z0-9_-]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}"
    r"|glpat-[\w-]{16,}|xox[abeoprs]-[\w-]{10,}|A[KS]IA[0-9A-Z]{16}|AIza[\w-]{30,}|npm_[A-Za-z0-9]{30,}|pypi-[\w-]{30,}"
    r"|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]*)|-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
    re.DOTALL,
)
_URL_LOGIN = re.compile(r"(://[^:/@?]*):.*@")
_URL_OPTION = re.compile(r"([?&](?!passfile=)[^=&]*(?:pass|pwd|secret|token)[^=&]*)=[^&]*", re.IGNORECASE)
_STARS = re.compile(rf"(?:^|[\s=:/\"']){re.escape(HIDDEN)}(?:$|[\s@&\"'])")
T = TypeVar("T")


def is_secret(name: str) -> bool:
    """Returns whether the value of a name (a variable, a flag, a key of a configuration) is a secret."""
    words = re.findall(r"[a-z0-9]+", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name[-200:]).lower())
    if not words:
        return False
    last, before = words[-1], words[-2] if len(words) > 1 else ""
    if last in PLACES:
        return False
    if last.endswith(SECRET_ENDINGS) or SECRET_WORDS.intersection(words):
        return True
    if last == "id" and before == "key":
        return "access" in words
    if last == "token":
        return before not in TOKEN_OWNERS
    if last in LOUD_WORDS and name.isupper() and before:
        return True
    return (last == "key" and before in KEY_OWNERS) or (last == "pwd" and bool(before))


def redact(value: T) -> T:
    """Returns a value with its secrets replaced by `***`.

    In a text: values of secret names (`HF_TOKEN=x`, `--api-key x`, `"password": "x"`), logins in URLs, tokens of known
    form, and every secret in this process's environment. In a mapping: values of secret names, and texts. In a list or
    tuple, which may be a command line: values after secret flags, and texts. Other values are returned unchanged.
    """
    return _masked(value, _known())  # type: ignore[no-any-return]


def redact_url(url: str) -> str:
    """Returns a database URL without password and secret options; the text must be nothing but the URL."""
    return _URL_OPTION.sub(rf"\1={HIDDEN}", _URL_LOGIN.sub(rf"\1:{HIDDEN}@", url))


def holds_mask(text: str) -> bool:
    """Returns whether `redact` has hidden something in a text."""
    return _STARS.search(text) is not None


def without_secrets(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a configuration without keys of secrets, such as `comet.api_key`; libraries then read the environment."""
    return {
        key: without_secrets(value) if isinstance(value, Mapping) else value
        for key, value in config.items()
        if not (isinstance(value, str) and is_secret(str(key)) and not _is_harmless(value))
    }


def _masked(value: Any, known: re.Pattern[str] | None) -> Any:
    match value:
        case str():
            return _text(value, known)
        case Mapping():
            return {name: _named(str(name), inner, known) for name, inner in value.items()}
        case list():
            return _line(value, known)
        case tuple():
            return tuple(_line(list(value), known))
    return value


def _named(name: str, value: Any, known: re.Pattern[str] | None) -> Any:
    if isinstance(value, str) and is_secret(name) and not _is_harmless(value):
        return HIDDEN
    return _masked(value, known)


def _line(words: list[Any], known: re.Pattern[str] | None) -> list[Any]:
    """Redacts a command line; the word after a secret flag is its value."""
    found, flag = [], ""
    for word in words:
        secret = flag and isinstance(word, str) and not word.startswith("-") and not _is_harmless(word)
        found.append(HIDDEN if secret else _masked(word, known))
        flag = word if isinstance(word, str) and word.startswith("-") and "=" not in word and is_secret(word) else ""
    return found


def _text(text: str, known: re.Pattern[str] | None) -> str:
    if known is not None:
        text = known.sub(HIDDEN, text)
    for pattern in _LOGINS:
        text = pattern.sub(rf"\1:{HIDDEN}@", text)
    text = _SHAPES.sub(HIDDEN, text)
    text = _HEADER.sub(rf"\1{HIDDEN}", text)
    text = _QUERY.sub(rf"\1{HIDDEN}", text)
    for pattern in (_ASSIGNED, _FLAG, _QUOTED):
        text = pattern.sub(_value_hidden, text)
    return text


def _value_hidden(found: re.Match[str]) -> str:
    value = found["value"]
    quote = value[0] if value[0] in "\"'" else ""
    if not is_secret(found["name"]) or _is_harmless(value.strip(quote) if quote else value):
        return found[0]
    return f"{found['before']}{quote}{HIDDEN}{quote}"


def _is_harmless(value: str) -> bool:
    """Returns whether a value is a switch, or only says where the secret is: `$WANDB_API_KEY`, `{template}`."""
    return value.lower() in HARMLESS or value.startswith("$") or re.fullmatch(r"\{\w+\}", value) is not None


def _known() -> re.Pattern[str] | None:
    """Returns a pattern for the secrets of this process's environment; a message may quote them without their name."""
    found = set[str]()
    for name, value in os.environ.items():
        if is_secret(name):
            found.add(value)
        elif (login := re.search(r"://[^\s:/@]*:([^\s@]+)@", value)) is not None:
            found.add(login[1])
    telling = sorted(filter(_is_telling, found), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, telling))) if telling else None


def _is_telling(value: str) -> bool:
    """Returns whether a secret is long enough to be searched for in texts; a path is no secret."""
    plain = value.isalpha() and (value.islower() or value.istitle())
    return (
        len(value) >= (LEAST_WORD if plain else LEAST_KNOWN) and not _is_harmless(value) and not os.path.exists(value)
    )
