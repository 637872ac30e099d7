"""How ranks meet."""

import socket

import torch.distributed as dist

from autotune.trial.request import TrialRequest
from autotune.worker import rank


def test_the_store_stands_on_the_agents_socket_in_a_way_that_torch_2_6_knows(monkeypatch):
    """Its default backend refuses a socket that listens already; `make floors` runs trials on that release."""
    given = {}
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.setattr(dist.distributed_c10d, "default_pg_timeout", dist.distributed_c10d.default_pg_timeout)
    monkeypatch.setattr(dist, "TCPStore", lambda *_, **options: given.update(options))
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **options: given.update(options))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        rank.connect(TrialRequest(target="model.py", world_size=1), 0, listener.fileno(), cuda=False)
        assert given["master_listen_fd"] == listener.fileno() and given["use_libuv"] is False
    assert given["world_size"] == 1
