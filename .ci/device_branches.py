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


def named(path: Path) -> Iterator[tuple[int, str, int, bool]]:
    """Line, condition, the line of its statement, and whether that branches: an expression's two sides share one."""
    for statement in ast.walk(ast.parse(path.read_text())):
        if not isinstance(statement, ast.stmt):
            continue
        branches = isinstance(statement, ast.If | ast.While)
        inside = [
            each
            for child in ast.iter_child_nodes(statement)
            if not isinstance(child, ast.stmt)
            for each in ast.walk(child)
        ]
        conditions = [each.test for each in inside if isinstance(each, ast.IfExp)]
        for test in [*([statement.test] if branches else []), *conditions]:
            if NAMES.search(ast.unparse(test)):
                yield test.lineno, ast.unparse(test), statement.lineno, branches and test is statement.test


def main() -> int:
    """Prints one line for each branch; returns an exit status."""
    covered = json.loads(Path(sys.argv[1]).read_text())["files"]
    n = n_missed = 0
    for path in sorted((ROOT / "autotune").rglob("*.py")):
        name = str(path.relative_to(ROOT))
        found = covered.get(name, {})
        executed, missing = set(found.get("executed_lines", ())), found.get("missing_branches", [])
        for line, condition, at, branches in sorted(named(path)):
            n += 1
            missed = [
                f"never {'left' if to < 0 else 'went'} to line {abs(to)}"
                for start, to in missing
                if start == at and branches
            ]
            if at not in executed:
                missed = ["never reached"]
            n_missed += bool(missed)
            print(f"{name}:{line}: {condition[:90]}: {', '.join(missed) or 'taken'}")
    print(f"{n - n_missed} of {n} branches that name a device were taken", file=sys.stderr)
    return int(n_missed > 0)


if __name__ == "__main__":
    sys.exit(main())
