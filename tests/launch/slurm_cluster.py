"""A real Slurm on this machine: munge, a controller and two virtual nodes with eight GPUs by name.

Of Debian's slurmctld, slurmd, slurm-client and munge, as root, with all of its files in one folder.
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

NODES = ("n1", "n2")
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol", "munged")
# A job that is queued again starts once its last credential has expired: 2 minutes by default.
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
    """A running cluster; what is submitted starts in `folder`."""

    def __init__(self, folder: pathlib.Path) -> None:
        """Its files are in this folder."""
        self.folder = folder
        self.daemons: dict[str, subprocess.Popen] = {}
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}

    def start(self, name: str, *command: str) -> None:
        """Starts a daemon, or a node's again, which writes to NAME.out."""
        with (self.folder / f"{name}.out").open("a") as log:
            self.daemons[name] = subprocess.Popen(
                command, env=self.environment, stdout=log, stderr=log, cwd=self.folder
            )

    def lose(self, node: str) -> None:
        """Kills a node: its daemon, and all that jobs run on it, at once."""
        self.daemons[node].kill()
        named = f"SLURMD_NODENAME={node}".encode()
        for process in pathlib.Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if named in (process / "environ").read_bytes().split(bytes(1)):
                    parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
                    for number in (parent, int(process.name)):
                        if "slurmd" not in pathlib.Path(f"/proc/{number}/comm").read_text():
                            os.kill(number, signal.SIGKILL)
        self.daemons[node].wait()

    def run(self, *command: str, text: str = "") -> str:
        """What a program of Slurm's prints."""
        ended = subprocess.run(
            command, input=text, text=True, capture_output=True, cwd=self.folder,
            env=self.environment, timeout=60, check=False,
        )  # fmt: skip
        assert ended.returncode == 0, (command, ended.stderr)
        return ended.stdout

    def submit(self, script: str, *options: str) -> str:
        """The number of a submitted job."""
        return self.run("sbatch", "--parsable", *options, text=script).strip()

    def job(self, number: str) -> dict[str, str]:
        """What scontrol says of a job: JobState, Restarts, ExitCode, ..."""
        words = self.run("scontrol", "show", "job", "--oneliner", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait(self, number: str, *states: str, restarts: int = 0, seconds: float = 240) -> dict:
        """The job, once it is in one of these states and was started again that often."""
        deadline, job = time.monotonic() + seconds, {}
        while time.monotonic() < deadline:
            job = self.job(number)
            if job["JobState"] in states and int(job["Restarts"]) >= restarts:
                return job
            time.sleep(0.3)
        raise AssertionError((job, (self.folder / "slurmctld.log").read_text()[-3000:]))


@contextlib.contextmanager
def started(folder: pathlib.Path) -> Iterator[Cluster]:
    """The cluster, which ends with the block; skips the test where there is none to start."""
    if missing := [name for name in PROGRAMS if not shutil.which(name)]:
        pytest.skip(f"no {missing[0]} here: apt-get install slurmctld slurmd slurm-client munge")
    if os.geteuid():
        pytest.skip("slurmd needs root")
    with contextlib.ExitStack() as sockets:
        bound = [sockets.enter_context(socket.socket()) for _ in range(3)]
        for one in bound:
            one.bind(("127.0.0.1", 0))
        ports = [one.getsockname()[1] for one in bound]
    host = socket.gethostname()
    (folder / "slurm.conf").write_text(CONFIG.format(folder=folder, host=host, ports=ports))
    (folder / "gres.conf").write_text(f"NodeName=n[1-2] Name=gpu File={folder}/gpu[0-7]\n")
    for number in range(8):  # Slurm asks for files, and for no devices.
        (folder / f"gpu{number}").touch()
    (folder / "state").mkdir()
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o600)
    folder.chmod(0o755)
    cluster = Cluster(folder)
    munge = [f"--{name}={folder}/munge.{name.removesuffix('-file')}"
             for name in ("key-file", "pid-file", "log-file", "seed-file", "socket")]  # fmt: skip
    commands = {"munged": ("munged", "--foreground", "--force", *munge),
                "slurmctld": ("slurmctld", "-D"),
                **{node: ("slurmd", "-D", "-N", node) for node in NODES}}  # fmt: skip
    try:
        for name, command in commands.items():
            cluster.start(name, *command)
            time.sleep(1)
        deadline = time.monotonic() + 60
        while cluster.run("sinfo", "-h", "-o", "%D", "-t", "idle", "-p", "urgent").strip() != "2":
            assert time.monotonic() < deadline, (folder / "slurmctld.log").read_text()
            time.sleep(0.3)
        yield cluster
    finally:
        for process in reversed(cluster.daemons.values()):
            process.terminate()
            process.wait()
