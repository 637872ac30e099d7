"""Files and folders that the ranks of a script make: removed, or told."""

import builtins
import functools
import glob
import io
import os
import shutil
import subprocess
import sys
import time
import types
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from autotune.errors import UserError
from autotune.space.candidate import Candidate
from autotune.trial.result import WRITES_FILES
from autotune.worker.measure.batches import BatchObserver
from autotune.worker.script import isolation
from autotune.worker.script.context import ScriptContext
from autotune.worker.script.isolation import Isolation
from autotune.worker.script.saved import put_back
from autotune.worker.script.saved_files import made_folders, remove_empty


def rank(root: Path) -> Isolation:
    recorder = SimpleNamespace(folder=SimpleNamespace(path=root / "trial"))
    script = SimpleNamespace(working_dir=str(root))
    return Isolation(SimpleNamespace(recorder=recorder, script=script, scratch=root / "trial" / "scratch"))


def wrote(rank: Isolation, path: Path) -> None:
    """Has the script of a rank write a file."""
    rank._audit("open", (str(path), "w", os.O_WRONLY))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()


def test_folders_that_ranks_made_and_left_empty_are_removed_also_one_within_another(tmp_path):
    first, second = rank(tmp_path), rank(tmp_path)
    for maker, folder in ((first, tmp_path / "out"), (second, tmp_path / "out" / "checkpoints")):
        maker._audit("os.mkdir", (str(folder),))
        folder.mkdir()
    kept = tmp_path / "own"
    kept.mkdir()
    first._audit("os.mkdir", (str(kept),))  # it was there before
    remove_empty(
        made_folders(tmp_path / "trial" / "scratch")
    )  # as of a trial that was killed, whose ranks close nothing
    assert not (tmp_path / "out").exists() and kept.exists()


