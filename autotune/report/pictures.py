"""Figures as PNG files, by plotly's image export: the package kaleido with an installed Chromium or Chrome."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autotune.errors import UserError

WIDTH_PX, HEIGHT_PX, SCALE = 1240, 560, 2.0


def write(figures: Mapping[Path, Mapping[str, Any]], *, height_px: int = HEIGHT_PX) -> None:
    """Writes each figure as PNG to its path; a UserError if kaleido or a browser is missing or failed."""
    try:
        import kaleido  # noqa: F401
    except ImportError:
        raise UserError("PNG needs the package kaleido: pip install kaleido") from None
    import plotly.graph_objects as go
    import plotly.io as pio

    drawn = [go.Figure(figure).update_layout(template="plotly_white") for figure in figures.values()]
    try:
        pio.write_images(drawn, list(figures), format="png", width=WIDTH_PX, height=height_px, scale=SCALE)
    except Exception as error:  # kaleido and the browser raise exceptions of many kinds
        if "chrome" in f"{type(error).__name__} {error}".lower():
            raise UserError("PNG needs an installed Chromium or Chrome (Debian: apt-get install chromium)") from error
        raise UserError(f"the browser drew no PNG: {type(error).__name__}: {error}") from error
