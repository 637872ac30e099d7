"""Which settings of the data cannot run, or can have no effect, with the reason."""

from collections.abc import Mapping
from functools import partial

from autotune.space import data
from autotune.space.candidate import Candidate
from autotune.space.deepspeed import Scalar
from autotune.space.degree import PIPELINE_DEGREE
from autotune.space.rule import Rule, Setting


def _asked(config: Mapping[str, Scalar], name: str) -> Scalar:
    """The value of a setting of the data; None where it is as without it."""
    path = data.PREFIX + name
    return data.changes({path: config[path]}).get(name) if path in config else None


def _unused(config: Mapping[str, Scalar], setting: Setting) -> bool:
    """Whether arguments of workers are given for a loader without workers."""
    workers = _asked(config, "num_workers")
    given = any(_asked(config, name) is not None for name in ("prefetch_factor", "persistent_workers"))
    return given and not (workers if workers is not None else dict(setting.loader).get("num_workers"))


def _cannot(name: str, _candidate: Candidate, config: Mapping[str, Scalar], setting: Setting) -> bool:
    return name in dict(setting.data_cannot) and _asked(config, name) is not None


def _all_alike(name: str, _candidate: Candidate, config: Mapping[str, Scalar], setting: Setting) -> bool:
    return _asked(config, name) is not None and setting.lengths[0] == setting.lengths[1] > 0


def _own_already(name: str, _candidate: Candidate, config: Mapping[str, Scalar], setting: Setting) -> bool:
    own, asked = dict(setting.loader), _asked(config, name)
    return asked is not None and name in own and own[name] == asked


DATA, WORKERS = data.PREFIX, f"{data.PREFIX}num_workers"
DATA_RULES = (
    *(Rule(partial(_cannot, name),
           f"{DATA}{name}: {{cannot_{name}}}", (DATA + name,)) for name in data.KNOBS),
    *(Rule(partial(_own_already, name),
           f"{DATA}{name}: the target's own loader has that value already", (DATA + name,)) for name in data.OF_LOADER),
    *(Rule(partial(_all_alike, name),
           f"{DATA}{name}: all samples are of one length, so nothing is padded", (DATA + name,))
      for name in data.AGAINST_PADDING),
    Rule(lambda c, k, s: _unused(k, s), f"{DATA}prefetch_factor and {DATA}persistent_workers need {WORKERS}",
         (WORKERS, f"{DATA}prefetch_factor", f"{DATA}persistent_workers")),
    Rule(lambda c, k, s: bool(_asked(k, "pin_memory")) and s.accelerator == "cpu",
         f"{DATA}pin_memory: on a CPU nothing is copied to a device", (f"{DATA}pin_memory",)),
    Rule(lambda c, k, s: int(str(_asked(k, "max_length") or 0)) >= s.lengths[1] > 0
         and _asked(k, "max_length") is not None, f"{DATA}max_length: no sample is longer", (f"{DATA}max_length",)),
    Rule(lambda c, k, s: _asked(k, "packing") is not None and c.micro_batch_size == 1,
         f"{DATA}packing: a micro-batch of one sample has no padding", ("micro_batch_size", f"{DATA}packing")),
    Rule(lambda c, k, s: _asked(k, "packing") is not None and _asked(k, "pad_to_multiple_of") is not None,
         f"{DATA}pad_to_multiple_of: packed batches are not padded", (f"{DATA}packing", f"{DATA}pad_to_multiple_of")),
    Rule(lambda c, k, s: _asked(k, "group_by_length") is not None and c.gradient_accumulation_steps * s.steps_grouped == 1,
         f"{DATA}group_by_length: with one micro-batch a step there is nothing to group",
         ("gradient_accumulation_steps", f"{DATA}group_by_length")),
    Rule(lambda c, k, s: _asked(k, "group_by_length") is not None and _asked(k, "packing") is not None,
         f"{DATA}group_by_length: packed batches have no padding to save",
         (f"{DATA}packing", f"{DATA}group_by_length")),
    Rule(lambda c, k, s: _asked(k, "token_budget") is not None and _asked(k, "packing") is not None,
         f"{DATA}token_budget: packed batches have no padding to save", (f"{DATA}packing", f"{DATA}token_budget")),
    Rule(lambda c, k, s: _asked(k, "token_budget") is not None and _asked(k, "group_by_length") is not None,
         f"{DATA}group_by_length: a token budget puts samples of similar length together already",
         (f"{DATA}token_budget", f"{DATA}group_by_length")),
    Rule(lambda c, k, s: _asked(k, "token_budget") is not None and c.micro_batch_size == 1,
         f"{DATA}token_budget: a micro-batch of one sample has no padding", ("micro_batch_size", f"{DATA}token_budget")),
    Rule(lambda c, k, s: _asked(k, "token_budget") is not None and c.micro_batch_size < s.fewest_in_row,
         f"{DATA}token_budget: a row of {{micro_batch_size}} mean samples would cut the longest one;"
         " one of {fewest_in_row} holds it", ("micro_batch_size", f"{DATA}token_budget")),
    Rule(lambda c, k, s: _asked(k, "token_budget") is not None and s.fewest_in_row > 0
         and any(_asked(k, name) is not None for name in ("max_length", "pad_to_multiple_of")),
         f"{DATA}max_length and {DATA}pad_to_multiple_of: TRL does neither where it packs",
         (f"{DATA}token_budget", f"{DATA}max_length", f"{DATA}pad_to_multiple_of")),
    Rule(lambda c, k, s: _asked(k, "token_budget") is not None and (s.pipeline_stages > 0 or c.pipeline_degree > 1),
         f"{DATA}token_budget: the stages of a pipeline take micro-batches of one size",
         (PIPELINE_DEGREE, f"{DATA}token_budget")),
)  # fmt: skip
