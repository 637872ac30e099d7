"""A plain `model.py` in a rank: load it, feed it, train it."""
