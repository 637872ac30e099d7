"""Fuzzes the readers of user input, guided by coverage: each input ends in plain data or a `UserError` of one line.

    pip install atheris
    python tests/support/fuzz.py --seconds 60

The tests do the same from valid documents, with hypothesis; this finds what no one thought of. Each reader runs in a
process of its own; an input that breaks one is kept in the folder that is named, and `python tests/support/fuzz.py READER
FILE` runs it again. Writes benchmarks/results/fuzz.json: executions and seconds of each reader, and what broke.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

RESULTS = Path(__file__).parent.parent.parent / "benchmarks" / "results" / "fuzz.json"
DICTIONARY = (
    "choices range step power_of_two when micro_batch_size zero_stage zero_optimization stage train_batch_size auto bf16 enabled true false"
    " null .nan .inf !!int !!bool << &a *a %YAML --- ... 0x 0b 1e5 GiB 10m token= --api-key :// @ HF_TOKEN slots="
).split()


def readers() -> dict[str, Callable[[str], object]]:
    """Each reader by name, on a text."""
    from autotune.cli.options import read_settings
    from autotune.retune.schedule import moment, next_after, rule_of
    from autotune.space.candidate import Candidate, from_deepspeed
    from autotune.space.deepspeed import read_config
    from autotune.space.space import SearchSpace
    from autotune.study.spec.yaml_file import parse_yaml, read_value
    from autotune.system.redaction import redact
    from autotune.system.units import parse_bytes, parse_seconds

    def space(text: str) -> None:
        found = SearchSpace.parse(parse_yaml(text, "x"), "x")
        baseline = Candidate(micro_batch_size=1)
        next(found.candidates(baseline)).to_deepspeed({})
        [parameter.distribution() for parameter in found.parameters]

    def config(text: str) -> None:
        found = read_config(text, "x")
        json.dumps(from_deepspeed(found, 2).to_deepspeed(found), allow_nan=False)

    def amount(text: str) -> None:
        for parse in (parse_bytes, parse_seconds):
            try:
                parse(text)
            except ValueError:
                continue

    def mask(text: str) -> None:
        once = redact(text)
        assert redact(once) == once
        json.dumps(redact([text, {"x": text}]))

    return {
        "yaml": lambda text: json.dumps(parse_yaml(text, "x")),
        "space": space,
        "json": config,
        "amount": amount,
        "cron": lambda text: moment(next_after(*rule_of(None, text), 0.0)),
        "setting": lambda text: (read_value(text), Candidate.of({"micro_batch_size": 1, **read_settings([text])})),
        "mask": mask,
    }


def once(read: Callable[[str], object], data: bytes) -> None:
    """One input; raises where it ends otherwise than it must."""
    from autotune.errors import UserError

    try:
        read(data.decode("utf-8", errors="surrogateescape"))
    except UserError as error:
        text = str(error)
        assert text and "\n" not in text and len(text) <= 2000 and text.isprintable(), text


def fuzz(name: str, seconds: int, seed: int, folder: Path) -> None:
    """Fuzzes one reader in this process, which ends with it."""
    import atheris

    with atheris.instrument_imports(include=["autotune", "yaml", "apscheduler"]):
        read = readers()[name]
    words = folder / "dictionary"
    words.write_text("".join(f'"{re.sub(chr(34), "", word)}"\n' for word in DICTIONARY))
    limits = [f"-max_total_time={seconds}", f"-seed={seed}", "-max_len=400", "-timeout=20"]
    atheris.Setup(
        [sys.argv[0], *limits, f"-dict={words}", f"-artifact_prefix={folder}/"], lambda data: once(read, data)
    )
    atheris.Fuzz()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("reader", nargs="?", help="this one only")
    parser.add_argument("file", nargs="?", type=Path, help="run this input once, without the fuzzer")
    parser.add_argument("--seconds", type=int, default=60, help="for each reader")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--into", type=Path, help="where inputs that break a reader are kept")
    asked = parser.parse_args()
    if asked.file is not None:
        once(readers()[asked.reader], asked.file.read_bytes())
        return 0
    if asked.into is not None and asked.reader:
        fuzz(asked.reader, asked.seconds, asked.seed, asked.into)
    found = {}
    for name in [asked.reader] if asked.reader else list(readers()):
        into = Path(tempfile.mkdtemp(prefix=f"autotune-fuzz-{name}-"))
        command = [sys.executable, __file__, name, "--seconds", str(asked.seconds), "--seed", str(asked.seed)]
        command += ["--into", str(into)]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
        runs = re.findall(r"^#(\d+)\s|Done (\d+) runs", done.stderr, re.MULTILINE)
        kept = sorted(path.name for path in into.iterdir() if path.name != "dictionary")
        executions = max((int(a or b) for a, b in runs), default=0)
        found[name] = {"executions": executions, "seconds": asked.seconds, "broke": len(kept)}
        print(f"{name:<8} {executions:>9,} inputs" + (f"  BROKE: {into}/{kept[0]}" if kept else ""), flush=True)
        if kept or done.returncode:
            print("\n".join(done.stderr.splitlines()[-25:]), file=sys.stderr)
        else:
            shutil.rmtree(into)
    if not asked.reader:
        RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    return 1 if any(each["broke"] or not each["executions"] for each in found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
