"""A study from its spec to its last trial: setup, storage, proposals, measurements, finalists."""
