"""Fuzzed input, from valid documents: any file or command line ends in a result or in one sentence."""

import contextlib
import copy
import json
import math
import os
import re
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from autotune.cli.options import read_settings, same_command
from autotune.cli.scale import rank_counts
from autotune.errors import SpecError, UserError
from autotune.executors.ssh import read_hostfile
from autotune.retune import schedule
from autotune.space.candidate import Candidate, from_deepspeed
from autotune.space.deepspeed import read_config
from autotune.space.space import SearchSpace
from autotune.study.spec import yaml_file
from autotune.study.spec.readers import read_share
from autotune.study.spec.spec import StudySpec, stated_command
from autotune.study.spec.yaml_file import parse_yaml, read_yaml, written
from autotune.study.storage import database
from autotune.system.units import parse_bandwidth, parse_bytes, parse_latency, parse_seconds
from autotune.trial import target
from autotune.trial.target import inspect_target
from autotune.worker.script import ds_config

MODEL = "import torch\n\ndef model():\n    return torch.nn.Linear(2, 2)\n\ndef data():\n    return []\n"
SCRIPT = "import deepspeed\nBATCH = 8\ndeepspeed.initialize()\n"
SPACE = {
    "micro_batch_size": {"choices": [1, 2, 4]},
    "zero_stage": [0, 1, 2],
    "zero_optimization.reduce_bucket_size": {"range": [16, 20], "power_of_two": True, "when": {"zero_stage": [1, 2]}},
    "checkpoint_every": {"range": [0, 4], "step": 2},
}
DEEPSPEED = {
    "train_batch_size": 16, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": "auto", "gradient_clipping": 1.0,
    "bf16": {"enabled": True}, "zero_optimization": {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 5e8,
                                                     "offload_optimizer": {"device": "cpu", "pin_memory": True}},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": [0.9, 0.95]}}, "comet": {"enabled": False, "api_key": "x"},
}  # fmt: skip
STUDY = {
    "target": "model.py", "name": "tiny", "space": [SPACE], "objectives": [{"metric": "step_time_s", "weight": 2, "max": "10m"}],
    "constraints": {"peak_memory_bytes": {"max": "4GiB"}}, "trials": 4, "time_budget_s": "1h30m", "ranks": 2, "nodes": 1,
    "executor": "local", "executor_options": {"partition": "gpu"}, "hostfile": None, "base_config": DEEPSPEED, "global_batch": "8..64",
    "device_memory_bytes": "4GiB", "sampler": "random", "stop_below": "1%", "storage": "sqlite:///x.db", "parallel": 1, "overlap": False,
    "learning_rate_rule": "auto", "seed": 3, "trial_budget_s": "4s", "trial_deadline_s": 60, "finalists": 1, "repeats": 2,
    "branch": False, "branch_tokens": None, "from_checkpoint": None, "script_args": [], "script_set": {}, "arg_mappings": {},
    "working_dir": None,
}  # fmt: skip


# Tests share one folder and write over their file: that is faster, and no example depends on another.
def fuzzed(n: int) -> settings:
    return settings(max_examples=n, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


ODD_TEXTS = [
    "", " ", "\t", "\n", "null", "~", "~nobody/x", "../../etc/passwd", "/", ".", "..", "-rf", "--help", "a" * 5000, "🦙", "\x1b[31m",
    "\u202e", "[/x]", "{{", "{micro_batch_size}", "%s%n", "0x", "0x_", "1_000", "1:30:00", "2024-13-45", "2024-02-30", "=", "<<",
    "*a", "&a", "!x", "٣", "²", "1e999", "nan", ".inf", "9" * 400, "9" * 5000, "auto", "true", "yes", "x\0y", "\ud800", "a\nb", "'", '"',
    "\\", "`", "</script>", "$(id)", "|", ">",
]  # fmt: skip
YAML_SIGNS = [*"{}[]:,-?&*!|>%@`'\"#\n \t", "a", "1", "<<: ", "- ", "key: ", *ODD_TEXTS]
CRON_FIELDS = ["*", "0", "*/0", "5-1", "sun", "32", "²", "1,2", "9" * 30, "L"]
WORDS = ["torchrun", "train.py", "study.yaml", "A=1", "--x", "'", '"', "\\", "{micro_batch_siz}", "\0"]
PIECES = [
    "def model():", " return 1", "def data(): ...", "import ", "x" * 300, "(", ")", "'", '"""', "\n", "\t", "if ", "lambda: ", "\0", "٣",
    "=", ".a" * 50,
]  # fmt: skip
HOSTS = ["a slots=4", "a", "-oProxyCommand=x", "a slots=99999999999", "user@b slots = 2 # x"]
KNOBS = ["zero_stage", "micro_batch_size", "optimizer.params.lr", "communication_data_type"]
texts = st.one_of(st.sampled_from(ODD_TEXTS), st.text(max_size=20))
numbers = st.one_of(
    st.sampled_from([0, -1, 1, 2**31, 2**63, 2**64, -(2**70), 10**30, 10**400, 0.5, -0.0, 1e308, 5e-324, math.inf, -math.inf, math.nan]),
    st.integers(-5, 100), st.floats(),
)  # fmt: skip
scalars = st.one_of(st.none(), st.booleans(), numbers, texts)
junk = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.one_of(texts, st.integers(0, 3), st.none()), inner, max_size=3)
    ),
    max_leaves=6,
)


