"""The command line: parse, call, print. Everything heavy is imported by the command that needs it."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from autotune import UserError, __version__

app = typer.Typer(
    name="autotune",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # importing rich would double what --help takes
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Find the DeepSpeed configuration that trains your model best, by measuring it.",
)

Target = Annotated[
    str,
    typer.Argument(
        metavar="TARGET", help="A model.py, a training script, a study.yaml, or a launch command in quotation marks."
    ),
]
ScriptArgs = Annotated[list[str] | None, typer.Argument(metavar="-- ARGS", help="The training script's own arguments.")]
ScriptSet = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME={micro_batch_size}", help="Replace a constant of the training script."),
]
StudyName = Annotated[str, typer.Argument(metavar="STUDY", help="Name of a study.")]
Storage = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        envvar="AUTOTUNE_STORAGE",
        help="Database, as postgresql://USER@HOST/DB (default: studies/autotune.db).",
    ),
]
Executor = Annotated[
    str | None, typer.Option("--executor", metavar="local|slurm|ray", help="What runs the trials (default: local).")
]
Nodes = Annotated[
    int | None, typer.Option("--nodes", metavar="N", help="Machines that the ranks of a trial are spread over.")
]
ExecutorOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--executor-option", metavar="NAME=VALUE", help="What the executor is told, as partition=gpu; repeatable."
    ),
]
Hostfile = Annotated[
    Path | None,
    typer.Option("--hostfile", metavar="FILE", help="Machines for local, over your ssh: HOST slots=N a line."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
STUDIES = Path("studies")


def main() -> None:
    """Runs a command; what the user got wrong ends as one sentence and exit status 2, Ctrl-C and SIGTERM with one that says so."""
    try:
        app(standalone_mode=True)
    except SystemExit as error:
        stop = _stop_behind(error)
        if stop is None:
            raise
        print("autotune: stopped", file=sys.stderr)
        sys.exit(getattr(stop, "status", 130))
    except UserError as error:
        from autotune.masking import masked

        print(f"autotune: {masked(str(error))}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(0)
    except OSError as error:  # a full disk, a folder that cannot be written
        from autotune import files

        said = files.words(error)
        if said is None:
            raise
        print(f"autotune: {said}", file=sys.stderr)
        sys.exit(2)


def _stop_behind(error: BaseException | None) -> KeyboardInterrupt | None:
    """The interrupt that typer made an exit of."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error


