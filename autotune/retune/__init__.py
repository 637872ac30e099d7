"""Re-tuning: notice that a study's answer may no longer hold, measure again, decide, on a schedule."""
