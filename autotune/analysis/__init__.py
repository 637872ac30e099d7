"""What the trials tell."""
