"""The HTML report: one page that works offline."""
