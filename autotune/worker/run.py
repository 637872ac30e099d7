"""Run one rank of a trial in the mode that its request asks for."""

import os
from pathlib import Path
from typing import NoReturn

from autotune.system import processes
from autotune.trial.folder import TrialDir, read_record, write_record
from autotune.trial.request import TrialRequest
from autotune.worker import project, random_fills
from autotune.worker.agent import stacks
from autotune.worker.device import kind
from autotune.worker.measure.recorder import Recorder
from autotune.worker.model.inspect import inspect_model
from autotune.worker.model.loop import train_and_measure
from autotune.worker.model.split import compare_split
from autotune.worker.rank import abort, complete, watch_memory


def main(trial_dir: str) -> NoReturn:
    """Runs this process's rank of the trial in a folder, and ends the process."""
    recorder = Recorder(TrialDir(Path(trial_dir)), int(os.environ["RANK"]))
    recorder.began_s -= processes.age_s()  # a new Python has imported for seconds, which the trial's deadline counts
    stacks.answer()
    try:
        request = read_record(recorder.folder.request, TrialRequest)
        recorder.enter("import")
        project.settle(Path(request.target), request.script.working_dir if request.script is not None else None)
        watch_memory(recorder, request)
        random_fills.install(recorder)
        _without_shared_memory()
        if request.mode == "inspect":
            write_record(recorder.folder.workload, inspect_model(request))
        elif request.mode == "build":
            from autotune.worker.agent import ops

            ops.build(request.op)
        elif request.mode == "split":
            compare_split(recorder, request)
        elif request.mode == "profile":
            from autotune.worker.profile.model import profile

            write_record(recorder.folder.profile, profile(request, kind()))
        elif request.mode in ("rates", "machine"):
            from autotune.worker.profile.machine import measure_machine

            measure_machine(recorder, request)
        elif request.script is not None:
            from autotune.worker.script.run import run_script

            run_script(recorder, request)
        else:
            train_and_measure(recorder, request)
        complete(recorder)
    except BaseException as error:
        abort(recorder, error)


def _without_shared_memory() -> None:
    """Leaves out an op for inference: on a CPU it compiles for minutes, and each rank would leave 66 MiB in /dev/shm."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