def test_a_librarys_cache_in_the_working_folder_is_no_file_of_the_scripts(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    found = rank(tmp_path)
    for path in (tmp_path / "cache" / "datasets" / "text_builder.lock", tmp_path / "metrics.json"):
        wrote(found, path)
    assert found._written.paths() == [str(tmp_path / "metrics.json")]


def test_files_that_a_script_writes_are_told_in_one_short_sentence(tmp_path, monkeypatch):
    found, said, temporary = rank(tmp_path), [], tmp_path / "autotune-1"
    found._context.once = said.append
    monkeypatch.setenv("TMPDIR", str(temporary))  # the trial's, which is removed
    for path in (*(tmp_path / "out" / f"{i}.log" for i in range(7)), temporary / "autotune-imports"):
        wrote(found, path)
    found.close()
    assert said == [f"{WRITES_FILES}out/0.log, out/1.log, out/2.log and 4 more"]


def test_what_a_rank_writes_as_it_ends_is_no_file_of_the_scripts(tmp_path):
    """Another rank that ended later named the first one's list of imported modules, in a temporary folder, as written by the script."""
    found, other, said = rank(tmp_path), rank(tmp_path), []
    other._context.once = said.append
    found.close()
    wrote(found, tmp_path / "autotune-imports")
    other.close()
    assert said == []


def test_files_of_all_ranks_are_told_by_each(tmp_path):
    """What is told before a study is told by rank 0, which named its own alone."""
    found, others, said = rank(tmp_path), rank(tmp_path), []
    found._context.once = said.append
    wrote(found, tmp_path / "rank0.csv")
    for name in ("rank1.csv", "rank1.tmp"):
        wrote(others, tmp_path / name)
    others._rename(os.rename, tmp_path / "rank1.tmp", tmp_path / "rank1.json")
    found.close()
    assert said == [f"{WRITES_FILES}rank0.csv, rank1.csv, rank1.json"]


def test_a_file_that_is_moved_into_its_place_is_told_by_its_last_name(tmp_path):
    found, said = rank(tmp_path), []
    found._context.once = said.append
    for _ in range(3):
        wrote(found, tmp_path / "shard.tmp")
        found._rename(os.rename, tmp_path / "shard.tmp", tmp_path / "shard.tar")
    wrote(
        rank(tmp_path), tmp_path / "out.tmp" / "metrics.json"
    )  # by another rank, in a folder that is moved as a whole
    found._rename(os.rename, tmp_path / "out.tmp", tmp_path / "out")
    found.close()
    assert said == [f"{WRITES_FILES}out/metrics.json, shard.tar"]


def test_a_script_that_goes_on_from_a_checkpoint_gets_what_it_saved_there_and_no_weights(tmp_path):
    """Weights and optimizer were loaded, which failed for each other stage of ZeRO and number of ranks."""
    found, said = rank(tmp_path), []
    found._context.once = said.append
    engine = torch.nn.Identity()
    engine.module = torch.nn.Identity()
    engine.load_universal_checkpoint, engine.global_steps = lambda: False, 0
    batches = BatchObserver(engine)
    found._context.candidate, found._context.meter = None, SimpleNamespace(engine=engine, batches=batches)

    def load(tag=None):
        return isolation._load_checkpoint(found._context, lambda *_: (None, None), engine, str(tmp_path), tag)

    assert load() == (None, None) and not said
    saved = {"module": {"weight": torch.ones(2)}, "optimizer": {}, "step": 7, "global_steps": 9}
    for name, file in zip(("one", "three"), isolation.CLIENT_STATES, strict=True):
        (tmp_path / name).mkdir()
        torch.save(saved, tmp_path / name / file)
    (tmp_path / "latest").write_text("one\n")
    for tag in (None, "three"):
        path, state = load(tag)
        assert Path(path).parent.name == (tag or "one") and state == {"step": 7, "global_steps": 9}
    assert "engine.load_checkpoint" in said[0]
    assert engine.global_steps == 9, "scripts hold it against their own count, or begin there"
    assert not batches.step(), "no step was made"


@pytest.mark.parametrize(
    ("stage", "precision", "loads"),
    [(1, "fp32", True), (2, "torch_autocast", True), (0, "fp32", False), (3, "fp32", False), (1, "bf16", False)],
)
def test_a_configuration_that_a_checkpoint_does_not_load_in_is_told(tmp_path, stage, precision, loads):
    """A training that went on from its checkpoint by a drop-in answer with another stage ended in DeepSpeed's traceback."""
    found, changes = rank(tmp_path), []
    found._context.changed = changes.append
    found._context.candidate = Candidate.of({"micro_batch_size": 4, "zero_stage": stage, "precision": precision})
    found._context.request = SimpleNamespace(ds_config=found._context.candidate.to_deepspeed())
    isolation._tell_states(found._context, {"train_batch_size": 4, "zero_optimization": {"stage": 2}})
    assert len(changes) == (not loads)
    assert all("saved at ZeRO 1 or 2 with fp32 weights" in text for text in changes)


@pytest.fixture
def removing(tmp_path, monkeypatch):
    """A rank whose script removes what an earlier training has left."""
    monkeypatch.setattr(isolation, "users_caller", lambda: "train.py:1")
    found = rank(tmp_path)
    found._context.once = lambda _: None
    found._began = 10**10  # what is there now was there before
    return found


def test_folders_of_an_earlier_training_stay_and_those_of_the_trial_go(tmp_path, removing):
    old, own = tmp_path / "checkpoint-1", tmp_path / "cache"
    old.mkdir()
    removing._audit("os.mkdir", (str(own),))
    (own / "part").mkdir(parents=True)
    for folder in (old, own / "part", own):
        removing._remove_tree(shutil.rmtree, folder)
    assert old.exists() and not own.exists()
    removing._make_folder(os.mkdir, old)  # the script makes anew what it takes for removed
    with pytest.raises(FileExistsError):
        removing._make_folder(os.mkdir, tmp_path)


@pytest.mark.process
def test_a_folder_that_a_process_of_the_scripts_made_is_the_trials(tmp_path, removing, monkeypatch):
    """It was said to have been there before, stayed after the trial, and was not there for the next save."""
    own, other = tmp_path / "out" / "step-1", tmp_path / "best"
    monkeypatch.setattr(isolation, "users_frame", lambda **_: sys._getframe())
    other.mkdir()
    time.sleep(2 * isolation.CLOCK_S)
    removing._spawn(subprocess.run, ["mkdir", "-p", own], check=True)
    if not isolation._born_at(str(own)):
        pytest.skip("this file system does not know when files were made")
    removing._remove_tree(shutil.rmtree, own)
    removing._remove_tree(shutil.rmtree, other)
    assert not own.exists() and isolation._born_at(str(own)) == 0 and other.exists()


def unsaved(found, path):
    """Saves weights as a trial does."""
    model = torch.nn.Linear(2, 2)
    found._context.once, found._context.meter = lambda _: None, SimpleNamespace(engine=SimpleNamespace(module=model))
    found._save(torch.save, model.state_dict(), path)


def test_weights_of_an_earlier_training_stay(tmp_path, removing):
    """One is of the name under which the trial has left out to save."""
    unsaved(removing, tmp_path / "last")
    for name in ("last", "epoch-1.pt", "flag"):
        (tmp_path / name).touch()
        removing._remove(os.remove, tmp_path / name)
    assert {path.name for path in tmp_path.iterdir()} == {"trial", "last", "epoch-1.pt"}


def test_links_and_folders_of_an_earlier_training_are_not_replaced(tmp_path, removing):
    """A link was removed for one to a checkpoint that no trial saves, and what a script moved out of the way was moved."""
    best, latest, last = tmp_path / "best", tmp_path / "latest", tmp_path / "last.pt"
    best.mkdir()
    last.touch()
    latest.symlink_to("best")
    removing._remove(os.remove, latest)
    removing._link(os.symlink, "step-1", latest)
    os.symlink("step-2", tmp_path / "new")
    removing._began = os.lstat(tmp_path / "new").st_mtime
    for old in (latest, last):
        os.utime(old, (1, 1), follow_symlinks=False)
    removing._rename(os.replace, tmp_path / "new", latest)
    removing._rename(os.rename, last, tmp_path / "previous.pt")
    removing._rename(os.rename, best, tmp_path / "previous")
    assert removing._copy_tree(shutil.copytree, tmp_path / "not-saved", best) == best
    assert removing._copy_tree(shutil.copytree, tmp_path / "trial", best, dirs_exist_ok=True) == best
    assert {path.name for path in tmp_path.iterdir()} == {"trial", "best", "latest", "last.pt"}
    assert os.readlink(latest) == "best" and not any(best.iterdir())


def test_what_takes_the_place_of_an_earlier_trainings_does_so_at_each_save(tmp_path, removing):
    """The second one was moved into the first one's folder, or through its link into one of the script's, and the third crashed."""
    best, latest, target = tmp_path / "best", tmp_path / "latest", tmp_path / "trial" / "target"
    best.mkdir()
    target.mkdir(parents=True)
    latest.symlink_to("best")
    for n in range(3):
        removing._audit("os.mkdir", (str(tmp_path / "new"),))
        (tmp_path / "new").mkdir()
        (tmp_path / "new" / str(n)).touch()
        removing._rename(os.rename, tmp_path / "new", best)
        assert [path.name for path in removing.files.place(best).iterdir()] == [str(n)]
        os.symlink(target, tmp_path / "link")
        removing._began = os.lstat(tmp_path / "link").st_mtime
        os.utime(latest, (1, 1), follow_symlinks=False)
        removing._rename(os.replace, tmp_path / "link", latest)
    assert not any(best.iterdir()) and not any(target.iterdir()) and os.readlink(latest) == "best"


@pytest.mark.parametrize("name", ["step-5", "pytorch_model.bin"])
def test_a_checkpoint_that_no_trial_saves_is_neither_moved_nor_linked(tmp_path, removing, name):
    """Moving it crashed, and a link to it led nowhere: where a script looked by `exists`, its next link crashed."""
    best = tmp_path / "best"
    removing._rename(os.rename, tmp_path / name, best)
    removing._link(os.symlink, name, tmp_path / "latest")
    assert not any(tmp_path.iterdir())
    best.mkdir()
    removing._rename(os.rename, tmp_path / name, best)
    assert [path.name for path in tmp_path.iterdir()] == ["best"]
    (tmp_path / "data").touch()
    removing._link(os.symlink, "data", tmp_path / "link")
    assert os.readlink(tmp_path / "link") == "data"


def test_a_file_that_is_saved_is_found_by_those_who_look_for_it(tmp_path):
    """A script that reads its size crashed, and ranks that wait for what one of them saves did so until the deadline."""
    first, second = rank(tmp_path), rank(tmp_path)
    unsaved(first, tmp_path / "step-1.pt")
    first._save(torch.save, {"step": 1}, tmp_path / "state.pt")
    assert (size := second.files.stat(os.stat, tmp_path / "step-1.pt").st_size) > 0
    assert second.files.stat(os.stat, tmp_path / "state.pt", follow_symlinks=False).st_size > 0
    with pytest.raises(FileNotFoundError, match=r"step-2\.pt"):
        second.files.stat(os.stat, tmp_path / "step-2.pt")
    for _ in range(2):  # nobody removes the first one
        first._link(os.symlink, "step-1.pt", tmp_path / "latest.pt")
    assert (
        second.files.stat(os.stat, tmp_path / "latest.pt").st_size == size and not (tmp_path / "latest.pt").is_symlink()
    )
    for of in (second, first):  # which both have saved it, and remove it
        of._remove(os.remove, tmp_path / "step-1.pt")
    second._remove(os.remove, tmp_path / "latest.pt")
    assert not first.files.place(tmp_path / "latest.pt").is_symlink()


def test_the_oldest_checkpoint_that_a_script_removes_need_not_have_been_saved(tmp_path, removing):
    """A script that keeps its last checkpoints crashed in each trial, where none of them is saved."""
    removing._remove_tree(shutil.rmtree, tmp_path / "global_step1")
    removing._remove(os.remove, tmp_path / "step-1.safetensors")
    with pytest.raises(FileNotFoundError):
        removing._remove(os.remove, tmp_path / "lock")


def test_files_may_be_renamed_by_keywords_and_have_any_name(tmp_path):
    """Python's own functions take `src` and `dst`; a name may be no UTF-8, or as long as the system allows."""
    found = rank(tmp_path)
    (tmp_path / "trial" / "scratch").mkdir(parents=True)
    for name in (b"\xff", b"x" * 255):
        path = tmp_path / os.fsdecode(name)
        path.touch()
        found._rename(os.rename, src=path, dst=tmp_path / "moved")
        assert not path.exists() and (tmp_path / "moved").exists()
        found._remove(os.remove, path=tmp_path / "moved")
        assert not (tmp_path / "moved").exists()


@pytest.mark.parametrize("copy", [shutil.copyfile, shutil.copy, shutil.copy2])
def test_a_checkpoint_that_is_copied_as_the_best_one_leaves_those_of_an_earlier_training(tmp_path, copy):
    """The copy failed for want of the file, or put an earlier training's last checkpoint in the place of its best one."""
    found = rank(tmp_path)
    found._context.scratch.mkdir(parents=True)
    last, best = tmp_path / "last.pt", tmp_path / "best.pt"
    unsaved(found, last)
    found._copy(copy, last, best)
    assert found.files.place(best).exists() and not best.exists()
    for file in (last, best):
        file.write_text(file.name)
    assert Path(found._copy(copy, src=last, dst=best)).read_text() == "best.pt"
    found.files.place(tmp_path / "state.pt").write_text("state")
    found._copy(copy, tmp_path / "state.pt", tmp_path / "kept.pt")
    assert found.files.place(tmp_path / "kept.pt").read_text() == "state" and not (tmp_path / "kept.pt").exists()
    found._copy(copy, best, tmp_path / "own.pt")
    found._remove(os.remove, best)
    found._copy(copy, best, tmp_path / "other.pt")
    assert [(tmp_path / name).exists() for name in ("own.pt", "other.pt")] == [False, True]


def test_a_folder_with_a_checkpoint_of_an_earlier_training_is_copied_without_it(tmp_path, monkeypatch):
    """shutil.copytree had the file left out, and failed as it set its times."""
    found = rank(tmp_path)
    (tmp_path / "last").mkdir()
    for name in ("model.pt", "args.json"):
        (tmp_path / "last" / name).write_text(name)
    found._saved.add(str(tmp_path / "last" / "model.pt"))
    for name in ("copyfile", "copy2"):
        monkeypatch.setattr(shutil, name, functools.partial(found._copy, getattr(shutil, name)))
    found._copy_tree(shutil.copytree, tmp_path / "last", tmp_path / "best")
    assert [path.name for path in (tmp_path / "best").iterdir()] == ["args.json"]


def test_what_a_script_copies_of_a_checkpoint_need_not_have_been_saved(tmp_path, removing):
    """A script that keeps the best of what engine.save_checkpoint or save_pretrained saves crashed in each trial."""
    found = removing._copy_tree(shutil.copytree, src=tmp_path / "out" / "step-10", dst=tmp_path / "best")
    assert found == tmp_path / "best" and not found.exists()
    place = removing._copy(shutil.copy, tmp_path / "model.safetensors", tmp_path / "best.safetensors")
    assert not os.path.lexists(place)
    with pytest.raises(FileNotFoundError):
        removing._copy(shutil.copy, tmp_path / "config.json", tmp_path / "best.json")


def test_a_file_is_copied_into_a_folder_under_its_name(tmp_path):
    found = rank(tmp_path)
    (tmp_path / "folder").mkdir()
    unsaved(found, tmp_path / "last.pt")
    assert found._copy(shutil.copy, tmp_path / "last.pt", tmp_path / "folder") == str(tmp_path / "folder" / "last.pt")
    assert found.files.place(tmp_path / "folder" / "last.pt").exists()


@pytest.mark.parametrize("given", [("out",), ("out", "step-1"), {"save_dir": "out"}, ()])
def test_a_folder_that_is_not_saved_into_is_there_for_what_the_script_writes_beside(given, tmp_path, monkeypatch):
    """A script that writes its progress beside the checkpoint found no folder, and each of its trials crashed."""
    monkeypatch.chdir(tmp_path)
    script = ScriptContext.__new__(ScriptContext)
    script.report = SimpleNamespace(caveats=[])
    save = script.saver("engine.save_checkpoint", "save_dir")
    save(None, "engine", **given) if isinstance(given, dict) else save(None, "engine", *given)
    script.saver("push_to_hub")(None, "model", "me/model")
    assert [path.name for path in tmp_path.iterdir()] == ["out"] * bool(given)


def test_a_checkpoint_in_shards_is_not_saved(tmp_path):
    """Trials wrote theirs over that of an earlier training, within their timed steps."""
    found, said = rank(tmp_path), []
    found._context.saver = lambda name: lambda *_args, **_kwargs: said.append(name)
    module = ModuleType("saver")
    module.save = module.async_save = lambda *_args, **_kwargs: pytest.fail("it was saved")
    importer = ModuleType("importer")
    importer.save = module.save
    sys.modules["importer"] = importer
    try:
        isolation.on_sharded_saver(found._context, module)
    finally:
        del sys.modules["importer"]
    importer.save({}, checkpoint_id="latest")
    assert module.async_save({}, checkpoint_id="latest").done()
    assert said == ["torch.distributed.checkpoint.save", "torch.distributed.checkpoint.async_save"]


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_a_sparse_matrix_that_a_script_saves_holds_no_weights(tmp_path):
    found = rank(tmp_path)
    found._context.meter = SimpleNamespace(engine=SimpleNamespace(module=torch.nn.Linear(9, 9)))
    for kind in (torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr):
        assert not isolation._holds_weights(found._context.meter, {"neighbours": kind(torch.eye(4))})
    assert isolation._holds_weights(found._context.meter, found._context.meter.engine.module.state_dict())


def test_weights_that_a_script_reads_back_are_those_of_the_moment(tmp_path):
    """Looking for them first, as `os.path.exists` does, finds what stands for them."""
    said: list[str] = []
    model = torch.nn.Linear(2, 2)
    found = rank(tmp_path)
    found._context.once, found._context.meter = said.append, SimpleNamespace(engine=SimpleNamespace(module=model))
    found._save(torch.save, model.state_dict(), tmp_path / "best.pt")
    with torch.no_grad():
        model.weight += 1
    assert os.path.getsize(found.files.place(tmp_path / "best.pt")) and not (tmp_path / "best.pt").exists()
    read = found._load(torch.load, tmp_path / "best.pt")["weight"]
    assert torch.equal(read, model.weight) and read.data_ptr() != model.weight.data_ptr()
    assert len(said) == 2
    found._save(torch.save, {"model": model, "epoch": 3}, tmp_path / "last.pt")

    def abort(error):
        raise error

    found._context.abort = abort
    with pytest.raises(UserError, match="do not save the model"):
        found._load(torch.load, tmp_path / "last.pt")


class Losses(list[float]):
    """A list that is not made of its values."""

    def __init__(self, of: str) -> None:
        super().__init__([2.0, 1.0])
        self.of = of


def test_a_checkpoint_that_holds_more_than_weights_is_read_back_on_another_rank(tmp_path):
    """A script that goes back to its best checkpoint, with optimizer and epoch, could not be run at all."""
    models = [torch.nn.Sequential(torch.nn.Linear(99, 99), torch.nn.BatchNorm1d(99)) for _ in range(2)]
    ranks = [rank(tmp_path), rank(tmp_path)]
    for found, model in zip(ranks, models, strict=True):
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.ones(2, 99)).sum().backward()
        optimizer.step()
        engine = SimpleNamespace(module=model, basic_optimizer=optimizer)
        found._context.once, found._context.meter = lambda _: None, SimpleNamespace(engine=engine)
    engine = ranks[0]._context.meter.engine
    on_host = {name: tensor.clone() for name, tensor in engine.module.state_dict().items()}
    state = {
        "best": [on_host, engine.module[0].state_dict()], "optimizer": engine.basic_optimizer.state_dict(),
        "epoch": 3, "mean": torch.arange(99), "losses": Losses("train"),
    }  # fmt: skip
    ranks[0]._save(torch.save, state, tmp_path / "best.pt")
    assert ranks[0].files.place(tmp_path / "best.pt").stat().st_size < 9999
    read = ranks[1]._load(torch.load, tmp_path / "best.pt", map_location="cpu", weights_only=False)
    models[1].load_state_dict(read["best"][0])
    models[1][0].load_state_dict(read["best"][1])
    other = ranks[1]._context.meter.engine.basic_optimizer
    before = other.state_dict()["state"][0]["exp_avg"].clone()
    other.load_state_dict(read["optimizer"])
    assert torch.equal(other.state_dict()["state"][0]["exp_avg"], before) and before.any()
    assert put_back(None, {"x": [1]}, None) == ({"x": [1]}, False), "what holds no weights asks the engine for none"
    assert read["epoch"] == 3 and read["losses"].of == "train" and torch.equal(read["mean"], torch.arange(99))


