"""Table of the settings of a study: their meaning, their command-line options, their comments in `study.yaml`.

The options of the commands, the docstring of `autotune.run`, the comments in `study.yaml` and `docs/reference.md` are
made from it. Types, defaults and checks are in `StudySpec`. It imports nothing heavy: `autotune --help` reads it.
"""

from __future__ import annotations

from typing import NamedTuple


class Setting(NamedTuple):
    """Description of one key of `study.yaml`.

    Attributes:
        help: Its meaning, in one sentence.
        more: Further sentences, which `--help` leaves out.
        metavar: Form of the value on the command line; "" for a switch.
        flag: Its option; "" for the key with dashes.
        off: The option that switches it off, if any.
        comment: Comment above it in a written `study.yaml`; it may also describe the keys below it.
        variable: Environment variable that also sets it.
        repeatable: The option may be given several times, and the values add up.
        option: Whether the command line has an option for it.
        optional: An empty value is not written to `study.yaml`.
    """

    help: str
    more: str = ""
    metavar: str = ""
    flag: str = ""
    off: str = ""
    comment: str = ""
    variable: str = ""
    repeatable: bool = False
    option: bool = True
    optional: bool = False


# fmt: off
SETTINGS: dict[str, Setting] = {
    "name": Setting(
        "Name of the study (default: from the target).",
        more="Its folder below `studies/`; by default the target's file name, or its folder's.", metavar="NAME",
        flag="--study"),
    "target": Setting(
        "The user's `model.py` or training script; what `command` starts, where there is one.", option=False,
        comment="The model or the training script, relative to this file."),
    "command": Setting(
        "A launch command, whose script is tuned.", more="The file keeps it instead of the target.", option=False,
        comment="The launch command; it is run once to see which script it starts, and how."),
    "script_args": Setting(
        "The training script's own arguments.",
        more="`{micro_batch_size}` and other fields of a candidate in them are filled in. From Python a"
        " list, or one text that is split as a shell does.", option=False, optional=True,
        comment="The script's command line, and constants in it that are replaced."),
    "script_set": Setting(
        "Replace a constant of the training script.",
        more='With the same templates: `{"BATCH": "{micro_batch_size}"}`.', metavar="NAME={micro_batch_size}",
        flag="--set", repeatable=True, optional=True),
    "arg_mappings": Setting(
        "Flags of the script by DeepSpeed's name of the setting that they carry, as in DeepSpeed's own tuner.",
        option=False, optional=True, comment="Flags of the script that carry a setting."),
    "working_dir": Setting(
        "Folder that a script or a command runs in (default: the script's own).", option=False, optional=True,
        comment="Where the script runs."),
    "space": Setting(
        "Search spaces: presets or YAML files.",
        more="Or knobs with their values, as `{zero_stage: [0, 1, 2]}`. See `autotune ls spaces`.", metavar="A,B",
        repeatable=True, comment="What is tuned: each knob with its values; null leaves DeepSpeed's default."),
    "goal": Setting(
        "What is wanted; see `autotune ls goals`.",
        more="It sets the objectives, their weights, and so what is recommended. Without it `balanced`.",
        metavar="balanced|throughput|latency|time-to-loss|memory|cost", optional=True,
        comment="What is wanted, which sets the objectives (`autotune ls goals`)."),
    "objectives": Setting(
        "Objectives in place of a goal: presets or YAML files.",
        more="Or mappings with a `metric`. See `autotune ls objectives`.",
        metavar="A,B", flag="--objective", repeatable=True, comment="What is optimised."),
    "constraints": Setting(
        "Bounds that a solution must keep, by metric, as `{peak_memory_bytes: {max: 4GiB}}`.", option=False,
        comment="Bounds that a solution must keep."),
    "quick": Setting(
        "The fewest trials that decide: seek the goal alone.",
        more="Not the front; 8 trials, 1 finalist, `stop_below` 3%, where nothing else is stated.", optional=True,
        comment="Seek the goal alone."),
    "trials": Setting(
        "Trials in all, resumed ones and the baseline included.", metavar="N",
        comment="The budget: trials in all, and wall time (null: no limit)."),
    "time_budget_s": Setting(
        "Wall time in all, after which no trial is started.", more="Seconds, or a text such as `10m`.",
        metavar="10m", flag="--time-budget"),
    "ranks": Setting(
        "Ranks of a trial (default: the launcher's, or one per GPU).",
        more="On a CPU the default is one on each machine.", metavar="N",
        comment="Ranks of every trial; null is one for each device."),
    "nodes": Setting(
        "Machines that the ranks of a trial are spread over.", more="By default one, or all that `hostfile` names.",
        metavar="N", optional=True, comment="Machines that they are spread over."),
    "executor": Setting(
        "What runs the trials (default: local).", more="See `docs/clusters.md`.", metavar="local|slurm|ray",
        comment="The engine that runs trials, and what it is told."),
    "executor_options": Setting(
        "What the executor is told, as partition=gpu; repeatable.", metavar="NAME=VALUE", flag="--executor-option",
        repeatable=True, optional=True),
    "patience_s": Setting(
        "How long a trial waits for machines that are away.",
        more="Attempts that lost their machines count, time in a queue does not. Seconds, or a text such as `30m`. Then"
        " the study stops with exit status 75, and the same command continues it.", metavar="30m", flag="--patience"),
    "hostfile": Setting(
        "Machines for local, over your ssh: HOST slots=N a line.", metavar="FILE", optional=True,
        comment="Machines that trials reach over ssh."),
    "base_config": Setting(
        "Your DeepSpeed configuration: the baseline.",
        more="The path of its JSON, or a mapping. Candidates are laid over it.", metavar="DS.JSON",
        comment="The baseline's DeepSpeed configuration, which candidates are laid over."),
    "checkpoint_every": Setting(
        "Recomputation in the baseline of a model.py: every k-th block; 0: none.", option=False, optional=True,
        comment="The baseline recomputes the activations of every k-th block."),
    "global_batch": Setting(
        "Samples per optimizer step.",
        more="The baseline's (`keep`), any (`free`), a number, or lowest and highest; by default kept if"
        " your configuration sets a batch.", metavar="keep|free|LO..HI",
        comment="Samples per optimizer step: keep the baseline's, free, or LOWEST..HIGHEST."),
    "device_memory_bytes": Setting(
        "Memory limit of a device.",
        more="Bytes, or a text such as `4GiB`; by default what it has. On a CPU a watchdog holds the"
        " resident memory of each rank to it.", metavar="4GiB", flag="--device-memory",
        comment="Memory limit of a device; null is what it has."),
    "max_length": Setting(
        "Length that samples may reach, where the data cannot be read whole.",
        more="In tokens; the longest samples are extended to it for the check of what fits.", metavar="N", optional=True,
        comment="What fits is tried on the longest samples; the length that they may reach, and what else must fit."),
    "with_eval": Setting(
        "Check that one evaluation step fits, too.", more="In the finalists' re-measurements.", optional=True),
    "with_save": Setting(
        "Check that a checkpoint can be saved, too.",
        more="In the finalists' re-measurements; it is removed at once.", optional=True),
    "sampler": Setting("What proposes candidates; see `autotune ls samplers`.", metavar="NAME"),
    "memory_filter": Setting("Skip candidates that surely do not fit memory.", flag="--filter", off="--no-filter"),
    "stop_below": Setting(
        "End when going on is expected to gain less; 0: never.",
        more="A share of the goal, as 0.01 or `1%`; only `physics` expects.", metavar="1%"),
    "stop_trials": Setting(
        "End trials that are clearly worse.", more="That is, worse than a measured one on every objective.",
        off="--no-stop-trials"),
    "storage": Setting(
        "Database, as postgresql://USER@HOST/DB (default: studies/autotune.db).",
        more="Any SQLAlchemy URL that Optuna takes; PostgreSQL needs `pip install 'psycopg[binary]'`, MySQL"
        " `pip install pymysql`. Written to the file without its password.", metavar="URL", variable="AUTOTUNE_STORAGE",
        comment="null is SQLite in studies/autotune.db."),
    "parallel": Setting(
        "Trials at once, on disjoint devices or nodes.", metavar="N",
        comment="Trials at once; on one host only if they may overlap, where they disturb one another."),
    "overlap": Setting(
        "Let trials share a host, where they disturb one another.",
        more="On disjoint devices or cores; the report says which trials did."),
    "learning_rate_rule": Setting(
        "How the learning rate follows the batch: auto, none, linear, sqrt.",
        more="`auto` is linear for SGD and sqrt for others.", metavar="RULE"),
    "seed": Setting("Seed of weights, data order and search.", metavar="N"),
    "trial_budget_s": Setting(
        "Training time of one trial, warm-up included.", more="Seconds, or a text such as `20s`.", option=False,
        comment="Training time of one trial, and when its processes are killed."),
    "trial_deadline_s": Setting("Wall time after which a trial's processes are killed.", option=False),
    "min_samples": Setting("Samples that a trial trains on at least, as far as its budget goes.", option=False),
    "finalists": Setting(
        "Candidates that are checked and measured again at the end, beside the baseline; 0: none.", option=False,
        comment="The best are checked and measured again at the end, this many, this often."),
    "repeats": Setting(
        "Rounds in which the best are measured again at least; up to four times as many until it is settled which is best.",
        option=False,
    ),
    "branch": Setting(
        "Check other global batches by a branch.",
        more="Unchecked, a candidate with another global batch is not recommended.", off="--no-branch",
        comment="Other global batches are checked by a branch from the baseline's state, on this many tokens."),
    "branch_tokens": Setting(
        "Tokens that each side of a branch trains on.",
        more="Samples, where those are no sequences; by default twice what the baseline trains on in a trial.",
        metavar="N"),
    "from_checkpoint": Setting(
        "Weights that noise probe and branches start from: DeepSpeed's, or a state dict.",
        more="By default those that a probe has warmed up.", metavar="DIR", optional=True),
}
# fmt: on


def flag(key: str) -> str:
    """Returns the command-line option of a setting."""
    return (SETTINGS[key].flag if key in SETTINGS else "") or f"--{key.replace('_', '-')}"


def with_settings(docstring: str, left_out: tuple[str, ...] = ()) -> str:
    """Returns a docstring with its line `{settings}` replaced by the settings, one a line."""
    rows = [
        f"{key}: {' '.join(filter(None, (each.help, each.more)))}"
        for key, each in SETTINGS.items()
        if key not in left_out
    ]
    return docstring.replace("{settings}", "\n        ".join(rows))
