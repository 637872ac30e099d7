"""The flags of a training script that may carry its batch, known by their names."""

import itertools
import re
from collections.abc import Iterable, Sequence

# Common names of these flags; the first whose value is the one that ran is taken.
DESTINATIONS = {
    "micro_batch_size": """per_device_train_batch_size train_micro_batch_size_per_gpu train_micro_batch_size
        micro_batch_size per_gpu_train_batch_size train_batch_size batch_size batchsize bsz bs""".split(),
    "gradient_accumulation_steps": """gradient_accumulation_steps accumulation_steps grad_accumulation_steps
        grad_accum_steps grad_acc_steps accum_steps gradient_accumulation grad_accum accum gas""".split(),
}
# Further flags whose names say that they hold samples of a micro-batch, such as `--batch`, `--images_per_gpu` and `-b`.
BATCH = re.compile(
    r"^(?!(.*_)?(eval|valid|validation|val|test|dev|global|total|effective|max|min|num|n|log|save|workers)(_|$))"
    r"((.*_)?((micro|mini)?batch|bsz|bs|mbs)(_.*)?|(.*_)?per_(gpu|device|rank)|(.*_)?micro|b)$"
)
# Further flags whose names say that they count micro-batches, such as `--accum-iter`, `--acc_steps` and fairseq's `--update-freq`.
ACCUMULATION = re.compile(
    r"^((.*_)?(gas|grad_acc|accum|accumulate|accumulation)(_(every|factor|freq|grads?|gradients?|batch(es)?|iters?|steps?))*"
    r"|acc_(grads?|iters?|steps?)|update_freq)$"
)
FURTHER = {"micro_batch_size": BATCH, "gradient_accumulation_steps": ACCUMULATION}


def known_names(field: str, names: Iterable[str]) -> list[str]:
    """Returns the names that may hold a field, common ones first, then those of a micro-batch: a script may also count prompts.

    Args:
        names: What there is, of which further names are taken.
    """
    further = filter(FURTHER[field].search, names)
    return [*DESTINATIONS[field], *sorted(further, key=lambda name: "micro" not in name)]


def word_that_holds(field: str, value: int, arguments: Sequence[str]) -> str:
    """Returns the name that a command line gives a field's value, as `--batch_size` or `train.batch_size`; empty without one.

    Scripts read such words in ways of their own: `--batch_size=4`, `++train.batch_size=4`, or `--batch_size 4`.
    """
    pairs = [(word, after) for word, after in itertools.pairwise(arguments) if word.startswith("-")]
    pairs += [(name, given) for name, assigned, given in (word.partition("=") for word in arguments) if assigned]
    found = {_plain(name): name for name, given in pairs if given == str(value)}
    return next((found[name] for name in known_names(field, found) if name in found), "")


def _plain(name: str) -> str:
    """Returns the name of a word without dashes, signs and the sections that it lies in."""
    return name.rpartition(".")[2].lstrip("-+~").replace("-", "_").lower()