def test_a_script_finds_the_files_that_it_has_saved(tmp_path, monkeypatch):
    """One that reads its checkpoint's checksum, or takes the newest of them, crashed in each trial."""
    found = rank(tmp_path)
    unsaved(found, tmp_path / "step-1.pt")
    monkeypatch.setattr(os, "supports_follow_symlinks", {*os.supports_follow_symlinks})
    for owner, name in ((builtins, "open"), (io, "open"), *((os, name) for name in ("stat", "listdir", "scandir"))):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    globber = getattr(glob, "_StringGlobber", None) or type("Globber", (), {"scandir": os.scandir, "lstat": os.lstat})
    monkeypatch.setattr(glob, "_StringGlobber", globber, raising=False)
    bound = globber.scandir is os.scandir  # as in Python 3.13's pathlib
    for name in ("scandir", "lstat"):
        monkeypatch.setattr(globber, name, getattr(globber, name), raising=False)
    found.files.install()
    assert not bound or (globber.scandir is os.scandir and globber.lstat is os.stat)
    (tmp_path / "log").touch()
    path = max(glob.glob(str(tmp_path / "*.pt")), key=os.path.getmtime)
    assert path == str(tmp_path / "step-1.pt") and path == str(next(tmp_path.glob("step-*")))
    with open(path, "rb") as file:
        assert len(file.read()) == os.path.getsize(path) > 0
    assert sorted(os.listdir(tmp_path)) == ["log", "step-1.pt", "trial"]
    with os.scandir(tmp_path) as entries:
        assert {entry.name: entry.is_file() for entry in entries} == {"log": True, "step-1.pt": True, "trial": False}
    found._remove(os.remove, path)
    assert not glob.glob(str(tmp_path / "*.pt")) and not os.path.exists(path)
    with pytest.raises(FileNotFoundError):
        Path(path).read_bytes()
    later = type("Globber", (), {"scandir": list})  # of Python 3.14, which asks os for its function, and yields triples
    monkeypatch.setattr(glob, "_StringGlobber", later)
    found.files.install()
    assert later.scandir is list


