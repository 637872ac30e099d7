"""Which rank of a trial that passed its deadline the others waited for."""

import pytest

from autotune.trial import stood

LIB = "/venv/lib/python3.11/site-packages"
MEET, QUEUE, LINEAR, LOOP = (
    f'{LIB}/torch/distributed/distributed_c10d.py", line 2806 in all_reduce',
    '/usr/lib/python3.11/threading.py", line 331 in wait',
    f'{LIB}/torch/nn/functional.py", line 12 in linear',
    '/home/me/train.py", line 31 in augment',
)


def log(*frames, printed="step 3\n"):
    stack = "".join(f'  File "{frame}\n' for frame in frames)
    return f"{printed}{stood.HEAD}Stack (most recent call first):\n{stack}"


@pytest.mark.parametrize(
    ("logs", "said"),
    [
        ([log(MEET, LOOP), log(LOOP)], "rank 0 waited for rank 1, which stood at train.py:31 (augment)"),
        ([log(QUEUE, LOOP), log(MEET)], "rank 1 waited for rank 0, which stood at train.py:31 (augment)"),
        ([log(MEET), log(QUEUE), log(MEET)], "ranks 0, 2 waited for rank 1, which stood at threading.py:331 (wait)"),
        ([log(MEET)] * 5 + [log(LINEAR)], "ranks 0, 1, 2, 3, ... waited for rank 5, which stood at functional.py:12 (linear)"),
        ([log(MEET), log(MEET)], ""),
        ([log(LOOP), log(LOOP)], ""),
        ([log(MEET), log()], ""),
        ([log(MEET), "it left no stack"], ""),
        ([log(LOOP)], ""),
    ],
)  # fmt: skip
def test_the_rank_that_the_others_waited_for_is_named(logs, said):
    assert stood.waited_for(dict(enumerate(logs))) == said
