"""The known names that are nearest to an unknown one."""

import difflib
from collections.abc import Mapping

MOST = 3


def closest(name: str, known: Mapping[str, str]) -> list[str]:
    """The values of the keys that are most like a name; at most `MOST`, at least one."""
    keys = difflib.get_close_matches(name[:60], list(known), n=len(known), cutoff=0.0)
    return list(dict.fromkeys(known[key] for key in keys))[:MOST]
