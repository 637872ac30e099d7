"""Secrets: what is taken for one, and that none of a study's reaches a file, the database, a page or a log."""

import contextlib
import io
import json
import stat
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from support.instant import WORKLOAD, Instant, failed, report
from support.paths import ROOT

from autotune.cli import app
from autotune.report import load
from autotune.report.files import write_answer, write_report
from autotune.report.progress import ProgressView
from autotune.space import feasibility
from autotune.space.candidate import Candidate
from autotune.space.rule import Setting
from autotune.study.events import Broadcast, Journal, path_in
from autotune.study.runner import Runner
from autotune.study.setup.plan import Plan
from autotune.study.spec.spec import SpecError, StudySpec, stated_command
from autotune.study.storage import records
from autotune.study.storage.database import open_storage
from autotune.system import redaction
from autotune.system.redaction import HIDDEN, holds_mask, is_secret, redact, without_secrets
from autotune.trial.command import Invocation
from autotune.trial.result import Outcome
from autotune.trial.workload import Probed

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize(
    "name",
    [
        "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN",
        "PGPASSWORD", "MYSQL_PWD", "DB_PASS", "OPENAI_API_KEY", "KAGGLE_KEY", "GITHUB_PAT", "SENTRY_DSN", "SLACK_WEBHOOK_URL", "REDIS_AUTH",
        "CLIENT_SECRET", "SECRET_KEY", "--api-key", "--api_key", "--hub_token", "--token", "--password", "--wandb-key", "apiKey",
        "comet.api_key",
        "GOOGLE_APPLICATION_CREDENTIALS", "AZURE_STORAGE_KEY", "Authorization",
    ],
)  # fmt: skip
def test_the_name_of_a_secret_is_known(name):
    assert is_secret(name)


@pytest.mark.parametrize(
    "name",
    [
        "", "PATH", "PWD", "OLDPWD", "HF_HOME", "HF_TOKEN_PATH", "SSH_AUTH_SOCK", "TOKENIZERS_PARALLELISM", "--tokenizer", "--pad_token",
        "--eos-token", "--image_token", "--max_tokens", "--num_key_value_heads", "--text-key", "--sort_key", "--key", "--forward_pass",
        "zero_optimization.stage", "--password-file", "--bsz", "MASTER_PORT", "experiment_key",
    ],
)  # fmt: skip
def test_the_name_of_something_else_is_not_taken_for_one(name):
    assert not is_secret(name)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("WANDB_API_KEY=abc torchrun train.py", "WANDB_API_KEY=*** torchrun train.py"),
        ("train.py --api-key abc --bsz 4", "train.py --api-key *** --bsz 4"),
        ("train.py --api-key='a b' --hub_token=x", "train.py --api-key='***' --hub_token=***"),
        ("train.py --api-key $WANDB_API_KEY", "train.py --api-key $WANDB_API_KEY"),
        ("--use_auth_token True --pad_token <pad>", "--use_auth_token True --pad_token <pad>"),
        ("http_proxy=http://ann:pw@proxy:3128/", "http_proxy=http://ann:***@proxy:3128/"),
        ("see http://host:8080/a@b", "see http://host:8080/a@b"),
        ("at postgresql://ann:p/w@h/db, said the server", "at postgresql://ann:***@h/db, said the server"),
        ("GET https://s3/x?X-Amz-Signature=0af&part=1", "GET https://s3/x?X-Amz-Signature=***&part=1"),
        ("Authorization: Bearer abcdefgh12345", "Authorization: Bearer ***"),
        ("401 for hf_abcdefghijklmnopqrstuvwx", "401 for ***"),
        ("key sk-proj-0123456789abcdefghij.", "key ***."),
        ("AKIAIOSFODNN7EXAMPLE", "***"),
        ("{'token': 'x', \"lr\": 1}", "{'token': '***', \"lr\": 1}"),
        ("unexpected token: '}'", "unexpected token: '}'"),
        ("-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY-----", "***"),
    ],
)
def test_a_text_is_shown_without_its_secrets(text, shown):
    assert redact(text) == shown
    assert redact(shown) == shown


def test_a_command_line_and_variables_are_shown_without_their_secrets():
    assert redact(("--api-key", "abc", "--bsz", "4")) == ("--api-key", HIDDEN, "--bsz", "4")
    assert redact(["--token", "--bsz"]) == ["--token", "--bsz"]
    assert redact({"HF_TOKEN": "x", "OMP_NUM_THREADS": "2", "a": [{"password": "y", "n": 3}]}) == {
        "HF_TOKEN": HIDDEN, "OMP_NUM_THREADS": "2", "a": [{"password": HIDDEN, "n": 3}],
    }  # fmt: skip


