"""Profile a workload and the machine: what the forecasts start from."""
