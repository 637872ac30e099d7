"""Start a worker somewhere, watch it, stop it."""
