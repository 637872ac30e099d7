"""Storage URLs: which driver serves them, and which part of them nobody else may read."""

from __future__ import annotations

import re

from autotune import masking
from autotune.masking import HIDDEN

VARIABLE = "AUTOTUNE_STORAGE"
# A shorter one may stand in a text by chance.
LEAST_PASSWORD = 4
# Dialects by what people write, the driver that we test with, and the extra that installs it.
DRIVERS = {
    "postgresql": ("postgresql+psycopg", "postgresql"),
    "postgres": ("postgresql+psycopg", "postgresql"),
    "mysql": ("mysql+pymysql", "mysql"),
    "mariadb": ("mariadb+pymysql", "mysql"),
}
_HIDDEN_OPTION = re.compile(rf"([?&])[^=&]*={re.escape(HIDDEN)}(?:&|$)")


def masked(url: str) -> str:
    """The URL as it may be shown and written down: its secrets are stars."""
    return masking.masked_url(url)


def without_password(text: str, url: str) -> str:
    """What a driver says of a URL, without the password that it may quote."""
    for found in re.findall(r"://[^:/@?]*:(.*)@", url):
        text = text.replace(found, HIDDEN) if len(found) >= LEAST_PASSWORD else text
    return masking.masked(text)


def unmasked(url: str) -> str:
    """A URL that was written down without its secrets: the driver is left to find them (`PGPASSWORD`, `~/.pgpass`)."""
    url = url.replace(f":{HIDDEN}@", "@")
    while found := _HIDDEN_OPTION.search(url):
        url = (url[: found.start()] + found[1] + url[found.end() :]).rstrip("?&")
    return url


def with_driver(url: str) -> str:
    """The URL with the driver named that the extra of its dialect installs; one that names a driver stays as it is."""
    dialect, separator, rest = url.partition("://")
    return f"{DRIVERS[dialect][0]}{separator}{rest}" if dialect in DRIVERS else url


def extra(url: str) -> str | None:
    """The extra of autotune that installs the URL's driver; None where there is none."""
    dialect = url.partition("://")[0].partition("+")[0]
    return DRIVERS[dialect][1] if dialect in DRIVERS else None


def is_sqlite(url: str) -> bool:
    """Whether the database is a file, which one run at a time writes to."""
    return url.startswith("sqlite")
