"""autotune: find the DeepSpeed configuration that trains your model best, by measuring it."""

__version__ = "0.1.0"


class UserError(Exception):
    """What the user gave cannot be used; the message says where, what, what is known, and what to do."""
