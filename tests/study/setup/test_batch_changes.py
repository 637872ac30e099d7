"""What a training does later than trials see: batches that its script or its configuration changes."""

import textwrap

import pytest

from autotune.study.setup.batch_changes import batch_changes, notes


@pytest.fixture
def script(tmp_path):
    """Writes a training script and returns its path."""

    def write(text, name="train.py"):
        (tmp_path / name).write_text(textwrap.dedent(text))
        return tmp_path / name

    return write


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        (
            """\
            for epoch, res in enumerate([16, 32]):
                bs = 4 * (64 // res)
                loader = DataLoader(data, batch_size=bs, drop_last=True)
                for x, y in loader: engine.step()
            """,
            [3],
        ),
        (
            """\
            def main(bs):
                while epoch < 9:
                    if epoch > 5:
                        bs *= 2
                    loader = torch.utils.data.DataLoader(data, bs)
                    train(engine, loader)
            """,
            [5],
        ),
        (
            """\
            for epoch in range(9):
                bs = 64
                if epoch > 5:
                    bs = 128
                loader = DataLoader(data, batch_size=bs)
                train(engine, loader)
            """,
            [5],
        ),
        ("def after(epoch): engine.set_train_batch_size(64 * epoch)\n", [1]),
        # A loader that each epoch makes anew with the same batch, and loaders by their split.
        ("for e in range(9):\n    bs = a.bs\n    loader = DataLoader(data, batch_size=bs)\n    train(loader)\n", []),
        ("for name, bs in sizes.items():\n    loaders[name] = DataLoader(data[name], batch_size=bs)\n", []),
        ("for e in range(9):\n    for x in DataLoader(data, batch_size=bs): bs_seen = e\n", []),
        ("loaders = [DataLoader(d, bs) for d, bs in zip(data, sizes)]\n", []),
    ],
)
def test_a_loader_whose_batch_changes_in_its_loop_is_found(script, text, lines):
    assert batch_changes(script(text)) == [f"train.py, line {line}" for line in lines]


def test_modules_of_the_users_own_are_looked_at_too(script):
    script("def grow(engine, n): engine.set_train_micro_batch_size(n)\n", "schedule.py")
    assert notes(script("import schedule\n"), {}) == [
        "the script may change its batch while it trains (schedule.py, line 1): trials see its first seconds alone, so the answer"
        " is that for the batch which it begins with, and less sure where only some trials came to the next one"
    ]


def test_schedules_of_deepspeed_are_named_where_they_are_switched_on():
    random_ltd = {"data_routing": {"enabled": True, "random_ltd": {"enabled": True}}}
    config = {"curriculum_learning": {"enabled": True}, "data_efficiency": {"enabled": True, **random_ltd}}
    (note,) = notes(None, config)
    assert note.startswith("`curriculum_learning` and `data_efficiency.data_routing.random_ltd` of your")
    assert notes(None, {"data_efficiency": {"enabled": False, **random_ltd}, "curriculum_learning": {}}) == []
