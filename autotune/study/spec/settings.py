"""Table of the settings of a study: their meaning, their command-line options, their comments in `study.yaml`.

The options of the commands, the docstring of `autotune.run`, the comments in `study.yaml` and `docs/reference.md` are
made from it. Types, defaults and checks are in `StudySpec`. It imports nothing heavy: `autotune --help` reads it.
"""

from typing import Any, NamedTuple


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
        default: Its default; None where it has none, or where `help` states it.
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
    default: Any = None


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
        "A launch command, whose script is tuned.", more="The file keeps it instead of the target; from Python the target is the command.",
        option=False,
        comment="The launch command; it is run once to see which script it starts, and how."),
    "script_args": Setting(
        "The training script's own arguments.",
        more="`{micro_batch_size}` and other fields of a candidate in them are filled in. From Python a"
        " list, or one text that is split as a shell does.", option=False, optional=True,
        comment="The script's command line, and constants in it that are replaced."),
    "script_set": Setting(
        "Replace a constant of the training script, such as BATCH={micro_batch_size}.",
        more='With the same templates: `{"BATCH": "{micro_batch_size}"}`.', metavar="NAME={micro_batch_size}",
        flag="--set", repeatable=True, optional=True),
    "arg_mappings": Setting(
        "Flags of the script by DeepSpeed's name of the setting that they carry, as in DeepSpeed's own tuner.",
        option=False, optional=True, comment="Flags of the script that carry a setting."),
    "working_dir": Setting(
        "Folder that a script or a command runs in (default: the script's own).", option=False, optional=True,
        comment="Where the script runs."),
    "space": Setting(
        "Which knobs are tuned: presets or YAML files; see `autotune ls spaces`.",
        more="Or knobs with their values, as `{zero_stage: [0, 1, 2]}`.", metavar="A,B",
        repeatable=True, comment="What is tuned: each knob with its values; null leaves DeepSpeed's default."),
    "goal": Setting(
        "What you want most; see `autotune ls goals` (default: balanced).",
        more="It sets the objectives, their weights, and so what is recommended. Without it `balanced`.",
        metavar="balanced|throughput|latency|time-to-loss|memory|cost", optional=True,
        comment="What is wanted, which sets the objectives (`autotune ls goals`)."),
    "objectives": Setting(
        "Objectives in place of a goal: presets or YAML files; see `autotune ls objectives`.",
        more="Or mappings with a `metric`.",
        metavar="A,B", flag="--objective", repeatable=True, comment="What is optimised."),
    "constraints": Setting(
        "Bounds that a solution must keep, by metric, as `{peak_memory_bytes: {max: 4GiB}}`.", option=False,
        comment="Bounds that a solution must keep."),
    "quick": Setting(
        "Few trials: look only for the best by the goal, not for the front.",
        more="It ends when no trial is expected to gain 3% (`stop_below`); at most 8 trials of 1 s, which are measured"
        " again only where it is not settled whether the best beats the baseline. Each of these can be stated;"
        " of a study.yaml without `quick` only what differs from the default counts beside the option.", optional=True,
        comment="Seek the goal alone."),
    "trials": Setting(
        "Number of trials at most, the baseline and those of earlier runs included.", metavar="N",
        comment="The budget: trials in all, and wall time (null: no limit).", default=30),
    "time_budget_s": Setting(
        "Wall time at most, from the command's start to its answer.",
        more="Seconds, or a text such as `10m`. Earlier runs of the study count.",
        metavar="10m", flag="--time-budget"),
    "ranks": Setting(
        "Ranks of a trial (default: the launcher's, or one per GPU).",
        more="On a CPU the default is one on each machine.", metavar="N",
        comment="Ranks of every trial; null is one for each device."),
    "nodes": Setting(
        "Machines that the ranks of a trial are spread over.", more="By default one, or all that `hostfile` names.",
        metavar="N", optional=True, comment="Machines that they are spread over."),
    "executor": Setting(
        "What runs the trials.", more="See `docs/clusters.md`.", metavar="local|slurm|ray",
        comment="The engine that runs trials, and what it is told.", default="local"),
    "executor_options": Setting(
        "A setting of the executor, such as partition=gpu; repeatable.", metavar="NAME=VALUE", flag="--executor-option",
        repeatable=True, optional=True),
    "patience_s": Setting(
        "How long a trial waits for machines that went away.",
        more="Attempts that lost their machines count, time in a queue does not. Seconds, or a text such as `30m`. Then"
        " the study stops with exit status 75, and the same command continues it.", metavar="30m", flag="--patience", default=1800.0),
    "hostfile": Setting(
        "Machines to reach over ssh, one `HOST slots=N` a line.", metavar="FILE", optional=True,
        comment="Machines that trials reach over ssh."),
    "base_config": Setting(
        "Your DeepSpeed configuration: the baseline.",
        more="The path of its JSON, or a mapping. Candidates are laid over it.", metavar="DS.JSON",
        comment="The baseline's DeepSpeed configuration, which candidates are laid over."),
    "checkpoint_every": Setting(
        "Recomputation in the baseline of a model.py: every k-th block; 0: none.", option=False, optional=True,
        comment="The baseline recomputes the activations of every k-th block.", default=0),
    "global_batch": Setting(
        "Samples per optimizer step: the baseline's, any, or bounds.",
        more="The baseline's (`keep`), any (`free`), a number, or lowest and highest; by default kept if"
        " your configuration sets a batch.", metavar="keep|free|LO..HI",
        comment="Samples per optimizer step: keep the baseline's, free, or LOWEST..HIGHEST."),
    "device_memory_bytes": Setting(
        "Memory limit of a device (default: what it has).",
        more="Bytes, or a text such as `4GiB`. On a CPU a watchdog holds the"
        " resident memory of each rank to it.", metavar="4GiB", flag="--device-memory",
        comment="Memory limit of a device; null is what it has."),
    "max_length": Setting(
        "Length that samples may reach, where the data cannot be read whole.",
        more="In tokens; the longest samples are extended to it for the check of what fits.", metavar="N", optional=True,
        comment="What fits is tried on the longest samples; the length that they may reach, and what else must fit."),
    "with_eval": Setting(
        "Check that one evaluation step fits, too.", more="In the finalists' re-measurements; without `repeats` in each trial.",
        optional=True),
    "with_save": Setting(
        "Check that a checkpoint can be saved, too.",
        more="In the finalists' re-measurements, without `repeats` in each trial; it is removed at once.", optional=True),
    "sampler": Setting("What proposes the next candidate; see `autotune ls samplers`.", metavar="NAME", default="physics"),
    "memory_filter": Setting("Do not run what surely does not fit the memory.", flag="--filter", off="--no-filter", default=True),
    "stop_below": Setting(
        "Stop when more trials are expected to improve the goal by less than this; 0: never.",
        more="A share of the goal, as 0.01 or `1%`; only `physics` expects.", metavar="1%", default=0.01),
    "stop_trials": Setting(
        "End a trial early that is clearly worse than another one.", more="That is, worse on every objective.",
        off="--no-stop-trials", default=True),
    "storage": Setting(
        "Database, as postgresql://USER@HOST/DB (default: studies/autotune.db).",
        more="Any SQLAlchemy URL that Optuna takes; PostgreSQL needs `pip install 'psycopg[binary]'`, MySQL"
        " `pip install pymysql`. Written to the file without its password.", metavar="URL", variable="AUTOTUNE_STORAGE",
        comment="null is SQLite in studies/autotune.db."),
    "parallel": Setting(
        "Trials at once, on disjoint devices or nodes.", metavar="N",
        comment="Trials at once; on one host only if they may overlap, where they disturb one another.", default=1),
    "overlap": Setting(
        "Let parallel trials share a machine, where they disturb one another.",
        more="On disjoint devices or cores; the report says which trials did."),
    "learning_rate_rule": Setting(
        "How the learning rate follows the batch.",
        more="`auto` is linear for SGD and sqrt for others.", metavar="auto|none|linear|sqrt", default="auto"),
    "seed": Setting("Seed of weights, data order and search.", metavar="N", default=0),
    "trial_budget_s": Setting(
        "Training time of one trial after its first step.",
        more="Seconds, or a text such as `20s`; at the default no more than a twentieth of the time budget.", option=False,
        comment="Training time of one trial, and when its processes are killed.", default=10.0),
    "trial_deadline_s": Setting(
        "Wall time after which a trial's processes are killed.",
        more="Seconds, or a text such as `20m`: more where a model takes minutes to load.", metavar="5m",
        flag="--trial-deadline", default=300.0),
    "min_samples": Setting("Samples that a trial trains on at least, as far as its budget goes.", option=False, default=0),
    "finalists": Setting(
        "Candidates that are checked and measured again at the end, beside the baseline; 0: none.", option=False,
        comment="The best are checked and measured again at the end, this many, this often.", default=3),
    "repeats": Setting(
        "Rounds in which the best are measured again at least; up to four times as many until it is settled which is best.",
        more="0: at most two, and none where it is settled that the best beats the baseline.", option=False, default=2),
    "branch": Setting(
        "Check a candidate with another global batch by training it and the baseline from one state.",
        more="Unchecked, a candidate with another global batch is not recommended.", off="--no-branch",
        comment="Other global batches are checked by a branch from the baseline's state, on this many tokens.", default=True),
    "branch_tokens": Setting(
        "Tokens that each side of such a check trains on.",
        more="Samples, where those are no sequences; by default twice what the baseline trains on in a trial, at least 24"
        " steps where there is time, and longer where that does not decide.",
        metavar="N"),
    "from_checkpoint": Setting(
        "Weights that the checks of another global batch start from: a DeepSpeed checkpoint or a state dict.",
        more="By default those that a probe has warmed up.", metavar="DIR", optional=True),
}
# fmt: on

