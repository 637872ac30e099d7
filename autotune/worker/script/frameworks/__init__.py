"""Adapters of training frameworks: each patches what its framework decides above `deepspeed.initialize`."""
