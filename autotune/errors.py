"""Errors whose message is meant for the user."""

import difflib
import re
import textwrap
from collections.abc import Iterable
from typing import ClassVar

# Characters of the reason of a trial that are kept, where it is the message of an error.
LONGEST_REASON = 1000
MAX_CHARACTERS, HEAD_CHARACTERS, TAIL_CHARACTERS = 2000, 1500, 400


class UserError(Exception):
    """Something that the user gave cannot be used; the message says where, what, what is known, and what to do."""

    status: ClassVar[int] = 2  # exit status of a command that ends with it

    def __str__(self) -> str:
        """Returns the message, made printable."""
        return printable(super().__str__())

    def _render_traceback_(self) -> list[str]:
        """Returns what IPython shows in place of a traceback: the sentence, as in a terminal."""
        return [f"{type(self).__name__}: {self}"]


class Unavailable(UserError):
    """Machines or a database are away at present; the same command goes on later (EX_TEMPFAIL of sysexits.h)."""

    status = 75


class SpecError(UserError):
    """A study, preset or target that cannot be used."""


def printable(text: str) -> str:
    """Returns a text as one line of bounded length, with control characters escaped: a terminal would obey them."""
    line = " ".join(filter(None, (line.strip() for line in text.splitlines())))
    if not line.isprintable():
        line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
    return line if len(line) <= MAX_CHARACTERS else f"{line[:HEAD_CHARACTERS]} ... {line[-TAIL_CHARACTERS:]}"


def shortened(text: str, most: int) -> str:
    """Returns a text of at most `most` characters: a longer one is cut between two words, and three dots say so.

    A path without spaces is cut within; `textwrap.shorten` would leave nothing of it.
    """
    if len(text) <= most:
        return text
    head = text[: most - 4]
    words = head.rpartition(" ")[0]
    return f"{words if len(words) > most // 2 else head} ..."


def wrapped(text: str, columns: int, first: str = "", rest: str = "") -> list[str]:
    """Returns the lines of a text that is wrapped at its words: what stands in backticks is one, since a part of a command is another.

    Args:
        first: What the first line begins with.
        rest: What all others begin with.
    """
    whole = re.sub(r"`[^`]+`", lambda code: code[0].replace(" ", "\xa0"), text)
    wrapper = textwrap.TextWrapper(columns, first, rest, break_long_words=False, break_on_hyphens=False)
    return [line.replace("\xa0", " ") for line in wrapper.wrap(whole)]


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns ` Did you mean ...?` with the closest of the known names, or an empty text."""
    # Comparing two long names takes long.
    close = difflib.get_close_matches(str(name)[:100], list(known), n=1, cutoff=0.6)
    return f" Did you mean {close[0]!r}?" if close else ""


def unknown(name: object, known: Iterable[str], kind: str = "") -> str:
    """Returns that a name is unknown, the nearest known one, and all known ones; `kind` says what the name is of."""
    known = list(known)
    return f"unknown {kind}{name!r}.{nearest(str(name), known)} Known: {', '.join(known)}"
