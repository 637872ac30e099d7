"""`python -m autotune.worker serve | rank DIR | device`: the roles of a machine that measures."""

import os
import sys


def main(arguments: list[str]) -> int:
    """Runs one of the worker's roles and returns its exit status."""
    match arguments:
        case ["serve", *modules]:
            from autotune.worker.agent import server

            left_out = [item.partition("=")[2] for item in modules if item.startswith("--without=")]
            status = server.serve(modules[len(left_out) :], "".join(left_out))
            # As the ranks do: Python's own end takes a third of a second, and runs what the user's modules have registered.
            os._exit(status)
        case ["rank", trial_dir]:
            from autotune.worker.agent import preload

            with preload.uncollected():
                from autotune.worker import run

                preload.import_rank_modules()
            return run.main(trial_dir)
        case ["device"]:
            from autotune.worker import device

            return device.main()
    print(f"usage: {__doc__}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    if not sys.flags.safe_path:
        # The working folder, which `python FILE` does not look into: its folders may bear the names of libraries.
        del sys.path[0]
    sys.exit(main(sys.argv[1:]))
