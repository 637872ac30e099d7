"""The hooks of a script: everything that is patched before the script runs, so that it binds the patched functions."""

from __future__ import annotations

import argparse

import torch.distributed as dist

from autotune.worker.script.arguments import Arguments
from autotune.worker.script.context import ScriptContext
from autotune.worker.script.engine import EngineHooks
from autotune.worker.script.frameworks import accelerate, huggingface, lightning
from autotune.worker.script.isolation import Isolation
from autotune.worker.script.loaders import Loaders
from autotune.worker.script.patching import patch
from autotune.worker.script.steps import StepHooks

ADAPTERS = (accelerate, huggingface, lightning)


def install(context: ScriptContext) -> StepHooks:
    """Patches every entry point of a script; nothing is put back, since the process ends with the trial."""
    for text in context.script.side_changes:
        context.changed(text)
    steps = StepHooks(context)
    EngineHooks(context, steps.attach).install()
    steps.install()
    trial_config = context.recorder.folder.ds_config.absolute() if context.candidate is not None else None
    arguments = Arguments(context.value, trial_config, context.changed, context.report.flags)
    patch(argparse.ArgumentParser, "parse_known_args", arguments.parse)
    Loaders(context).install()
    # The ranks have joined already.
    for name in ("init_process_group", "destroy_process_group"):
        patch(dist, name, lambda _original, *_args, **_kwargs: None)
    for adapter in ADAPTERS:
        adapter.install(context)
    Isolation(context).install()
    return steps
