"""HTML elements: whatever is put into one is escaped, unless it is an element itself."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from html import escape
from typing import TypeAlias

SHORT_CODE = 34
LONG_WORD = 12
VOID = frozenset({"input", "meta", "br", "wbr"})


class Html(str):
    """Text that is HTML already."""

    __slots__ = ()


Child: TypeAlias = str | None
Attribute: TypeAlias = str | float | bool | None


def el(tag: str, *children: Child, **attributes: Attribute) -> Html:
    """An element.

    Args:
        tag: Its name.
        *children: Texts, which are escaped, and elements; None is left out.
        **attributes: A trailing underscore is dropped, inner ones are hyphens (`class_`, `data_v`); None and False leave the attribute out.
    """
    stated = "".join(
        _attribute(name, value) for name, value in attributes.items() if value is not None and value is not False
    )
    return Html(f"<{tag}{stated}>" if tag in VOID else f"<{tag}{stated}>{group(*children)}</{tag}>")


def group(*children: Child) -> Html:
    """Several texts and elements after one another."""
    return Html("".join(child if isinstance(child, Html) else escape(child) for child in children if child is not None))


def each(children: Iterable[Child]) -> Html:
    """The same, from an iterable."""
    return group(*children)


def section(heading: str, anchor: str, note: str, *content: Child) -> Html:
    """A part of the page: its heading, to be linked to, a note on how to read it, and its content."""
    return group(el("h2", heading, id=anchor), el("p", note, class_="note"), *content)


def controls(*content: Child) -> Html:
    """A row of what a reader chooses with."""
    return el("div", *content, class_="controls")


def choice(label: str, name: str, options: Mapping[str, str], *, chosen: str = "") -> Html:
    """A choice by name among values, each with its label."""
    return el(
        "label",
        f"{label} ",
        el(
            "select",
            each(el("option", text, value=value, selected=value == chosen) for value, text in options.items()),
            id=name,
        ),
    )


def plot(name: str, label: str, *content: Child, low: bool = True) -> Html:
    """What the page's script draws into."""
    return el("div", *content, class_="plot low" if low else "plot", id=name, role="img", aria_label=label)


def with_code(text: str) -> Html:
    """Escaped text; what stands in backticks is code, which is kept on one line if it is short."""
    return each(_code(part) if i % 2 else part for i, part in enumerate(re.split(r"`([^`]+)`", text)))


def breakable(text: str) -> Html:
    """Words that stay whole, unless one (`bf16_master_weights_and_grads=True`) is longer than its line: that breaks at its joints."""
    return Html(
        " ".join(
            el("span", Html(re.sub(r"([_=])", r"\1<wbr>", escape(word)))) if len(word) > LONG_WORD else escape(word)
            for word in text.split()
        )
    )


def _code(text: str) -> Html:
    return el("code", text, class_="short" if len(text) <= SHORT_CODE else None)


def _attribute(name: str, value: Attribute) -> str:
    name = name.rstrip("_").replace("_", "-")
    return f" {name}" if value is True else f' {name}="{escape(str(value))}"'
