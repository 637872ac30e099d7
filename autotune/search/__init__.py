"""Which candidate next: the samplers by name."""

from autotune.errors import UserError, nearest

SAMPLERS = {
    "physics": "analytic prior of memory and step time, corrected by every trial; stops by itself (the default)",
    "tpe": "multivariate tree-structured Parzen estimator with constraints; follows conditional knobs",
    "gp": "Gaussian process with constraints; strong on smooth spaces, seconds a suggestion where there are several objectives",
    "nsga2": "genetic algorithm for several objectives; needs many trials",
    "random": "uniform over what can run",
    "grid": "every candidate, in the order of the space",
}


def check_sampler(name: str, where: str = "sampler") -> None:
    """Refuses a sampler that does not exist."""
    if name not in SAMPLERS:
        raise UserError(
            f"{where}: unknown {name!r}.{nearest(name, SAMPLERS)} Known: {', '.join(SAMPLERS)}. See `autotune ls samplers`."
        )
