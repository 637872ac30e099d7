"""Text for people on standard output: wrapped at words in a terminal, and as it is in a pipe."""

import re
import shutil
import sys

from autotune.errors import wrapped

# What stands before the text of a line: spaces, the dash of a list, or one or two labels in columns.
LABEL = re.compile(r" *(?:- |(?:\S+(?: \S+)? {2,}){1,2})?")


def fitted(text: str) -> str:
    """Text as standard output takes it: in a terminal, lines that are longer than it is wide go on below their own text."""
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize
    return "\n".join(line if len(line) <= columns else _wrapped(line, columns) for line in text.split("\n"))


def _wrapped(line: str, columns: int) -> str:
    label = re.match(LABEL, line)
    indent = len(label[0]) if label else 0
    if indent > columns // 2:
        indent = len(line) - len(line.lstrip()) + 2
    return "\n".join(wrapped(line, columns, rest=" " * indent))
