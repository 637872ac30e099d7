"""What measurements mean: metrics, objectives, Pareto front, recommendation, bottlenecks."""