def places(document, path=()):
    """The path of every part of a document, the whole included."""
    yield path
    for key, value in (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    ):
        yield from places(value, (*path, key))


@st.composite
def mutated(draw, document):
    """A valid document with one to three things wrong: a value, a key that is nearly right, one too many or one too few."""
    found = copy.deepcopy(document)
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(list(places(found))))
        if not path:
            if draw(st.integers(0, 9)) == 0:
                return draw(junk)
            found[draw(st.one_of(texts, st.sampled_from(sorted(document))))] = draw(junk)
            continue
        around = found
        for key in path[:-1]:
            around = around[key]
        last = path[-1]
        match draw(st.sampled_from(["value", "value", "value", "delete", "rename"])):
            case "value":
                around[last] = draw(junk)
            case "delete":
                del around[last]
            case "rename" if isinstance(around, dict) and isinstance(last, str) and last:
                at = draw(st.integers(0, len(last) - 1))
                around[last[:at] + last[at + 1 :]] = around.pop(last)
    return found


def said(action) -> str:
    """Nothing where an action gives a result; else the sentence with which it refused: one line, of a bearable length, for any terminal."""
    try:
        action()
    except UserError as error:
        text = str(error)
        assert text.strip() and "\n" not in text and len(text) <= 2000 and text.isprintable(), text
        return text
    return ""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("input")
    (path / "model.py").write_text(MODEL)
    (path / "script.py").write_text(SCRIPT)
    return path


def test_the_documents_that_are_mutated_are_valid(folder):
    study = {key: value for key, value in STUDY.items() if key not in ("executor_options",)}
    (folder / "valid.yaml").write_text(yaml.safe_dump(study))
    spec = StudySpec.load(folder / "valid.yaml")
    assert spec.base_config["comet"] == {"enabled": False} and spec.global_batch == (
        8,
        64,
    )  # nobody's key is read, or written down
    assert from_deepspeed(read_config(json.dumps(DEEPSPEED), "x"), 2).gradient_accumulation_steps == 2
    assert SearchSpace.parse(SPACE, "x").size(Candidate(micro_batch_size=1)) == 3 * 3 * (1 + 5 + 5)


@pytest.mark.system
@fuzzed(120)
@given(document=mutated(STUDY))
@example(document=STUDY | {"script_args": ["\x85", "a\u2028", "\u2029"]})
def test_a_study_is_read_or_refused_with_its_file(folder, document):
    file = folder / "study.yaml"
    file.write_text(yaml.safe_dump(document))
    found = []
    text = said(lambda: found.append(StudySpec.load(file)))
    assert not text or "study.yaml" in text or "model.py" in text, text
    for spec in found:  # and what is read can be written, and read again
        again = folder / "again.yaml"
        again.write_text(spec.to_yaml(folder))
        assert StudySpec.load(again, {"name": spec.name}) == spec
        json.dumps([spec.base_config, spec.space.to_data()], allow_nan=False)


