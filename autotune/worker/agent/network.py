"""The network between ranks: a socket to meet at, and the interface that leads there."""

import os
import socket

LOOPBACK = "127.0.0.1"


def listen(address: str) -> socket.socket:
    """Returns a listening socket on a free port of an address; on all addresses if this machine has not that one."""
    try:
        family, *_, place = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        return socket.create_server(place[:2], family=family, backlog=64)
    except OSError:  # for example behind network address translation
        return socket.create_server(("", 0), backlog=64)


def environment(host: str, port: int, nodes: int) -> dict[str, str]:
    """Returns the variables that tell a rank where the ranks meet.

    On several machines they also name the interface for gloo and NCCL, unless the user names one: by default gloo uses
    the address of the machine's name, which is often the loopback.
    """
    variables = {"MASTER_ADDR": host, "MASTER_PORT": str(port)}
    unsaid = [name for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if os.environ.get(name, "lo") == "lo"]
    if nodes > 1 and unsaid and (interface := interface_to(host, port)):
        variables |= dict.fromkeys(unsaid, interface)
    return variables


def interface_to(host: str, port: int) -> str | None:
    """Returns the network interface over which this machine reaches a host; None if unknown."""
    import psutil

    try:
        family, kind, *_, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)  # sends nothing: the kernel only chooses a route
            own = probe.getsockname()[0]
    except OSError:
        return None
    addresses = psutil.net_if_addrs()
    return next(
        (name for name, known in addresses.items() if own in {item.address.partition("%")[0] for item in known}), None
    )
