"""The network between ranks: a socket to meet at, and the interface that leads there."""

import ipaddress
import os
import socket

LOOPBACK = "127.0.0.1"
# Variable with the descriptor of the socket for rank 0's store, which the supervisor of its machine opens to keep the port.
LISTENER = "AUTOTUNE_LISTENER_FD"
# An address of no machine (RFC 5737): the way there is the one to most others.
ELSEWHERE = "192.0.2.1"


def listen(address: str) -> socket.socket:
    """Returns a listening socket on a free port of an address; on all addresses where only this machine reaches it by that one.

    So it is behind network address translation, and with a name that leads to the loopback (Debian's 127.0.1.1).
    """
    try:
        family, *_, place = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        if address == LOOPBACK or not ipaddress.ip_address(place[0]).is_loopback:
            return socket.create_server(place[:2], family=family, backlog=64)
    except (OSError, ValueError):
        pass
    return socket.create_server(("", 0), backlog=64)


def environment(host: str, port: int, nodes: int) -> dict[str, str]:
    """Returns the variables that tell a rank where the ranks meet.

    On several machines they also name the interface for gloo and NCCL, unless the user names one: by default gloo uses
    the address of the machine's name, which is often the loopback.
    """
    variables = {"MASTER_ADDR": host, "MASTER_PORT": str(port)}
    unsaid = [name for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if os.environ.get(name, "lo") == "lo"]
    if nodes > 1:
        variables |= dict.fromkeys(unsaid, interface_to(host, port) or "")  # by an empty name they choose themselves
    return variables


def interface_to(host: str, port: int) -> str | None:
    """Returns the network interface over which this machine reaches a host, and others where it is this machine's name; None if unknown."""
    import psutil

    own = _source(host, port)
    if own and host != LOOPBACK and ipaddress.ip_address(own.partition("%")[0]).is_loopback:
        own = _source(ELSEWHERE, port)
    addresses = psutil.net_if_addrs()
    return next(
        (name for name, known in addresses.items() if own in {item.address.partition("%")[0] for item in known}), None
    )


def _source(host: str, port: int) -> str:
    """Returns this machine's address on the way to a host; empty if unknown."""
    try:
        family, kind, *_, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)  # sends nothing: the kernel only chooses a route
            return str(probe.getsockname()[0])
    except OSError:
        return ""