@fuzzed(120)
@given(document=mutated(SPACE))
@example(document={"zero_optimization.reduce_bucket_size": {"range": [1, 500_000_000]}})
@example(document={"micro_batch_size": {"range": [0, 10**30]}})
@example(document={"zero_optimization.": [1]})
@example(document={"zero_optimization.reduce_bucket_size": ["big"]})
@example(document={"gradient_clipping": [1.0], "gradient_clipping.x": [2]})
def test_a_space_is_searched_or_refused(document):
    def search() -> None:
        space, baseline = SearchSpace.parse(document, "space.yaml"), Candidate(micro_batch_size=1)
        assert space.size(baseline) >= 0
        for parameter in space.parameters:
            parameter.distribution()
        json.dumps(next(space.candidates(baseline)).to_deepspeed({"gradient_clipping": 1.0}), allow_nan=False)

    said(search)


@fuzzed(120)
@given(document=mutated(DEEPSPEED))
@example(document={"train_batch_size": 16, "bf16": {"enabled": "false"}})
@example(document={"train_batch_size": 10**400})
@example(document={"train_batch_size": 8, "zero_optimization": {"stage": 2, "offload_optimizer": 5}})
@example(document={"train_batch_size": 8, "optimizer": {"type": "Adam", "params": [1]}})
def test_a_deepspeed_json_means_a_candidate_or_is_refused(document):
    def use() -> None:
        config = read_config(json.dumps(document), "ds.json")
        candidate = from_deepspeed(config, 2)
        json.dumps(candidate.to_deepspeed(config), allow_nan=False)

    text = said(use)
    assert not text or text.startswith(("ds.json: ", "base config: ")), text


@pytest.mark.system
@fuzzed(150)
@given(text=st.text(max_size=60) | st.lists(st.sampled_from(YAML_SIGNS), max_size=14).map("".join))
@example(text='a: "\\UFFFFFFFF"')
@example(text="a: 2024-13-45")
@example(text="a: !!bool maybe")
@example(text="a: !!int ''")
@example(text="a: !!float x")
@example(text="a: 0b_")
@example(text="a: " + "9" * 5000)
@example(text="a: 0x" + "F" * 20_000)
@example(text="%YAML 1." + "9" * 5000 + "\n---\na")
@example(text="&a [*a]")
@example(text="a: !!binary aGk=")
@example(text="a: !!set {b}")
@example(text="{" * 3000)
@example(text="- " * 3000 + "a")
def test_any_text_is_yaml_or_refused_with_its_place(text):
    found = said(lambda: json.dumps(parse_yaml(text, "x.yaml")))
    assert not found or found.startswith("x.yaml:")


def test_aliases_of_aliases_are_refused_before_they_are_spelled_out():
    """A billion laughs: ten lines that stand for 10^9 values."""
    lines = ["a0: &a0 [lol]", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 10))]
    assert "aliases" in said(lambda: parse_yaml("\n".join(lines), "x.yaml"))


def test_a_key_may_be_merged_from_another_mapping():
    assert parse_yaml("a: &a {x: 1, y: 2}\nb: {<<: *a, y: 3}", "x")["b"] == {"x": 1, "y": 3}


def test_a_date_is_a_text_as_it_stands():
    assert parse_yaml("name: 2024-01-31", "x") == {"name": "2024-01-31"}


@pytest.mark.parametrize("text", ["1:30:00", "8:32", "-1:30", "10:30.5", "010", "007"])
def test_a_time_and_a_number_with_zeros_in_front_are_texts_as_they_stand(text):
    """YAML 1.1 counts to the base 60 or 8: a time limit of an hour and a half became one of 5400 minutes."""
    assert parse_yaml(f"time: {text}", "x") == {"time": text} == parse_yaml(written({"time": text}, flow=True), "x")


@pytest.mark.system
@fuzzed(100)
@given(text=texts)
@example(text="1" * 40 + "!")  # every way to cut it would be tried
@example(text="1e999")
def test_an_amount_is_a_finite_number_or_none(text):
    for parse in (parse_bytes, parse_seconds):
        with contextlib.suppress(ValueError):  # which pydantic words
            assert math.isfinite(parse(text))
    for read in (parse_bandwidth, parse_latency, read_share):
        said(lambda read=read: read(text, "--flag"))
    said(lambda: rank_counts(text))


@pytest.mark.parametrize("value", [math.inf, math.nan, 10**400, -(10**400), True, [1]])
def test_what_is_no_amount_is_a_value_error_and_nothing_else(value):
    for parse in (parse_bytes, parse_seconds):
        with pytest.raises(ValueError, match=r"finite|units"):
            parse(value)


