"""The user's training script in a rank, run unchanged under hooks."""
