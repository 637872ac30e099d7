"""The data of a trial: lengths of samples, the largest batch, and how the loader is changed."""