# The options of a study in groups, as `--help` lists them.
GROUPS: dict[str, tuple[str, ...]] = {
    "What to tune": ("name", "goal", "objectives", "space", "base_config", "global_batch", "script_set", "from_checkpoint"),
    "When to stop": ("quick", "trials", "time_budget_s", "stop_below", "trial_deadline_s"),
    "Where it runs": (
        "ranks", "nodes", "executor", "executor_options", "hostfile", "parallel", "overlap",
        "patience_s", "storage",
    ),
    "What must fit": ("device_memory_bytes", "max_length", "with_eval", "with_save"),
    "How it searches": ("sampler", "seed", "memory_filter", "stop_trials", "branch", "branch_tokens", "learning_rate_rule"),
}  # fmt: skip


def default_words(key: str) -> str:
    """Returns a setting's default as `--help` states it; "" if it has none that is worth a word."""
    default, metavar = SETTINGS[key].default, SETTINGS[key].metavar
    if isinstance(default, bool):
        return "on" if default else ""
    if metavar.endswith("%"):
        return f"{default:.0%}"
    if metavar.endswith("m") and metavar[:-1].isdigit() and default is not None:
        return f"{default / 60:g}m"
    return "" if default is None else f"{default:g}" if isinstance(default, float) else str(default)


def flag(key: str) -> str:
    """Returns the command-line option of a setting; its key if it has none."""
    if key not in SETTINGS or not SETTINGS[key].option:
        return key
    return SETTINGS[key].flag or f"--{key.replace('_', '-')}"


def with_settings(docstring: str) -> str:
    """Returns the docstring of a function that takes a target with its line `{settings}` replaced by the others, one a line."""
    rows = [
        f"{key}: {' '.join(filter(None, (each.help, each.more)))}"
        for key, each in SETTINGS.items()
        if key not in ("target", "command")
    ]
    return docstring.replace("{settings}", "\n        ".join(rows))