def test_a_secret_of_the_environment_is_known_wherever_it_stands(monkeypatch):
    monkeypatch.setenv("MY_SERVICE_TOKEN", "tangerine-42")
    monkeypatch.setenv("https_proxy", "http://ann:mandarin-77@proxy")
    monkeypatch.setenv("OTHER_TOKEN", "short")
    assert redact("got tangerine-42 via mandarin-77, in short") == f"got {HIDDEN} via {HIDDEN}, in short"


def test_a_plain_word_is_no_secret_of_the_environment(monkeypatch):
    """A password of `password` would take that word out of every message."""
    monkeypatch.setenv("PGPASSWORD", "password")
    assert redact("password authentication failed") == "password authentication failed"


@pytest.mark.system
@given(st.text() | st.text("=-:/@'\"{}&? \nabkeytoken_", max_size=80))
def test_masking_ends_and_takes_nothing_the_second_time(text):
    assert redact(redact(text)) == redact(text)
    json.dumps(redact([text, {"x": text}]))


def test_a_log_of_one_endless_word_takes_no_endless_time():
    for word in ("a" * 200_000, "://a:" * 20_000, "token" * 40_000, "a=" * 50_000, "eyJ" * 30_000):
        redact(word)


def test_a_configuration_loses_its_secrets_and_nothing_else():
    config = {"comet": {"enabled": True, "api_key": "x", "experiment_key": "y"}, "optimizer": {"params": {"lr": 1e-3}}}
    assert without_secrets(config) == {
        "comet": {"enabled": True, "experiment_key": "y"},
        "optimizer": {"params": {"lr": 1e-3}},
    }
    assert config["comet"]["api_key"] == "x"


def test_what_went_through_is_recognised():
    assert (
        holds_mask("train.py --api-key ***")
        and holds_mask("KEY=***")
        and not holds_mask("**** bold ****")
        and not holds_mask("a***b")
    )


# A study whose launch command, environment, configuration and failures are full of secrets.

SECRETS = {
    "argument": "argument-s3cret-01",
    "variable": "variable-s3cret-02",
    "proxy": "proxy-s3cret-03",
    "comet": "comet-s3cret-04",
    "process": "process-s3cret-05",
    "token": "hf_abcdefghijklmnopqrstuvwxyz",
}
COMMAND = (
    f"WANDB_API_KEY={SECRETS['variable']} torchrun --nproc_per_node 1 train.py"
    f" --api-key {SECRETS['argument']} --bsz {{micro_batch_size}}"
)


