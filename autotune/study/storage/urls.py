"""Storage URLs: their drivers, and how their passwords stay out of messages and files."""

import re

from autotune.system import redaction
from autotune.system.redaction import HIDDEN

VARIABLE = "AUTOTUNE_STORAGE"
LEAST_PASSWORD = 4  # characters; a shorter password may occur in a text by chance
# By dialect as users write it: the tested driver, and the package that it comes from.
DRIVERS = {
    "postgresql": ("postgresql+psycopg", "psycopg[binary]"),
    "postgres": ("postgresql+psycopg", "psycopg[binary]"),
    "mysql": ("mysql+pymysql", "pymysql"),
    "mariadb": ("mariadb+pymysql", "pymysql"),
}
redact_url = redaction.redact_url
_HIDDEN_OPTION = re.compile(rf"([?&])[^=&]*={re.escape(HIDDEN)}(?:&|$)")


def without_password(text: str, url: str) -> str:
    """A driver's message about a URL, without the password that it may quote."""
    for found in re.findall(r"://[^:/@?]*:(.*)@", url):
        text = text.replace(found, HIDDEN) if len(found) >= LEAST_PASSWORD else text
    return redaction.redact(text)


def with_password(url: str) -> str:
    """A redacted URL without its stars, so that the driver looks for the secrets (`PGPASSWORD`, `~/.pgpass`)."""
    url = url.replace(f":{HIDDEN}@", "@")
    while found := _HIDDEN_OPTION.search(url):
        url = (url[: found.start()] + found[1] + url[found.end() :]).rstrip("?&")
    return url


def with_driver(url: str) -> str:
    """The URL with the tested driver of its dialect, unless it names one."""
    dialect, separator, rest = url.partition("://")
    return f"{DRIVERS[dialect][0]}{separator}{rest}" if dialect in DRIVERS else url


def package(url: str) -> str | None:
    """The package of the URL's driver; None if it is not known."""
    dialect = url.partition("://")[0].partition("+")[0]
    return DRIVERS[dialect][1] if dialect in DRIVERS else None


def is_sqlite(url: str) -> bool:
    """Whether the database is an SQLite file."""
    return url.startswith("sqlite")