def _version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
def run(
    target: Target,
    script_args: ScriptArgs = None,
    study: Annotated[
        str | None, typer.Option(metavar="NAME", help="Name of the study (default: from the target).")
    ] = None,
    space: Annotated[str | None, typer.Option(metavar="A,B", help="Search spaces: presets or YAML files.")] = None,
    objective: Annotated[str | None, typer.Option(metavar="A,B", help="Objectives: presets or YAML files.")] = None,
    trials: Annotated[int | None, typer.Option(metavar="N", help="Trials in all, resumed ones included.")] = None,
    time_budget: Annotated[str | None, typer.Option(metavar="10m", help="Wall time in all.")] = None,
    ranks: Annotated[
        int | None, typer.Option(metavar="N", help="Ranks of a trial (default: the launcher's, or one per GPU).")
    ] = None,
    executor: Executor = None,
    nodes: Nodes = None,
    executor_option: ExecutorOptions = None,
    hostfile: Hostfile = None,
    base_config: Annotated[
        Path | None, typer.Option(metavar="DS.JSON", help="Your DeepSpeed configuration: the baseline.")
    ] = None,
    global_batch: Annotated[
        str | None, typer.Option(metavar="keep|free|LO..HI", help="Samples per optimizer step.")
    ] = None,
    device_memory: Annotated[str | None, typer.Option(metavar="4GiB", help="Memory limit of a device.")] = None,
    sampler: Annotated[str | None, typer.Option(metavar="NAME", help="See `autotune ls samplers`.")] = None,
    stop_below: Annotated[
        str | None, typer.Option(metavar="1%", help="End when no larger improvement is expected; 0: never.")
    ] = None,
    memory_filter: Annotated[
        bool | None, typer.Option("--filter/--no-filter", help="Pass by what surely does not fit memory.")
    ] = None,
    stop_trials: Annotated[
        bool | None, typer.Option("--stop-trials/--no-stop-trials", help="End trials that are clearly worse.")
    ] = None,
    parallel: Annotated[
        int | None, typer.Option(metavar="N", help="Trials at once, on disjoint devices or nodes.")
    ] = None,
    overlap: Annotated[
        bool | None, typer.Option("--overlap", help="Let them share a host, where they disturb one another.")
    ] = None,
    storage: Storage = None,
    seed: Annotated[int | None, typer.Option(metavar="N", help="Seed of weights, data order and search.")] = None,
    learning_rate_rule: Annotated[
        str | None,
        typer.Option(metavar="RULE", help="How it follows the batch: auto, none, linear, sqrt, adascale, surge."),
    ] = None,
    branch: Annotated[
        bool | None, typer.Option("--branch/--no-branch", help="Check other global batches by a branch.")
    ] = None,
    branch_tokens: Annotated[
        int | None, typer.Option(metavar="N", help="Tokens that each side of a branch trains on.")
    ] = None,
    from_checkpoint: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Weights that noise probe and branches start from: DeepSpeed's, or a state dict."
        ),
    ] = None,
    script_set: ScriptSet = None,
    as_json: AsJson = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Forget the study's earlier trials.")] = False,
    no_history: Annotated[
        bool, typer.Option("--no-history", help="Do not start from what related studies found.")
    ] = False,
) -> None:
    """Tune TARGET: measure candidates, recommend one, write its DeepSpeed JSON. Run it again to resume."""
    from autotune import commands

    overrides = {
        "script_args": tuple(script_args) if script_args else None,
        "script_set": script_set or None,
        "name": study,
        "space": space,
        "objectives": objective,
        "trials": trials,
        "time_budget_s": time_budget,
        "ranks": ranks,
        "executor": executor,
        "nodes": nodes,
        "executor_options": executor_option or None,
        "hostfile": hostfile and str(hostfile),
        "base_config": base_config and str(base_config),
        "global_batch": global_batch,
        "device_memory_bytes": device_memory,
        "sampler": sampler,
        "stop_below": stop_below,
        "memory_filter": memory_filter,
        "stop_trials": stop_trials,
        "parallel": parallel,
        "overlap": overlap,
        "storage": storage,
        "seed": seed,
        "learning_rate_rule": learning_rate_rule,
        "branch": branch,
        "branch_tokens": branch_tokens,
        "from_checkpoint": from_checkpoint and str(from_checkpoint),
    }
    raise typer.Exit(commands.run(target, overrides, fresh=fresh, as_json=as_json, learn=not no_history))


@app.command()
def worker(
    study: StudyName,
    storage: Storage = None,
    parallel: Annotated[
        int | None, typer.Option(metavar="N", help="Trials at once, on disjoint devices or nodes.")
    ] = None,
    overlap: Annotated[
        bool | None, typer.Option("--overlap", help="Let them share a host, where they disturb one another.")
    ] = None,
) -> None:
    """Help `autotune run`, on another machine, with the trials of STUDY; takes a database server and the study's folder."""
    from autotune import helping

    raise typer.Exit(helping.worker(study, storage, {"parallel": parallel, "overlap": overlap}))


@app.command()
def check(
    target: Target,
    script_args: ScriptArgs = None,
    space: Annotated[str | None, typer.Option(metavar="A,B", help="Search spaces: presets or YAML files.")] = None,
    objective: Annotated[str | None, typer.Option(metavar="A,B", help="Objectives: presets or YAML files.")] = None,
    ranks: Annotated[int | None, typer.Option(metavar="N", help="Ranks of a trial.")] = None,
    executor: Executor = None,
    nodes: Nodes = None,
    executor_option: ExecutorOptions = None,
    hostfile: Hostfile = None,
    base_config: Annotated[Path | None, typer.Option(metavar="DS.JSON", help="Your DeepSpeed configuration.")] = None,
    global_batch: Annotated[
        str | None, typer.Option(metavar="keep|free|LO..HI", help="Samples per optimizer step.")
    ] = None,
    device_memory: Annotated[str | None, typer.Option(metavar="4GiB", help="Memory limit of a device.")] = None,
    script_set: ScriptSet = None,
    as_json: AsJson = False,
) -> None:
    """Load TARGET, run two real steps, and say what would be tuned."""
    from autotune import commands

    overrides = {
        "script_args": tuple(script_args) if script_args else None,
        "script_set": script_set or None,
        "space": space,
        "objectives": objective,
        "ranks": ranks,
        "executor": executor,
        "nodes": nodes,
        "executor_options": executor_option or None,
        "hostfile": hostfile and str(hostfile),
        "base_config": base_config and str(base_config),
        "global_batch": global_batch,
        "device_memory_bytes": device_memory,
    }
    raise typer.Exit(commands.check(target, overrides, as_json=as_json))


