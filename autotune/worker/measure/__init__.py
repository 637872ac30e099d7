"""Measurement of a trial: steps, memory, batches, gradients, load of the machine."""
