"""Starts real engines on the loopback of this machine for a test session; stops each by the IDs of its processes."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from autotune.system import processes
from support.zoo import wait_until

SLURM_COMMANDS = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol", "munged")
SLURM_CONF = """
ClusterName=autotune
SlurmctldHost={host}(127.0.0.1)
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
AuthType=auth/munge
AuthInfo=socket={root}/munge/socket
CredType=cred/munge
SlurmUser={user}
SlurmdUser={user}
SlurmctldPort={ports[0]}
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool-%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd-%n.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
PreemptType=preempt/partition_prio
PreemptMode=CANCEL
SlurmdParameters=config_overrides
SlurmdTimeout=5
KillWait=5
MinJobAge=300
InactiveLimit=0
ReturnToService=2
MpiDefault=none
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 RealMemory=4000 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 RealMemory=4000 State=UNKNOWN
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP PriorityTier=1
PartitionName=urgent Nodes=n1,n2 MaxTime=INFINITE State=UP PriorityTier=10
PartitionName=single Nodes=n1 MaxNodes=1 MaxTime=INFINITE State=UP
"""


def free_ports(n: int) -> list[int]:
    """Ports of the loopback that nobody listens on."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(n)]
        return [each.getsockname()[1] for each in sockets]


def why_no_slurm() -> str:
    """Why there can be no Slurm here; empty where there can."""
    missing = [name for name in SLURM_COMMANDS if shutil.which(name) is None]
    if missing:
        return f"Slurm is not installed ({', '.join(missing)}); `make engines` installs it"
    return "" if os.getuid() == 0 else "Slurm's daemons are started as root"


@dataclass
class SlurmCluster:
    """A controller and two nodes.

    Attributes:
        root: Their files.
        nodes: The daemon of each node.
    """

    root: Path
    ports: list[int] = field(default_factory=lambda: free_ports(3))
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    nodes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def conf(self) -> Path:
        return self.root / "slurm.conf"

    def start(self) -> None:
        """Starts munge, the controller and two nodes, and waits until the nodes are idle."""
        for name in ("munge", "state", "spool-n1", "spool-n2"):
            (self.root / name).mkdir(parents=True)
        key = self.root / "munge" / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        host = socket.gethostname().split(".")[0]
        self.conf.write_text(SLURM_CONF.format(root=self.root, host=host, ports=self.ports, user="root"))
        munge = [
            "munged", "--foreground", "--force", f"--key-file={key}", f"--socket={self.root}/munge/socket",
            f"--pid-file={self.root}/munge/pid", f"--log-file={self.root}/munge/log", f"--seed-file={self.root}/munge/seed",
        ]  # fmt: skip
        self._spawn(munge)
        assert wait_until((self.root / "munge" / "socket").exists, 10)
        self._spawn(["slurmctld", "-D", "-f", str(self.conf)])
        for node in ("n1", "n2"):
            self.start_node(node)
        assert wait_until(lambda: self.states() == ["idle", "idle"], 30), self.states()

    def start_node(self, node: str) -> None:
        """Starts a node's daemon."""
        self.nodes[node] = self._spawn(["slurmd", "-D", "-N", node, "-f", str(self.conf)])

    def states(self) -> list[str]:
        """What the nodes are doing."""
        return self.call("sinfo", "--noheader", "--Node", "--format=%t", "--partition=all").split()

    def call(self, *command: str) -> str:
        """What a Slurm command prints."""
        environment = {**os.environ, "SLURM_CONF": str(self.conf)}
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60).stdout

    def jobs(self) -> list[str]:
        """Jobs that wait or run."""
        return self.call("squeue", "--noheader", "--format=%i %T").splitlines()

    def stop(self) -> None:
        """Ends all jobs and daemons."""
        self.call("scancel", "--user=root")
        wait_until(lambda: not self.jobs(), 15)
        for process in reversed(self.processes):
            end(process)

    def _spawn(self, command: list[str]) -> subprocess.Popen[bytes]:
        with open(self.root / f"{command[0]}.out", "ab") as log:
            process = subprocess.Popen(
                command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
            )
        self.processes.append(process)
        return process


def end(process: subprocess.Popen[bytes], timeout_s: float = 10.0) -> None:
    """Ends a process that a test started, and what it started."""
    below = []
    with contextlib.suppress(psutil.NoSuchProcess):
        below = psutil.Process(process.pid).children(recursive=True)
    processes.stop(process, timeout_s)
    for child in below:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.send_signal(signal.SIGKILL)


@contextlib.contextmanager
def slurm(root: Path) -> Iterator[SlurmCluster]:
    """A cluster, with `SLURM_CONF` set, so that Slurm's commands find it."""
    before = os.environ.get("SLURM_CONF")
    cluster = SlurmCluster(root)
    try:
        cluster.start()
        os.environ["SLURM_CONF"] = str(cluster.conf)
        yield cluster
    finally:
        cluster.stop()
        os.environ.pop("SLURM_CONF", None)
        if before is not None:
            os.environ["SLURM_CONF"] = before


def until(condition: Callable[[], bool], timeout_s: float) -> float:
    """Seconds until a condition came true; fails if it does not in time."""
    start = time.monotonic()
    assert wait_until(condition, timeout_s), f"not within {timeout_s:g} s"
    return time.monotonic() - start


def why_no_ray() -> str:
    """Why there can be no Ray here; empty where there can."""
    return "" if importlib.util.find_spec("ray") else "Ray is not installed; `make engines` installs it"


