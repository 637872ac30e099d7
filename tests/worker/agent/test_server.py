"""The agent's own instruments: commands, and what its ranks are given."""

import os
import socket
import subprocess
import sys

import pytest

from autotune.trial.request import TrialRequest
from autotune.worker.agent import network, preload, rank_start, server


def test_a_command_behind_another_stays_in_the_pipe():
    read, write = os.pipe()
    os.write(write, b'{"run": "a"}\nnot json\n{"cancel": true}\n')
    commands = server._commands(read)
    assert next(commands) == {"run": "a"}
    assert os.read(read, 100) == b'not json\n{"cancel": true}\n'
    os.write(write, b'not json\n{"run": "b"}\n{"run": "half')
    os.close(write)
    assert list(commands) == [{"run": "b"}]
    os.close(read)


def test_a_rank_finds_the_variables_that_torchrun_sets():
    request = TrialRequest(target="", world_size=4, nodes=2)
    variables = rank_start.rank_environment(3, request) | network.environment("127.0.0.1", 29500, 1)
    assert variables == {
        "RANK": "3", "LOCAL_RANK": "1", "GROUP_RANK": "1",
        "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "LOCAL_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500",
    }  # fmt: skip


def test_gloo_and_nccl_take_the_interface_that_leads_to_the_others(monkeypatch):
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "lo")  # as the server has it for trials on one machine
    found = network.environment("127.0.0.1", 29500, 2)
    assert found["GLOO_SOCKET_IFNAME"] == found["NCCL_SOCKET_IFNAME"] == network.interface_to("127.0.0.1", 29500)
    assert network.environment("127.0.0.1", 29500, 1).keys() == {"MASTER_ADDR", "MASTER_PORT"}
    assert network.interface_to("no.such.host.invalid", 29500) is None
    unknown = network.environment("no.such.host.invalid", 29500, 2)
    assert unknown["GLOO_SOCKET_IFNAME"] == unknown["NCCL_SOCKET_IFNAME"] == ""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    assert "GLOO_SOCKET_IFNAME" not in network.environment("127.0.0.1", 29500, 2)  # the user's own


def test_others_reach_a_machine_whose_name_leads_to_its_loopback(monkeypatch):
    """As on Debian and Ubuntu, where /etc/hosts has 127.0.1.1 for it."""
    found = socket.getaddrinfo

    def lookup(host, *rest, **more):
        return found("127.0.1.1" if host == "node-1" else host, *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    for address, place in {"node-1": "0.0.0.0", "127.0.0.1": "127.0.0.1"}.items():
        with network.listen(address) as listener:
            assert listener.getsockname()[0] == place
    assert network.interface_to("node-1", 29500) == network.interface_to(network.ELSEWHERE, 29500) != "lo"
    assert network.interface_to("127.0.0.1", 29500) == "lo"


@pytest.mark.process
def test_what_does_not_survive_a_fork_is_found_by_trying_and_told_why():
    def fails():
        raise RuntimeError("Cannot re-initialize CUDA in forked subprocess\nand more")

    assert preload.tried_in_a_fork(lambda: None) is None
    assert preload.tried_in_a_fork(fails) == "RuntimeError: Cannot re-initialize CUDA in forked subprocess"
    assert preload.tried_in_a_fork(lambda: os.kill(os.getpid(), 9)) == "exit status -9"


@pytest.mark.process
def test_an_unknown_role_is_refused():
    done = subprocess.run(
        [sys.executable, "-m", "autotune.worker", "sing"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and done.stderr.startswith("usage: ")


@pytest.mark.process
def test_folders_of_the_working_folder_are_not_taken_for_libraries(tmp_path):
    own, installed = tmp_path / "own", tmp_path / "installed"  # a short torch: the real one takes seconds to import
    for place, text in ((own, "a folder of the user"), (installed, "the library")):
        place.mkdir()
        (place / "torch.py").write_text(f"raise SystemExit({text!r})")
    done = subprocess.run(
        [sys.executable, "-m", "autotune.worker", "device"],
        cwd=own, env=os.environ | {"PYTHONPATH": f"{installed}{os.pathsep}{os.getcwd()}"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stderr == "the library\n"
