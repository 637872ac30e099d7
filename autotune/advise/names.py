"""Names as people spell them: compared without punctuation, and the nearest ones of a name that is unknown."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping


def spelled(name: str) -> str:
    """A name in lower case without spaces and punctuation."""
    return re.sub(r"[^a-z0-9.]+", "", name.lower()).replace(".", "")


def closest(name: str, known: Mapping[str, str], n: int = 3) -> list[str]:
    """The values of the keys that are most like a name, at most `n`, at least one."""
    keys = difflib.get_close_matches(name[:60], list(known), n=4 * n, cutoff=0.0)
    return list(dict.fromkeys(known[key] for key in keys))[:n]
