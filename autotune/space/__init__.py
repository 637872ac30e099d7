"""Candidates and the space they are drawn from: knobs, legality, DeepSpeed's keys."""
