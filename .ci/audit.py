"""Reads what `pip-audit --format json` found; fails on a known vulnerability, or if most packages were not found."""

from __future__ import annotations

import json
import sys


def main() -> int:
    """Prints what was found; the exit status."""
    text = sys.stdin.read()
    try:
        packages = json.loads(text)["dependencies"]
    except (ValueError, KeyError):
        print(f"make audit: pip-audit said nothing that can be read: {text[:200]!r}", file=sys.stderr)
        return 1
    found = [(each["name"], each["version"], bad) for each in packages for bad in each.get("vulns", [])]
    for name, version, bad in found:
        print(f"{name} {version}: {bad['id']}, mended in {', '.join(bad['fix_versions']) or 'no release yet'}")
    skipped = [each["name"] for each in packages if "skip_reason" in each]
    print(f"{len(packages) - len(skipped)} packages audited, {len(found)} known vulnerabilities")
    if skipped:
        print(f"not looked up: {', '.join(skipped)}")
    if len(skipped) > len(packages) / 2:
        print("make audit: the advisory database was not reached, so this says nothing", file=sys.stderr)
        return 1
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
