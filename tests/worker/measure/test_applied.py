"""The configuration that ran, as the engine shows it."""

import pytest
import torch
from torch import nn

from autotune.errors import UserError
from autotune.worker.measure.applied import dtype_of


def test_a_model_in_double_precision_is_refused_with_the_remedy():
    """Each trial was `not_applied`, "float32 was asked for", though DeepSpeed rounds such weights to float32 itself."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(UserError, match=r"`model\.float\(\)`"):
        dtype_of(model.double())
    assert dtype_of(model.to(torch.bfloat16)) == "bfloat16"
    model[0].float()
    model[1].weight.data = model[1].weight.data.double()
    assert dtype_of(model) == "float32"