@contextlib.contextmanager
def ray_cluster(n_nodes: int = 2) -> Iterator[Any]:
    """A Ray cluster of some nodes on the loopback, to which this process is not connected yet; yields it and its address."""
    # Despite its name it makes Ray on Linux use the loopback; else it takes the machine's outer address.
    quiet = {
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    }
    before = {name: os.environ.get(name) for name in (*quiet, "RAY_ADDRESS")}
    os.environ.update(quiet)
    import ray
    from ray.cluster_utils import Cluster

    known = set(psutil.pids())
    cluster = Cluster()
    try:
        for _ in range(n_nodes):
            cluster.add_node(
                num_cpus=1, node_ip_address="127.0.0.1", include_dashboard=False, object_store_memory=80 << 20
            )
        os.environ["RAY_ADDRESS"] = cluster.address
        yield cluster
    finally:
        address = str(cluster.address)  # there is none once it is down
        ray.shutdown()
        cluster.shutdown()
        for process in psutil.process_iter(["pid", "cmdline"]):
            ours = process.info["pid"] not in known and any("/ray/" in part for part in process.info["cmdline"] or [])
            if ours and address in " ".join(process.info["cmdline"]):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def why_no_hosts() -> str:
    """Why there can be no two hosts here; empty where there can."""
    missing = [name for name in ("ip", "unshare", "nsenter", "ssh", "sshd", "ssh-keygen") if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} not installed; `make engines` installs them"
    if os.getuid() != 0:
        return "network namespaces are made as root"
    if subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False).returncode:
        return "this machine allows no network namespaces"
    return ""


@dataclass
class Hosts:
    """Two hosts with addresses, loopbacks and ssh daemons of their own; both see this machine's files.

    Attributes:
        hostfile: It names them.
        ssh: The command that reaches them.
        processes: Their daemons.
    """

    root: Path
    prefix: str = field(default_factory=lambda: f"at{os.getpid() % 10000}")
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def hostfile(self) -> Path:
        return self.root / "hostfile"

    @property
    def ssh(self) -> str:
        return f"ssh -F {self.root / 'ssh_config'}"

    def start(self) -> None:
        """Joins two namespaces by a bridge in a third, and starts a daemon in each."""
        self.root.mkdir(parents=True, exist_ok=True)
        _call("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.root / "key"))
        _call("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.root / "host"))
        (self.root / "authorized").write_text((self.root / "key.pub").read_text())
        Path("/run/sshd").mkdir(exist_ok=True)
        _call("ip", "link", "add", f"{self.prefix}br", "type", "bridge")
        _call("ip", "addr", "add", "10.203.0.254/24", "dev", f"{self.prefix}br")
        _call("ip", "link", "set", f"{self.prefix}br", "up")
        config = [
            f"IdentityFile {self.root}/key",
            "StrictHostKeyChecking no",
            f"UserKnownHostsFile {self.root}/known",
            "LogLevel ERROR",
        ]
        for number in (1, 2):
            name, address = f"{self.prefix}-{number}", f"10.203.0.{number}"
            _call("ip", "netns", "add", name)
            _call("ip", "link", "add", f"{self.prefix}v{number}", "type", "veth", "peer", "name", "eth0", "netns", name)
            _call("ip", "link", "set", f"{self.prefix}v{number}", "master", f"{self.prefix}br", "up")
            inside = ["ip", "-n", name]
            _call(*inside, "addr", "add", f"{address}/24", "dev", "eth0")
            _call(*inside, "link", "set", "eth0", "up")
            _call(*inside, "link", "set", "lo", "up")
            self.processes.append(self._daemon(number))
            config.append(f"Host host{number}\n  HostName {address}")
        (self.root / "ssh_config").write_text("\n".join(config) + "\n")
        self.hostfile.write_text("host1 slots=1\nhost2 slots=1\n")
        for host in ("host1", "host2"):
            reach = [*self.ssh.split(), host, "true"]
            reached = wait_until(
                lambda reach=reach: subprocess.run(reach, capture_output=True, check=False).returncode == 0, 10
            )  # type: ignore[misc]
            assert reached, (self.root / f"sshd-{host[-1]}.log").read_text()

    def _daemon(self, number: int) -> subprocess.Popen[bytes]:
        daemon = [
            shutil.which("sshd") or "sshd", "-D", "-e", "-f", "/dev/null", "-p", "22", "-o", f"ListenAddress=10.203.0.{number}",
            "-o", f"HostKey={self.root}/host", "-o", f"AuthorizedKeysFile={self.root}/authorized", "-o", "StrictModes=no",
            "-o", f"PidFile={self.root}/sshd-{number}.pid", "-o", "UsePAM=no", "-o", "PermitRootLogin=yes",
        ]  # fmt: skip
        with open(self.root / f"sshd-{number}.log", "ab") as log:
            return subprocess.Popen(
                ["ip", "netns", "exec", f"{self.prefix}-{number}", *daemon],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
            )

    def restart(self, number: int, after_s: float) -> None:
        """Ends a host's daemon with its sessions, and starts another one some time later."""
        end(self.processes[number - 1])
        time.sleep(after_s)
        self.processes[number - 1] = self._daemon(number)

    def stop(self) -> None:
        """Ends the daemons and removes the namespaces."""
        for process in self.processes:
            end(process)
        for number in (1, 2):
            subprocess.run(["ip", "link", "del", f"{self.prefix}v{number}"], check=False, capture_output=True)
            subprocess.run(["ip", "netns", "del", f"{self.prefix}-{number}"], check=False, capture_output=True)
        subprocess.run(["ip", "link", "del", f"{self.prefix}br"], check=False, capture_output=True)


def _call(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


@contextlib.contextmanager
def two_hosts(root: Path) -> Iterator[Hosts]:
    """Two hosts on a private bridge."""
    hosts = Hosts(root)
    try:
        hosts.start()
        yield hosts
    finally:
        hosts.stop()