def test_what_was_saved_in_a_folder_is_moved_and_removed_with_it(removing, tmp_path):
    """A script that writes its checkpoint under another name first, and then moves the folder, could not read it back."""
    new, best = tmp_path / "new", tmp_path / "best"
    for _ in range(2):
        removing._audit("os.mkdir", (str(new),))
        new.mkdir()
        unsaved(removing, new / "model.pt")
        removing._remove_tree(shutil.rmtree, best, ignore_errors=True)
        removing._rename(os.rename, new, best)
        assert set(removing._load(torch.load, best / "model.pt")) == {"weight", "bias"}
        assert removing.files.listdir(os.listdir, best) == ["model.pt"] and not removing._kept
    removing._remove_tree(shutil.rmtree, best)
    assert not any(removing.files.place(folder / "model.pt").exists() for folder in (new, best))
    removing._audit("os.mkdir", (str(new),))
    new.mkdir()
    removing._rename(os.rename, new, best)
    remove_empty(removing._made)
    assert {path.name for path in tmp_path.iterdir()} == {"trial"}


def test_tensors_that_a_script_saves_by_safetensors_are_read_back(tmp_path, monkeypatch):
    """It was not saved, and the script that reads it crashed."""
    found, said, module = rank(tmp_path), [], ModuleType("safetensors.torch")
    unsaved(found, tmp_path / "other.pt")
    found._context.once = said.append
    for name in ("save_file", "save_model", "load_file", "load_model"):
        setattr(module, name, types.FunctionType((lambda *_args, **_kwargs: "a file").__code__, {}, name))
    isolation.on_safetensors(found._context, found.files, module)
    for name, hook in (("save", found._save), ("load", found._load)):
        monkeypatch.setattr(torch, name, functools.partial(hook, getattr(torch, name)))
    monkeypatch.setattr(isolation, "users_caller", lambda: None)
    model, path = found._context.meter.engine.module, tmp_path / "model.safetensors"
    module.save_model(model, path)
    assert module.load_file(path) == "a file" and "safetensors.save_model" in said[-1]
    monkeypatch.setattr(isolation, "users_caller", lambda: "train.py:1")
    module.save_file(model.state_dict(), path)
    assert torch.equal(module.load_file(path)["weight"], model.weight) and not path.exists()
    other = torch.nn.Linear(2, 2)
    module.save_model(model, filename=path)
    module.load_model(other, path)
    assert torch.equal(other.weight, model.weight)
    path.touch()  # an earlier training's
    module.save_file({f"ema.{name}": tensor.clone() for name, tensor in model.state_dict().items()}, path)
    assert module.load_file(path) == module.load_model(other, path) == "a file"
