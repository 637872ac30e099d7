"""The section `autotuning` of a DeepSpeed configuration: what DeepSpeed's own tuner is told."""

from collections.abc import Mapping
from typing import Any

from autotune.space.deepspeed import DsConfig

# What its settings ask for, and the options that ask for it here.
OPTIONS = {
    "metric": "--goal",
    "min_train_batch_size": "--global-batch",
    "max_train_batch_size": "--global-batch",
    "min_train_micro_batch_size_per_gpu": "--space",
    "max_train_micro_batch_size_per_gpu": "--space",
    "tuner_num_trials": "--trials",
}
END_PROFILE_STEP = 5  # DeepSpeed's default


def ends_trainings(config: Mapping[str, Any]) -> bool:
    """Whether DeepSpeed ends any training with the configuration after a few steps, which its tuner reads."""
    return bool(_section(config).get("enabled"))


def off(config: DsConfig) -> DsConfig:
    """Returns a configuration that trains to the end."""
    return {**config, "autotuning": {**_section(config), "enabled": False}} if ends_trainings(config) else config


def notes(config: Mapping[str, Any]) -> list[str]:
    """Returns what the user of a configuration that was made for DeepSpeed's own tuner should know."""
    section, found = _section(config), []
    if ends_trainings(config):
        last = section.get("end_profile_step", END_PROFILE_STEP)
        found.append(
            f"`autotuning.enabled` in your DeepSpeed configuration ends each training after {last} steps, without an error;"
            " `autotune export` turns it off: turn it off in your own file, too"
        )
    if unread := [name for name in OPTIONS if name in section]:
        options = " and ".join(dict.fromkeys(OPTIONS[name] for name in unread))
        found.append(
            f"of the section `autotuning` in your DeepSpeed configuration only `arg_mappings` is used; what"
            f" {', '.join(f'`{name}`' for name in unread)} state there is for {options} here"
        )
    return found


def _section(config: Mapping[str, Any]) -> Mapping[str, Any]:
    section = config.get("autotuning")
    return section if isinstance(section, Mapping) else {}