@pytest.fixture
def secretive(tmp_path, monkeypatch):
    """A folder with all that such a study left behind, and what was printed meanwhile."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SERVICE_TOKEN", SECRETS["process"])
    script = tmp_path / "train.py"
    script.write_text("import deepspeed\ndeepspeed.initialize()\n")
    (tmp_path / "ds.json").write_text(
        json.dumps({"train_micro_batch_size_per_gpu": 8, "comet": {"enabled": False, "api_key": SECRETS["comet"]}})
    )
    how = Invocation(
        script=str(script), working_dir=str(tmp_path), world_size=1, command=COMMAND,
        arguments=("--api-key", SECRETS["argument"], "--bsz", "{micro_batch_size}", "{ds_config}"),
        environment={"WANDB_API_KEY": SECRETS["variable"], "http_proxy": f"http://ann:{SECRETS['proxy']}@proxy", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    spec = StudySpec.of_command(how, {
        "name": "s", "space": [{"micro_batch_size": [2, 4, 8, 16]}], "objectives": ["throughput"], "trials": 4, "finalists": 0,
        "sampler": "random", "base_config": "ds.json", "arg_mappings": {"gradient_accumulation_steps": "--gas"}, "global_batch": "free",
    })  # fmt: skip
    workload = replace(
        WORKLOAD, script=Probed(ds_config=spec.base_config, micro_batch_size=8, gradient_accumulation_steps=1)
    )
    baseline = Candidate(micro_batch_size=8)
    setting = Setting(n_blocks=4, n_samples=4096)
    plan = Plan(
        spec=spec, target=spec.inspected, workload=workload, world_size=1, base_config=dict(spec.base_config), baseline=baseline,
        space=feasibility.pruned(spec.space, baseline, setting), full_space=spec.space, setting=setting,
    )  # fmt: skip

    def sometimes(candidate: Candidate):
        if candidate.micro_batch_size == 16:
            return failed(
                Outcome.CRASHED,
                f"HTTPError: 401 at https://ann:{SECRETS['proxy']}@hub for {SECRETS['token']} {SECRETS['process']}",
            )
        return report(candidate)

    folder, printed = tmp_path / "studies" / "s", io.StringIO()
    watcher = Broadcast(Journal(folder), ProgressView(Console(file=printed, width=300)))
    watcher.say(f"started as {COMMAND}")
    url = records.default_url(tmp_path / "studies")
    runner = Runner(plan, Instant(sometimes), folder, url, watcher)
    with contextlib.suppress(KeyboardInterrupt):
        runner.run()
    (folder / "study.yaml").write_text(spec.to_yaml(folder))
    found = load.load("s", url, folder)
    list(write_answer(found, folder))
    write_report(found, folder, single_file=False)
    runner.storage.engine.dispose()
    return tmp_path, spec, printed.getvalue()


def test_no_secret_of_a_study_reaches_a_file_the_database_or_the_terminal(secretive):
    folder, _, printed = secretive
    given = {folder / "ds.json"}  # the user's own
    # The ranks are started from it, with what the user put on the command line; for whoever runs them alone.
    needed = set(folder.glob("studies/s/trials/**/request.json"))
    given |= set(folder.glob("studies/s/trials/**/rank-*.json"))  # by the stand-in; a rank masks its own
    files = {path for path in folder.rglob("*") if path.is_file()} - given
    assert {
        "autotune.db",
        "environment.json",
        "study.yaml",
        "report.html",
        "report.json",
        "README.md",
        "journal.jsonl",
    } <= {p.name for p in files}
    told = {path: [what for what, secret in SECRETS.items() if secret.encode() in path.read_bytes()] for path in files}
    assert {path: what for path, what in told.items() if what and path not in needed} == {}
    assert needed and {what for path in needed for what in told[path]} == {"argument"}
    assert {stat.S_IMODE(path.stat().st_mode) for path in needed} == {0o600}
    assert (
        not any(secret in printed for secret in SECRETS.values())
        and "401" in path_in(folder / "studies" / "s").read_text()
    )


def test_the_study_still_says_what_was_run(secretive):
    folder, spec, _ = secretive
    kept = records.record(records.load_study(open_storage(records.default_url(folder / "studies")), "s"))
    assert (
        kept.invocation.arguments[:2] == ("--api-key", HIDDEN) and kept.invocation.environment["OMP_NUM_THREADS"] == "1"
    )
    assert kept.invocation.fixed_environment == {"OMP_NUM_THREADS": "1"}  # stars are no value
    assert spec.how().fixed_environment["WANDB_API_KEY"] == SECRETS["variable"]  # and the trials had the real ones


def test_a_study_that_was_written_down_without_its_secret_says_so_when_it_is_run_again(secretive):
    folder, _, _ = secretive
    with pytest.raises(SpecError, match=r"study\.yaml: command: \*\*\* stands for a secret.*\$NAME"):
        stated_command(str(folder / "studies" / "s" / "study.yaml"))


def test_two_runs_that_differ_in_a_secret_belong_to_one_study(secretive):
    _, spec, _ = secretive
    how = replace(spec.how(), arguments=("--api-key", "another-one-06", *spec.how().arguments[2:]))
    assert how.shown == spec.how().shown


def test_a_command_that_names_a_variable_is_kept_whole():
    command = "torchrun train.py --api-key $WANDB_API_KEY"
    assert redact(command) == command and not holds_mask(command)


@pytest.mark.process
def test_what_a_command_says_of_a_wrong_input_is_masked_too(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["autotune", "run", f"no-such-launcher --api-key {SECRETS['argument']} train.py"])
    with pytest.raises(SystemExit):
        app.main()
    assert SECRETS["argument"] not in capsys.readouterr().err


def test_one_function_masks(tmp_path):
    """What may hold a secret goes through `redaction`; no other module of the package writes stars."""
    own = [path for path in (ROOT / "autotune").rglob("*.py") if '"***"' in path.read_text()]
    assert own == [Path(redaction.__file__)]
