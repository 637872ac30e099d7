"""Advice before the first run: from the facts of a model and of devices to a configuration with its forecast."""
