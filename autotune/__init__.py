"""autotune: find the DeepSpeed configuration that trains your model best, by measuring it."""

__version__ = "0.1.0"


class UserError(Exception):
    """What the user gave cannot be used; the message says where, what, what is known, and what to do."""

    def __str__(self) -> str:
        """The message on one line, whatever it quotes: no control characters, which a terminal would obey, and not without end."""
        lines = [line.strip() for line in super().__str__().splitlines()]
        text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in " ".join(filter(None, lines)))
        return text if len(text) <= 2000 else f"{text[:1500]} ... {text[-400:]}"
