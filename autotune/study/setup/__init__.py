"""From a spec to a plan: load the target, find its baseline, profile it, choose the engine."""
