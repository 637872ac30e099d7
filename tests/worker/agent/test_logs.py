"""The log of a rank, taken from a pipe: never longer than its bound, its head and its tail kept."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from autotune.worker.agent import logs
from autotune.worker.agent.logs import Log

MIB = 1 << 20


def test_what_is_printed_stands_in_the_file(tmp_path):
    log = Log(tmp_path / "log")
    os.write(log._write, b"first\n")
    log.take()
    assert (tmp_path / "log").read_bytes() == b"first\n"
    os.write(log._write, b"last\n")
    log.close()
    assert (tmp_path / "log").read_bytes() == b"first\nlast\n"


@pytest.mark.process
def test_a_torrent_is_kept_within_its_bound_at_every_moment(tmp_path):
    log, path = Log(tmp_path / "log"), tmp_path / "log"
    torrent = "import sys; print('first'); [sys.stdout.write('x' * (1 << 20)) for _ in range(96)]; print('last word')"
    child = subprocess.Popen([sys.executable, "-S", "-c", torrent], stdout=log._write, stderr=log._write)
    while child.poll() is None:
        log.take()
        assert path.stat().st_size <= logs.LIMIT_BYTES
    log.close()
    kept = path.read_bytes()
    assert kept.startswith(b"first\n") and kept.endswith(b"xlast word\n") and kept.count(logs.CUT) == 1
    assert 2 * MIB < len(kept) < 4 * MIB


def test_a_full_disk_costs_the_log_and_nobody_waits_for_it():
    log = Log(Path("/dev/full"))
    for _ in range(2 * logs.PIPE_BYTES >> 15):
        os.write(log._write, bytes(1 << 15))  # would wait for ever if nobody read
        log.take()
    log.close()


def test_no_descriptor_is_left_open(tmp_path):
    before = os.listdir("/proc/self/fd")
    log = Log(tmp_path / "log")
    log.close()
    assert os.listdir("/proc/self/fd") == before