@fuzzed(80)
@given(
    every=st.none() | texts,
    cron=st.none() | texts | st.lists(st.sampled_from(CRON_FIELDS), min_size=4, max_size=6).map(" ".join),
)
@example(every=None, cron="0 0 30 2 *")
@example(every="1e9d", cron=None)
def test_a_schedule_is_a_rule_or_refused(every, cron):
    def use() -> None:
        rule = schedule.rule_of(every, cron)
        schedule.moment(schedule.next_after(*rule, 0.0))

    said(use)


def test_a_day_that_never_comes_is_refused():
    assert "no such day" in said(lambda: schedule.rule_of(None, "0 0 30 2 *"))


@fuzzed(100)
@given(name=texts | st.sampled_from(KNOBS), value=texts)
@example(name="x", value="e5")
@example(name="micro_batch_size", value="1e999")
@example(name="zero_stage", value="2024-13-45")
def test_a_setting_of_the_command_line_is_read_or_refused(name, value):
    said(lambda: Candidate.of({"micro_batch_size": 1, **read_settings([f"{name}={value}"])}).to_deepspeed({}))


def test_a_knob_is_given_once():
    assert "zero_stage is there twice" in said(lambda: read_settings(["zero_stage=1", "zero_stage=2"]))


def test_the_same_command_keeps_what_is_the_scripts(monkeypatch):
    monkeypatch.setattr("sys.argv", ["autotune", "run", "train.py", "--fresh", "--", "--fresh", "--lr", "1"])
    assert same_command("--fresh") == "autotune run train.py -- --fresh --lr 1"


FLAGS = [
    "name", "space", "objectives", "trials", "time_budget_s", "ranks", "executor", "nodes", "executor_options", "hostfile", "base_config",
    "global_batch", "device_memory_bytes", "sampler", "stop_below", "storage", "seed", "learning_rate_rule", "from_checkpoint",
    "script_args", "script_set", "working_dir", "parallel",
]  # fmt: skip
values = texts | st.lists(texts, max_size=2) | numbers


@pytest.mark.system
@fuzzed(150)
@given(
    file=st.sampled_from(["model.py", "script.py"]),
    flags=st.dictionaries(st.sampled_from(FLAGS), values, min_size=1, max_size=2),
)
@example(file="script.py", flags={"working_dir": "9" * 5000})
def test_flags_make_a_study_or_are_refused(folder, file, flags):
    said(lambda: StudySpec.of(folder / file, flags).stated_ranks)


@fuzzed(60)
@given(words=texts | st.lists(st.sampled_from(WORDS), max_size=4).map(" ".join))
def test_a_target_is_a_file_a_command_or_refused(folder, words):
    said(lambda: stated_command(words))
    said(lambda: inspect_target(folder / words))


@fuzzed(100)
@given(pieces=st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=10)), max_size=12))
def test_a_python_file_is_a_target_or_refused_with_its_place(folder, pieces):
    file = folder / "any.py"
    file.write_bytes("".join(pieces).encode(errors="surrogatepass"))
    text = said(lambda: inspect_target(file))
    assert not text or "any.py" in text


@pytest.mark.parametrize(
    "text",
    [
        "x = " + "(" * 5000, "x = a" + ".b" * 20_000, "x = " + "-" * 20_000 + "1", "if " + "a + " * 20_000 + "a: pass", "x = " + "9" * 6000,
    ],
    ids=["brackets", "names", "signs", "terms", "digits"],
)  # fmt: skip
def test_a_python_file_that_is_nested_without_end_is_refused(tmp_path, text):
    (tmp_path / "deep.py").write_text(f"{text}\n{MODEL}")
    said(lambda: inspect_target(tmp_path / "deep.py"))
    list(target.sources(tmp_path / "deep.py"))


@fuzzed(60)
@given(lines=st.lists(texts | st.sampled_from(HOSTS), max_size=4))
def test_a_hostfile_is_read_or_refused(folder, lines):
    (folder / "hosts").write_bytes("\n".join(lines).encode(errors="surrogatepass"))
    text = said(lambda: read_hostfile(folder / "hosts"))
    assert not text or "hosts" in text