@app.command()
def predict(
    target: Target,
    script_args: ScriptArgs = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A knob, over the baseline's value.")
    ] = None,
    ranks: Annotated[int | None, typer.Option(metavar="N", help="Ranks, also more than this machine has.")] = None,
    device_memory: Annotated[str | None, typer.Option(metavar="80GiB", help="Memory of a device.")] = None,
    base_config: Annotated[
        Path | None, typer.Option(metavar="DS.JSON", help="Your DeepSpeed configuration: the baseline.")
    ] = None,
    study: Annotated[str | None, typer.Option(metavar="NAME", help="Study whose trials correct the forecast.")] = None,
    as_json: AsJson = False,
) -> None:
    """Say what a configuration of TARGET will need before it runs: memory, step time, throughput, and what binds."""
    from autotune import forecasting, library, plan

    overrides = {
        "script_args": tuple(script_args) if script_args else None,
        "name": study,
        "ranks": ranks,
        "device_memory_bytes": device_memory,
        "base_config": base_config and str(base_config),
    }
    wanted = library.wanted_study(target, overrides, show=True)
    raise typer.Exit(forecasting.predict(wanted, settings or [], plan.studies_folder(Path(target)), as_json=as_json))


@app.command()
def init(folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where to write the files.")] = Path()) -> None:
    """Write a commented study.yaml and a model.py that runs."""
    from autotune import commands

    commands.init(folder)


@app.command()
def ls(
    what: Annotated[
        str, typer.Argument(metavar="spaces|objectives|samplers|metrics|studies", help="What to list.")
    ] = "studies",
    storage: Storage = None,
    as_json: AsJson = False,
) -> None:
    """List search spaces, objectives, samplers, metrics or studies."""
    from autotune import commands

    commands.ls(what, storage, as_json=as_json)


@app.command()
def cp(
    preset: Annotated[str, typer.Argument(metavar="PRESET", help="Name of a search space or objective.")],
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Where to write it.")],
) -> None:
    """Copy a preset to a file of yours, to change it there."""
    from autotune import commands

    commands.cp(preset, file)


@app.command()
def status(
    study: Annotated[
        str | None, typer.Argument(metavar="[STUDY]", help="Name of a study (default: the one that runs).")
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Say it once, also while the study runs.")] = False,
    storage: Storage = None,
    as_json: AsJson = False,
) -> None:
    """Say how far STUDY is and what it has found; follow it while another terminal runs it. --json says it once."""
    from autotune import commands

    raise typer.Exit(commands.status(study, storage, once=once, as_json=as_json))


@app.command()
def explain(
    study: StudyName,
    why_not: Annotated[
        str | None, typer.Option(metavar="KEY=VALUE", help="Why is nothing with that value recommended?")
    ] = None,
    what_if: Annotated[
        str | None, typer.Option(metavar="KEY=VALUE", help="The recommendation with that changed.")
    ] = None,
    storage: Storage = None,
    as_json: AsJson = False,
) -> None:
    """Say why STUDY recommends what it does: what was measured, what is predicted, what a change would cost or gain."""
    from autotune import commands

    commands.explain(study, why_not, what_if, storage, as_json=as_json)


@app.command()
def export(
    study: StudyName,
    pick: Annotated[str | None, typer.Option(metavar="NAME", help="Which pick (default: recommended).")] = None,
    trial: Annotated[int | None, typer.Option(metavar="N", help="This trial instead of a pick.")] = None,
    format: Annotated[
        str, typer.Option(metavar="FORMAT", help="deepspeed, accelerate, hf-args or command.")
    ] = "deepspeed",  # noqa: A002
    output: Annotated[Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write to FILE.")] = None,
    storage: Storage = None,
) -> None:
    """Print the configuration that STUDY found, ready for your training."""
    from autotune import commands

    commands.export(study, pick, trial, format, output, storage)


@app.command()
def report(
    study: StudyName,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FOLDER", help="Write there (default: the study's folder).")
    ] = None,
    open_it: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    single_file: Annotated[
        bool, typer.Option("--single-file", help="Only the page, no JSON and CSV beside it.")
    ] = False,
    png: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Draw the plots as PNG, too; takes an installed Chromium.")
    ] = None,
    storage: Storage = None,
    as_json: AsJson = False,
) -> None:
    """Write what STUDY found as one HTML page that works offline, and as JSON and CSV."""
    from autotune import commands

    commands.report(study, storage, output, png, open_it=open_it, single_file=single_file, as_json=as_json)


@app.command()
def diagnose(
    study: StudyName,
    trial: Annotated[int | None, typer.Option(metavar="N", help="Which trial (default: the recommended one).")] = None,
    profile: Annotated[
        bool, typer.Option("--profile", help="Run it again and trace some steps; the trace is kept.")
    ] = False,
    storage: Storage = None,
    as_json: AsJson = False,
) -> None:
    """Say what a trial of STUDY is bound by, and which knob follows from it."""
    from autotune import commands

    commands.diagnose(study, trial, storage, profile=profile, as_json=as_json)


@app.command()
def scale(
    target: Target,
    script_args: ScriptArgs = None,
    ranks: Annotated[str, typer.Option(metavar="1,2,4", help="Rank counts to compare.")] = "1,2",
    weak: Annotated[
        bool, typer.Option("--weak/--strong", help="Let the global batch grow with the ranks, or keep it.")
    ] = False,
    rounds: Annotated[int, typer.Option(metavar="N", min=1, help="How often to measure each, in turns.")] = 3,
    base_config: Annotated[
        Path | None, typer.Option(metavar="DS.JSON", help="The DeepSpeed configuration to scale.")
    ] = None,
    script_set: ScriptSet = None,
    png: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the plots as PNG, too; takes an installed Chromium.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure how TARGET's configuration scales over ranks: time, throughput, speed-up, efficiency, communication."""
    from autotune import commands

    overrides = {
        "script_args": tuple(script_args) if script_args else None,
        "script_set": script_set or None,
        "base_config": base_config and str(base_config),
    }
    raise typer.Exit(
        commands.scale(target, overrides, ranks, "weak" if weak else "strong", rounds, png, as_json=as_json)
    )


@app.command()
def project(
    study: Annotated[
        str | None, typer.Argument(metavar="STUDY", help="Name of a study (default: the only one).")
    ] = None,
    devices: Annotated[int, typer.Option(metavar="N", help="Devices of the cluster, one rank each.")] = 8,
    per_node: Annotated[int, typer.Option(metavar="N", help="Devices of a node.")] = 8,
    intra_bandwidth: Annotated[
        str | None,
        typer.Option(metavar="300GB/s", help="What a collective reaches within a node (default: as measured here)."),
    ] = None,
    inter_bandwidth: Annotated[
        str | None, typer.Option(metavar="400Gbit/s", help="Of a node to the others, each way.")
    ] = None,
    intra_latency: Annotated[str | None, typer.Option(metavar="5us", help="Of a message within a node.")] = None,
    inter_latency: Annotated[str | None, typer.Option(metavar="20us", help="Of a message between nodes.")] = None,
    algorithm: Annotated[
        str, typer.Option(metavar="NAME", help="Of collectives: auto, ring, tree or hierarchical.")
    ] = "auto",
    strong: Annotated[
        bool, typer.Option("--strong/--weak", help="Keep the global batch, or let it grow with the devices.")
    ] = False,
    pick: Annotated[str, typer.Option(metavar="NAME", help="Which pick of the study.")] = "recommended",
    trial: Annotated[int | None, typer.Option(metavar="N", help="This trial of its front instead of a pick.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A knob, over the pick's value.")
    ] = None,
    device_memory: Annotated[str | None, typer.Option(metavar="80GiB", help="Memory of a device there.")] = None,
    as_json: AsJson = False,
) -> None:
    """Predict what STUDY's configurations take on a larger cluster: step time, memory, communication, efficiency."""
    from autotune import commands
    from autotune.forecasting import read_settings
    from autotune.objective import parse_bytes
    from autotune.projection import Cluster, Question

    links = {"intra_bandwidth": intra_bandwidth, "inter_bandwidth": inter_bandwidth}
    links |= {"intra_latency": intra_latency, "inter_latency": inter_latency}
    try:
        memory = float(parse_bytes(device_memory)) if device_memory else None
    except ValueError as error:
        raise UserError(f"--device-memory: {error}") from None
    question = Question(
        pick=pick,
        trial=trial,
        settings=read_settings(settings or []),
        mode="strong" if strong else "weak",
        device_memory_bytes=memory,
    )
    raise typer.Exit(
        commands.project(study, Cluster.of(devices, per_node, links, algorithm), question, as_json=as_json)
    )


@app.command()
def probe(
    target: Annotated[Path | None, typer.Argument(metavar="[MODEL.PY]", help="Whose data to draw too.")] = None,
    ranks: Annotated[
        int | None, typer.Option(metavar="N", help="Ranks that share the machine (default: one per GPU, else 2).")
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Measure even where an earlier probe is kept.")] = False,
    as_json: AsJson = False,
) -> None:
    """Measure what this machine reaches: matrix products, memory, collectives by message size, data loading."""
    from autotune import probing

    raise typer.Exit(probing.probe(target, ranks, again=again, as_json=as_json))


@app.command()
def dashboard(
    storage: Storage = None,
    port: Annotated[int, typer.Option(metavar="N", help="Port; 0 takes any that is free.")] = 8080,
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Listen there; any but this machine's own loopback asks for a token.")
    ] = "127.0.0.1",
) -> None:
    """Serve the Optuna dashboard: the recommendation and why, the front, every trial with its files."""
    from autotune import commands

    commands.dashboard(storage, host, port)


@app.command()
def doctor(
    build: Annotated[bool, typer.Option(help="Compile DeepSpeed's ops once.")] = True,
    as_json: AsJson = False,
) -> None:
    """Say what this machine has and what would fail, and build DeepSpeed's ops once."""
    from autotune import commands

    raise typer.Exit(commands.doctor(build=build, as_json=as_json))


StorageOrEnv = Annotated[
    str | None,
    typer.Option(
        "--storage",
        metavar="URL",
        envvar="AUTOTUNE_STORAGE",
        help="Database URL (default: SQLite, studies/autotune.db).",
    ),
]


@app.command()
def changes(
    study: StudyName,
    quick: Annotated[bool, typer.Option("--quick", help="Only what shows without loading the target.")] = False,
    storage: StorageOrEnv = None,
    as_json: AsJson = False,
) -> None:
    """Say what has changed since STUDY found its answer: device, libraries, model, data, ranks, search space."""
    from autotune import upkeep

    upkeep.changes(study, storage, quick=quick, as_json=as_json)


@app.command()
def retune(
    study: StudyName,
    if_due: Annotated[bool, typer.Option("--if-due", help="Only if a schedule of the study says so.")] = False,
    if_stale: Annotated[
        bool, typer.Option("--if-stale", help="Only if something that it depends on has changed.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Search although nothing moved.")] = False,
    min_gain: Annotated[str, typer.Option(metavar="3%", help="Replace the configuration from this gain on.")] = "3%",
    trials: Annotated[
        int | None, typer.Option(metavar="N", min=2, help="Trials of the search (default: a fifth of the study's).")
    ] = None,
    on_change: Annotated[
        str | None, typer.Option(metavar="COMMAND", help="Run it where the configuration was replaced.")
    ] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Measure the noise scale from this state.")
    ] = None,
    storage: StorageOrEnv = None,
    as_json: AsJson = False,
) -> None:
    """Measure whether STUDY's answer is still right; search again, in few trials, if it is not. Status 0: unchanged, 3: improved."""
    from autotune import upkeep
    from autotune.spec import read_share

    options = {
        "if_due": if_due, "if_stale": if_stale, "force": force, "min_gain": read_share(min_gain, "--min-gain"), "trials": trials,
        "on_change": on_change,
    }  # fmt: skip
    raise typer.Exit(upkeep.retune(study, storage, options, checkpoint, as_json=as_json))


@app.command()
def history(
    study: Annotated[str | None, typer.Argument(metavar="STUDY", help="Only this one.")] = None,
    what: Annotated[
        str, typer.Option("--what", metavar="KIND", help="measurements, recommendations or decisions.")
    ] = "decisions",
    limit: Annotated[
        int, typer.Option("-n", "--limit", metavar="N", min=1, max=10**9, help="The newest so many.")
    ] = 50,
    storage: StorageOrEnv = None,
    as_json: AsJson = False,
) -> None:
    """List what was measured, recommended and decided across studies, newest first."""
    from autotune import upkeep

    upkeep.history(study, storage, what, limit, as_json=as_json)


@app.command()
def delete(
    study: StudyName,
    yes: Annotated[bool, typer.Option("--yes", help="Really.")] = False,
    storage: StorageOrEnv = None,
) -> None:
    """Remove STUDY, its re-tunings, schedules and history; study.yaml and its answer stay in the folder."""
    from autotune import upkeep

    upkeep.delete(study, storage, yes=yes)


schedule = typer.Typer(name="schedule", no_args_is_help=True, rich_markup_mode=None, help="When studies are re-tuned.")
app.add_typer(schedule)


@schedule.command("add")
def schedule_add(
    study: StudyName,
    every: Annotated[str | None, typer.Option(metavar="7d", help="This long after the last run.")] = None,
    cron: Annotated[
        str | None, typer.Option(metavar='"0 3 * * 0"', help="Five fields, as in a crontab; local time.")
    ] = None,
    on: Annotated[
        str | None, typer.Option("--on", metavar="environment-change", help="Only if the environment has changed.")
    ] = None,
    storage: StorageOrEnv = None,
) -> None:
    """Re-tune STUDY again and again."""
    from autotune import upkeep

    upkeep.schedule_add(study, storage, every, cron, on)


@schedule.command("list")
def schedule_list(storage: StorageOrEnv = None, as_json: AsJson = False) -> None:
    """List the schedules."""
    from autotune import upkeep

    upkeep.schedule_list(storage, as_json=as_json)


@schedule.command("remove")
def schedule_remove(
    number: Annotated[
        int, typer.Argument(metavar="NUMBER", max=2**31 - 1, help="As `autotune schedule list` shows it.")
    ],
    storage: StorageOrEnv = None,
) -> None:
    """Remove a schedule."""
    from autotune import upkeep

    upkeep.schedule_remove(number, storage)


@schedule.command("run")
def schedule_run(storage: StorageOrEnv = None) -> None:
    """Run what is due until Ctrl-C. Of several daemons one leads; another takes over when it dies."""
    from autotune import upkeep

    upkeep.schedule_run(storage)


@schedule.command("export")
def schedule_export(
    study: Annotated[str | None, typer.Argument(metavar="STUDY", help="Only this one.")] = None,
    cron: Annotated[bool, typer.Option("--cron", help="Lines of a crontab.")] = False,
    systemd: Annotated[bool, typer.Option("--systemd", help="A service and a timer.")] = False,
    slurm: Annotated[bool, typer.Option("--slurm", help="Lines for scrontab.")] = False,
    k8s: Annotated[bool, typer.Option("--k8s", help="A Kubernetes CronJob.")] = False,
    github: Annotated[bool, typer.Option("--github", help="A workflow of GitHub Actions.")] = False,
    storage: StorageOrEnv = None,
) -> None:
    """Print the schedules for a scheduler of yours, which calls `autotune retune STUDY --if-due`."""
    from autotune import UserError, upkeep

    forms = {"cron": cron, "systemd": systemd, "slurm": slurm, "k8s": k8s, "github": github}
    wanted = [name for name, given in forms.items() if given]
    if len(wanted) != 1:
        raise UserError(f"schedule export: give one of {', '.join(f'--{name}' for name in forms)}")
    upkeep.schedule_exported(wanted[0], study, storage)


def commands_of(application: typer.Typer = app) -> Iterable[str]:
    """Names of the commands, for the tests that hold the documents to them."""
    return [
        command.name or (command.callback.__name__ if command.callback else "")
        for command in application.registered_commands
    ]


if __name__ == "__main__":
    main()
