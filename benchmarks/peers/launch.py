"""Runs a training script as it is on a CPU; `--measure N` ends it after N optimizer steps and prints their times.

`torchrun ... launch.py [--measure N] SCRIPT ARGS...`. A step is taken from one boundary to the next, everything between
included: data, forward, backward, step. The script knows nothing of it, and no code of autotune's runs.
"""

import functools
import json
import os
import runpy
import sys
import time

import deepspeed

# Compiled first, and its files in /dev/shm would stay for ever.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def measured(n_steps: int) -> None:
    """Lets the engine that the script makes time its steps, and ends the process at the last."""
    original = deepspeed.initialize

    @functools.wraps(original)
    def initialize(*args, **kwargs):  # type: ignore[no-untyped-def]
        made = original(*args, **kwargs)
        engine, times, step = made[0], [], made[0].step
        last = time.perf_counter()

        def timed(*args, **kwargs):  # type: ignore[no-untyped-def]
            nonlocal last
            boundary = engine.is_gradient_accumulation_boundary()
            result = step(*args, **kwargs)
            if boundary:
                deepspeed.get_accelerator().synchronize()
                now = time.perf_counter()
                times.append(now - last)
                last = now
                if len(times) == n_steps:
                    if deepspeed.comm.get_rank() == 0:
                        said = {"times_s": times, "samples_per_step": engine.train_batch_size()}
                        print("MEASURED", json.dumps(said), flush=True)
                    deepspeed.comm.barrier()
                    os._exit(0)  # the script would go on
            return result

        engine.step = timed
        return made

    deepspeed.initialize = initialize


if __name__ == "__main__":
    arguments = sys.argv[1:]
    if arguments[0] == "--measure":
        measured(int(arguments[1]))
        arguments = arguments[2:]
    # DeepSpeed's launcher puts it first; torchrun, under which answers are measured, gives none, so no script needs it.
    arguments = [argument for argument in arguments if not argument.startswith("--local_rank=")]
    sys.argv = arguments
    sys.path[0] = os.path.dirname(os.path.abspath(arguments[0]))
    runpy.run_path(arguments[0], run_name="__main__")