URLS = [
    "sqlite:///{}/x.db?timeout=soon", "sqlite:///{}/x.db?foo=bar", "sqlite:///{}/x.db?uri=true&mode=nonsense", "sqlite://user:pw@host/x",
    "sqlite:///{}/" + "x" * 300, "sqlite:///\0", "sqlite+nothing:///x", "sqlite:///{}", "x", "://", "sqlite", "file:///etc/passwd",
    "postgresql://ann:pw@127.0.0.1:port/db", "postgresql://127.0.0.1:1/db", "postgresql+nothing://x/y", "oracle://ann:hunter2hunter2@host/x",
    "postgresql://ann:pw@127.0.0.1:1/db?connect_timeout=x", "mysql://ann:pw@127.0.0.1:1/x?nonsense=1", "mssql://x", "http://x/y", "redis://x",
]  # fmt: skip


@pytest.mark.parametrize("url", URLS)
@pytest.mark.filterwarnings("ignore")
def test_a_storage_url_opens_or_is_refused_without_its_password(tmp_path, monkeypatch, url):
    monkeypatch.chdir(tmp_path)
    for create in (True, False):
        text = said(lambda create=create: database.open_storage(url.format(tmp_path), create=create))
        assert "hunter2" not in text and ":pw@" not in text


@fuzzed(40)
@given(rest=texts.filter(lambda text: "/" not in text))
@pytest.mark.filterwarnings("ignore")
def test_the_rest_of_a_storage_url_may_be_anything(folder, rest):
    said(lambda: database.open_storage(f"sqlite:///{folder}/any-{rest}", create=False))
    said(lambda: database.open_storage(f"nothing{rest}://{rest}", create=False))


# Files that are none.


def _sparse(path: Path) -> None:
    with open(path, "wb") as file:
        file.truncate(100 << 20)


HOSTILE = {
    "a folder": lambda path: path.mkdir(),
    "a pipe": os.mkfifo,
    "a hundred megabytes": _sparse,
    "nothing": lambda path: path.write_bytes(b""),
    "bytes": lambda path: path.write_bytes(bytes(range(256))),
    "another encoding": lambda path: path.write_bytes("naïve: 1".encode("latin-1")),
    "UTF-16": lambda path: path.write_bytes("a: 1".encode("utf-16")),
    "a link to itself": lambda path: path.symlink_to(path),
    "a link to nothing": lambda path: path.symlink_to(path.with_name("nothing")),
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a single number": lambda path: path.write_text("3"),
    "brackets": lambda path: path.write_text("[" * 5_000),
    "a hundred kilobytes": lambda path: path.write_text("a: [" + "1, " * 30_000 + "1]"),
}  # fmt: skip
READERS = {
    "x.yaml": StudySpec.of,
    "space.yaml": lambda path: StudySpec.of(path.parent / "model.py", {"space": str(path)}),
    "objective.yaml": lambda path: StudySpec.of(path.parent / "model.py", {"objectives": str(path)}),
    "ds.json": lambda path: StudySpec.of(path.parent / "model.py", {"base_config": str(path)}),
    "hosts": read_hostfile,
    "target.py": inspect_target,
}


@pytest.mark.cells((len(HOSTILE) - 2) * len(READERS))  # the last two take seconds
@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("what", HOSTILE)
def test_what_is_no_file_that_a_person_wrote_is_refused_with_its_name(tmp_path, what, name):
    (tmp_path / "model.py").write_text(MODEL)
    HOSTILE[what](tmp_path / name)
    text = said(lambda: READERS[name](tmp_path / name))
    assert name in text or (name == "hosts" and what == "a single number")  # which may be a machine's name


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_a_file_that_may_not_be_read_is_refused(tmp_path):
    (tmp_path / "x.yaml").write_text("a: 1")
    (tmp_path / "x.yaml").chmod(0)
    with pytest.raises(SpecError, match="cannot be read: Permission denied"):
        read_yaml(tmp_path / "x.yaml")


@pytest.mark.parametrize(
    "path", ["x\0.yaml", "x" * 5000 + ".yaml", "\ud800.yaml", "a/" * 3000 + "x.yaml", "~nobody-at-all/x.yaml"]
)
def test_a_name_that_no_file_can_have_is_refused(folder, path):
    assert said(lambda: read_yaml(Path(path)))
    assert said(lambda: inspect_target(Path(path)))
    assert said(lambda: StudySpec.of_target(folder / "model.py", {"space": path, "base_config": path}))


