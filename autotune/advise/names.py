"""The known names that are nearest to an unknown one."""

import difflib
import re
from collections.abc import Mapping

MOST = 3


def closest(name: str, known: Mapping[str, str]) -> list[str]:
    """The values of the keys that are most like a name, those of its family first; at most `MOST`, at least one."""
    family = _family(name)
    keys = difflib.get_close_matches(name[:60], list(known), n=len(known), cutoff=0.0)
    keys.sort(key=lambda key: not family or _family(key) != family)  # a stable sort
    return list(dict.fromkeys(known[key] for key in keys))[:MOST]


def _family(name: str) -> str:
    """The letters that a name begins with."""
    return re.match("[a-z]*", name)[0]  # type: ignore[index]
