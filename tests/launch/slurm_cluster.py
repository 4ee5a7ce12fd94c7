"""A real Slurm on this machine: munge, a controller, and two virtual nodes with eight fake GPUs.

Requires root and Debian's slurmctld, slurmd, slurm-client and munge. All files are in one folder.
"""

import contextlib
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator

import pytest

from tests import processes

NODES = ("n1", "n2")
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol", "munged")
# A requeued job starts after its previous credential has expired: 2 minutes by default.
CONFIG = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdDebug=debug
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
SlurmdParameters=config_overrides
SlurmdTimeout=20
KillWait=20
ReturnToService=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4 Gres=gpu:8
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4 Gres=gpu:8
PartitionName=graceful Nodes=n1,n2 Default=YES PriorityTier=1 GraceTime=60
PartitionName=abrupt Nodes=n1,n2 PriorityTier=1 GraceTime=0
PartitionName=urgent Nodes=n1,n2 PriorityTier=9 PreemptMode=OFF
"""


class Cluster:
    """A running cluster. Submitted jobs start in `folder`."""

    def __init__(self, folder: pathlib.Path) -> None:
        """Store the cluster's files in this folder."""
        self.folder = folder
        self.daemons: dict[str, subprocess.Popen] = {}
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}

    def start(self, name: str, *command: str) -> None:
        """Start a daemon, or restart that of a node. It writes to NAME.out."""
        with (self.folder / f"{name}.out").open("a") as log:
            self.daemons[name] = subprocess.Popen(
                command, env=self.environment, stdout=log, stderr=log, cwd=self.folder
            )

    def lose(self, node: str) -> None:
        """Kill a node: its daemon and all processes of its jobs, at once."""
        self.daemons[node].kill()
        # All are stopped before any is killed, so that none sees another die. Otherwise, the
        # script would count a crash, and srun's child would let the controller kill the step,
        # which could hit the job after it was requeued.
        jobs = _of_jobs(node)
        for sign in (signal.SIGSTOP, signal.SIGKILL):
            for number in jobs:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(number, sign)
        self.daemons[node].wait()

    def ask(self, *command: str, text: str = "") -> subprocess.CompletedProcess[str]:
        """Run one of Slurm's programs, and return the completed process."""
        where = {"cwd": self.folder, "env": self.environment}
        return subprocess.run(command, input=text, text=True, capture_output=True, timeout=120, check=False, **where)

    def run(self, *command: str, text: str = "") -> str:
        """Run one of Slurm's programs, and return its output."""
        ended = self.ask(*command, text=text)
        assert ended.returncode == 0, (command, ended.stderr)
        return ended.stdout

    def submit(self, script: str, *options: str) -> str:
        """Submit a job, and return its number."""
        return self.run("sbatch", "--parsable", *options, text=script).strip()

    def job(self, number: str) -> dict[str, str]:
        """Return scontrol's description of a job: JobState, Restarts, ExitCode, ..."""
        words = self.run("scontrol", "show", "job", "--oneliner", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait(self, number: str, *states: str, restarts: int = 0, seconds: float = 240) -> dict:
        """Wait until a job has one of these states and number of restarts, and return it."""
        deadline, job = time.monotonic() + seconds, {}
        while time.monotonic() < deadline:
            job = self.job(number)
            if job["JobState"] in states and int(job["Restarts"]) >= restarts:
                return job
            time.sleep(0.3)
        logs = [pathlib.Path(job["StdOut"]), *sorted(self.folder.glob("slurm*.log"))]
        ends = [f"{log}:\n{log.read_text()[-4000:]}" for log in logs if log.exists()]
        raise AssertionError("\n\n".join([str(job), *ends]))


def _of_jobs(node: str) -> set[int]:
    """Return the processes of jobs on a node, and Slurm's processes that started them."""
    named, numbers = f"SLURMD_NODENAME={node}".encode(), set()
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if named in (process / "environ").read_bytes().split(bytes(1)):
                parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
                numbers |= {int(process.name), *[parent] * (_name(parent) == "slurmstepd")}
    return numbers


def _name(number: int) -> str:
    return pathlib.Path(f"/proc/{number}/comm").read_text().strip()


@contextlib.contextmanager
def started(folder: pathlib.Path) -> Iterator[Cluster]:
    """Start a cluster for the duration of the block. Skips the test if Slurm is missing."""
    if missing := [name for name in PROGRAMS if not shutil.which(name)]:
        pytest.skip(f"no {missing[0]} here: apt-get install slurmctld slurmd slurm-client munge")
    if os.geteuid():
        pytest.skip("slurmd needs root")
    ports = [processes.free_port() for _ in range(3)]
    host = socket.gethostname()
    (folder / "slurm.conf").write_text(CONFIG.format(folder=folder, host=host, ports=ports))
    (folder / "gres.conf").write_text(f"NodeName=n[1-2] Name=gpu File={folder}/gpu[0-7]\n")
    for number in range(8):  # Slurm only requires the files to exist.
        (folder / f"gpu{number}").touch()
    (folder / "state").mkdir()
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o600)
    folder.chmod(0o755)
    cluster = Cluster(folder)
    munge = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "log", "seed")]
    munge.append(f"--socket={folder}/munge.socket")
    commands = {
        "munged": ("munged", "--foreground", "--force", *munge),
        "slurmctld": ("slurmctld", "-D"),
        **{node: ("slurmd", "-D", "-N", node) for node in NODES},
    }
    try:
        idle = ("sinfo", "-h", "-o", "%D", "-t", "idle", "-p", "urgent")
        ready = {
            "munged": (folder / "munge.socket").exists,
            "slurmctld": lambda: cluster.ask("scontrol", "ping").returncode == 0,
            "n2": lambda: cluster.ask(*idle).stdout.strip() == "2",
        }
        for name, command in commands.items():
            cluster.start(name, *command)
            deadline = time.monotonic() + 120
            while name in ready and not ready[name]():
                logs = sorted(folder.glob("*.out")) + sorted(folder.glob("slurm*.log"))
                assert time.monotonic() < deadline, [log.read_text()[-4000:] for log in logs]
                time.sleep(0.1)
        yield cluster
    finally:
        for process in reversed(cluster.daemons.values()):
            process.terminate()
            process.wait()
