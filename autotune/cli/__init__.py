"""The command line: one module a command, each parses, calls a layer below, and prints."""

import sys


def main() -> None:
    """Import the table of commands and run one of them; a Ctrl-C during that import ends as it does later."""
    try:
        from autotune.cli.app import main as run
    except KeyboardInterrupt:
        print("autotune: stopped", file=sys.stderr)
        sys.exit(130)
    run()
