"""Words of a command line that carry a script's batch."""

import pytest

from autotune.trial.flags import word_that_holds


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("config/small.py --batch_size=4", "--batch_size"),
        ("train.batch_size=4 model.width=4", "train.batch_size"),
        ("run.yaml ++device_train_microbatch_size=4", "++device_train_microbatch_size"),
        ("--lr 4 --Batch-Size 4", "--Batch-Size"),
        ("--images-per-gpu=4 --micro_batch_size=4", "--micro_batch_size"),  # the commoner name
        ("--batch_size=8 --eval_batch_size=4 --n_layer=4", ""),
        ("--prompts-per-rank=4 --group=4 --micro-batch=4", "--micro-batch"),  # rather than what a step generates from
        ("--micro=4 --lr=4", "--micro"),
        ("--num-minibatches=4 --minibatch-size=4 --num-envs=4", "--minibatch-size"),  # of PPO
        ("--micro_steps=4", ""),
        ("-b 4", "-b"),  # it was said that no flag moves the batch
        ("-b 4 --bs 4", "--bs"),
        ("batch_size 4 --fast 4", ""),
        ("--batch_size", ""),
    ],
)
def test_the_word_that_holds_a_batch_is_known_by_its_name_and_value(line, name):
    assert word_that_holds("micro_batch_size", 4, line.split()) == name


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("--update_freq 4", "--update_freq"),  # of fairseq, BEiT, VideoMAE
        ("--iters-to-accumulate=4", "--iters-to-accumulate"),
        ("trainer.grad_acc=4", "trainer.grad_acc"),
        ("--acc 4 --acc-steps 4", "--acc-steps"),  # the first is an accuracy
        ("--target_update_freq 4 --eval_freq 4", ""),
    ],
)
def test_the_word_that_holds_an_accumulation_is_known_by_its_name_and_value(line, name):
    assert word_that_holds("gradient_accumulation_steps", 4, line.split()) == name
