"""The shape of a data set: fields, sizes and lengths."""

import textwrap
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from autotune.executors import base
from autotune.trial import folder
from autotune.trial.folder import TrialDir
from autotune.trial.lengths import shares
from autotune.trial.request import TrialRequest
from autotune.trial.workload import Workload
from autotune.worker.data import samples
from autotune.worker.data.samples import describe, length_of


def test_a_size_that_differs_is_a_star_and_lengths_are_counted_in_classes():
    drawn = [{"input_ids": torch.zeros(n, dtype=torch.int64), "label": torch.tensor(1)} for n in (100, 100, 120, 500)]
    found = describe(iter(drawn))
    assert found is not None
    assert found.fields == ("input_ids int64[*]", "label int64[]")
    assert shares(found.table) == {128: 0.75, 512: 0.25}


def test_plain_lists_and_tuples_are_samples_too():
    found = describe(iter([([1, 2, 3], 0.5), ([1, 2, 3], 0.5)]))
    assert found is not None and found.fields == ("0 int[3]", "1 float[]")


def test_samples_in_a_class_of_their_own_have_their_fields_and_lengths():
    """Of graphs as a library makes them nothing was known, so no batch of the largest ones was tried."""
    drawn = [SimpleNamespace(x=torch.zeros(n, 3), edges=torch.zeros(2, 4 * n), graph=object()) for n in (7, 90)]
    found = describe(drawn)
    assert found is not None and found.longest_at == (1, 0)
    assert found.fields == ("edges float32[2,*]", "x float32[*,3]")


@pytest.mark.parametrize("n", [9, 200])
def test_the_length_of_a_sequence_of_wide_features_is_the_size_that_varies(n):
    """All samples counted as equally long, as wide as their features, and the worst batch held any of them."""
    data = [(torch.zeros(2 + at % 50, 80), at % 3) for at in range(n)]
    found = samples.describe(data)
    longest = max(len(x) for x, _ in data)
    assert found.table[-1][0] == longest and len(data[found.longest_at[0]][0]) == longest
    assert set(found.cannot) == {"max_length", "token_budget", "group_by_length"}
    cut = samples.describe(data, collate=lambda some, max_length=None: some)
    assert set(cut.cannot) == {"token_budget", "group_by_length"}, "which the collate function cuts itself"
    named = [{"input_ids": torch.zeros(9 + at), "frames": torch.zeros(1 + at, 80)} for at in range(n)]
    assert not samples.describe(named).cannot, "its tokens are its length"
    assert samples.fixed_sizes([torch.zeros(8, 80)] * 3) == set(), "nothing tells lengths from features"


def test_what_cannot_be_drawn_is_left_for_the_trials_to_say():
    def samples():
        raise OSError("no such disk")
        yield

    assert describe(samples()) is None


def test_a_mapped_data_set_is_read_whole_and_knows_where_its_longest_samples_are():
    found = describe([{"input_ids": list(range(n))} for n in (3, 9, 5, 7)])
    assert found is not None and found.whole and found.varies
    assert found.longest == 9 and found.longest_at == (1, 3, 2, 0)
    assert found.table == ((3.0, 1), (5.0, 1), (7.0, 1), (9.0, 1))


@pytest.mark.parametrize("made", [list, torch.tensor, np.array])
def test_tokens_that_a_mask_leaves_out_do_not_count(made):
    assert length_of({"input_ids": made([5, 6, 0, 0]), "attention_mask": made([1, 1, 0, 0])}) == 2
    assert length_of((torch.zeros(7, 3), 1)) == 7


@pytest.mark.process
def test_a_rank_tells_structure_and_data_and_another_width_is_another_structure(zoo, tmp_path):
    found = []
    for n, width in enumerate((8, 8, 16)):
        path = tmp_path / f"model{n}.py"
        path.write_text(
            textwrap.dedent(f"""
                import torch

                def model():
                    return torch.nn.Sequential(torch.nn.Linear(4, {width}), torch.nn.Linear({width}, 1))

                def batch(n):
                    return torch.randn(n, 4), torch.randn(n, 1)
            """)
        )
        base.run(zoo.executor, tmp_path / str(n), TrialRequest(target=str(path), mode="inspect"))
        found.append(folder.read_record(TrialDir(tmp_path / str(n)).workload, Workload))
    assert found[0].structure == found[1].structure != found[2].structure
    assert found[0].data is not None and found[0].data.fields == ("0 float32[4]", "1 float32[1]")
