"""Lists the branches of driver and worker that name a device, and which of them no test took.

`python .ci/device_branches.py coverage.json` reads what `coverage json` wrote of a run with branches; docs/develop/gpu.md has
the command. Exit status 1 means that some were not taken.
"""

import ast
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
NAMES = re.compile(
    r"cuda|accelerator\b|nvml|\b(hip|xpu|npu|hpu|on_cpu|capability|device_load|device_watch)\b", re.IGNORECASE
)


def named(path: Path) -> Iterator[tuple[int, str, bool]]:
    """Line, condition, and whether it is a statement of its own (an expression's two sides share their line)."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.If | ast.While | ast.IfExp):
            condition = ast.unparse(node.test)
            if NAMES.search(condition) and "CUDA_HOME" not in condition:
                yield (
                    node.test.lineno if isinstance(node, ast.IfExp) else node.lineno,
                    condition,
                    not isinstance(node, ast.IfExp),
                )


def main() -> int:
    """Prints one line for each branch; returns an exit status."""
    covered = json.loads(Path(sys.argv[1]).read_text())["files"]
    n = n_missed = 0
    for path in sorted((ROOT / "autotune").rglob("*.py")):
        name = str(path.relative_to(ROOT))
        found = covered.get(name, {})
        executed, missing = set(found.get("executed_lines", ())), found.get("missing_branches", [])
        for line, condition, statement in sorted(named(path)):
            n += 1
            lines = {
                line,
                *(range(line - 4, line) if not statement else ()),
            }  # an expression may begin above its condition
            missed = [
                f"never {'left' if to < 0 else 'went'} to line {abs(to)}"
                for at, to in missing
                if at == line and statement
            ]
            if not lines & executed:
                missed = ["never reached"]
            n_missed += bool(missed)
            print(f"{name}:{line}: {condition[:90]}: {', '.join(missed) or 'taken'}")
    print(f"{n - n_missed} of {n} branches that name a device were taken", file=sys.stderr)
    return int(n_missed > 0)


if __name__ == "__main__":
    sys.exit(main())