@pytest.mark.parametrize("mark", ["\ufeff", ""])
@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_what_an_editor_on_another_system_writes_is_read(tmp_path, mark, line_end):
    def write(name: str, text: str) -> None:
        (tmp_path / name).write_bytes((mark + text.replace("\n", line_end)).encode())

    write("model.py", MODEL)
    write("ds.json", '{\n "train_batch_size": 8\n}')
    write("study.yaml", "target: model.py\ntrials: 7\nbase_config: ds.json\n")
    spec = StudySpec.of(tmp_path / "study.yaml")
    assert (spec.trials, spec.base_config) == (7, {"train_batch_size": 8})


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"train_batch_size": 8, // samples\n}', "line 1, column 25; JSON has no comments"),
        ('{"train_batch_size": 8,\n}', "remove the comma"),
        ("{'train_batch_size': 8}", "double quotation marks"),
        ('{"bf16": {"enabled": True}}', "JSON writes true, false and null"),
        ("", "it is empty"),
        ('{"gradient_clipping": NaN}', "NaN is no number in JSON"),
        ('{"gradient_clipping": 1e999}', "gradient_clipping: inf is no number"),
        ('{"train_batch_size": 8, "train_batch_size": 9}', "'train_batch_size' is there twice"),
        ('{"train_batch_size": ' + "9" * 5000 + "}", "5000 digits"),
        ('{"bf16": {"enabled": "false"}}', "bf16.enabled: true or false is needed, not 'false'"),
        ('{"zero_optimization": {"reduce_bucket_size": "5e8"}}', "a number is needed"),
        ('{"zero_optimization": {"offload_optimizer": "cpu"}}', "'zero_optimization.offload_optimizer' is a section"),
        ('{"comet": ' * 60 + "1" + "}" * 60, "nested more than"),
        ('{"optimizer": {"type": "\\ud800"}}', "a character that is none"),
    ],
)
def test_a_json_that_is_none_says_where_and_what_to_do(text, why):
    assert why in said(lambda: read_config(text, "ds.json"))


@pytest.mark.parametrize(
    "text",
    ['{"train_batch_size": 8, // samples\n}', '# mine\n{"train_batch_size": 8}', '\ufeff{"train_batch_size": 8}'],
)
def test_a_script_s_own_json_is_read_as_deepspeed_reads_it(tmp_path, text):
    (tmp_path / "ds.json").write_text(text)
    assert ds_config.read(tmp_path / "ds.json") == {"train_batch_size": 8}


@pytest.mark.parametrize("text", ["{", "[1]", '{"a": ' * 5000])
def test_a_script_s_own_json_that_is_none_is_refused(tmp_path, text):
    (tmp_path / "ds.json").write_text(text)
    assert "ds.json" in said(lambda: ds_config.read(tmp_path / "ds.json"))


def test_a_json_whose_values_are_left_to_hugging_face_is_read():
    config = read_config(
        '{"train_batch_size": "auto", "bf16": {"enabled": "auto"}, "optimizer": {"params": {"lr": "auto"}}}', "ds.json"
    )
    assert config["bf16"] == {"enabled": "auto"}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a:\n\tb: 1", "indent with spaces, not tabs"),
        ("a: b: c", "needs quotation marks"),
        ("a: 1\n---\nb: 2", "expected a single document in the stream, but found another document"),
        ("a: 0x_", "'0x_' cannot be read as int"),
        ("a: !!set {b}", "only plain texts, numbers, lists and mappings"),
        ('a: "\\0"', "a zero byte"),
        ("a: &a [*a]", "an alias"),
        ("a: 99999999999999999999999", "a larger number than any key takes"),
    ],
)
def test_yaml_that_is_none_says_where_and_what_to_do(text, why):
    found = said(lambda: parse_yaml(text, "x.yaml"))
    assert why in found and re.match(r"x\.yaml: line \d", found), found


def test_more_than_a_person_writes_is_not_even_parsed():
    assert "more than a person writes" in said(lambda: parse_yaml("a" * (yaml_file.LARGEST_CHARACTERS + 1), "x.yaml"))


def test_a_message_is_one_line_whatever_it_quotes():
    error = UserError("a\n  b\x1b[31m\u202e\ud800 " + "x" * 5000)
    assert str(error).startswith("a b\\x1b[31m\\u202e\\ud800 xx") and len(str(error)) < 2000
