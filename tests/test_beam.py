"""Commands on Apache Beam's direct runner with two workers write the same files as one process.

Skipped without the extra [beam].
"""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from diffusion_jax.examples.digits import rendering as digits
from tests.diffusion_jax.text import tiny_weights
from tests.sd_jax import test_prepare, tiny

ROOT = pathlib.Path(__file__).parents[1]
BEAM = ("--engine=beam", "--beam_options=--direct_num_workers=2 --direct_running_mode=multi_processing")
PATIENCE = 300  # Seconds, on a busy machine.
CONFIG = """
from tests.sd_jax import tiny

def get_config():
    return tiny.config({vae!r}, data__source="folder", data__path={data!r})
"""


@pytest.fixture
def start(tmp_path):
    """start(module, *arguments) -> a running command in its own process group."""
    pytest.importorskip("apache_beam")
    path = os.pathsep.join(map(str, (ROOT / "tests/slow_writers", ROOT)))
    cache = {"JAX_COMPILATION_CACHE_DIR": str(ROOT / ".jax_cache")}
    more = cache | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}
    started = []

    def start(module, *arguments):
        line = [sys.executable, "-m", module, *map(str, arguments)]
        with (tmp_path / "out").open("wb") as out, (tmp_path / "log").open("ab") as log:
            started.append(
                subprocess.Popen(line, cwd=ROOT, env=os.environ | more, stdout=out, stderr=log, start_new_session=True)
            )
        return started[-1]

    yield start
    for process in started:
        kill_all(process)


def kill_all(process):
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def end(process, tmp_path):
    assert process.wait(PATIENCE) == 0, (tmp_path / "log").read_text()
    return (tmp_path / "out").read_text()


def wait_for(folder, pattern, number, process):
    deadline = time.monotonic() + PATIENCE
    while len(list(folder.glob(pattern))) < number:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.001)


def workers(pid):
    """Return the ids of all child processes (Beam's workers), grandchildren last."""
    numbers = []
    with contextlib.suppress(FileNotFoundError):  # A child has ended meanwhile.
        for listed in pathlib.Path(f"/proc/{pid}/task").glob("*/children"):
            for child in map(int, listed.read_text().split()):
                line = pathlib.Path(f"/proc/{child}/cmdline").read_bytes()
                numbers += workers(child) or [child] * (b"sdk_worker_main" in line)
    return numbers


def contents(folder):
    """Return the content of all files, without temporary files of killed writers."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.suffix != ".tmp")
    return {path.relative_to(folder): path.read_bytes() for path in files}


def killed_and_not(start, tmp_path, line, out, shards, number):
    """Run a command on Beam: first kill all of it, then run it again and kill one worker."""
    begun = start(*line, *BEAM)
    wait_for(out, shards, 1, begun)
    kill_all(begun)
    done = len(list(out.glob(shards)))
    assert 1 <= done < number - 2
    again = start(*line, *BEAM)
    wait_for(out, shards, done + 1, again)
    os.kill(workers(again.pid)[0], signal.SIGKILL)
    assert len(list(out.glob(shards))) < number
    return end(again, tmp_path)


@pytest.mark.slow
def test_beam_writes_the_same_moments_after_kills(start, tmp_path):
    digits.write_examples(tmp_path / "data", 60, size=tiny.SIZE)
    vae = tiny.write_vae(tmp_path / "vae.safetensors")
    (tmp_path / "config.py").write_text(CONFIG.format(vae=str(vae), data=str(tmp_path / "data")))
    line = "sd_jax.precache", f"--config={tmp_path}/config.py", "--shard_images=1", "--batch=1"
    end(start(*line, f"--out={tmp_path}/alone"), tmp_path)
    out = tmp_path / "beam"
    killed_and_not(start, tmp_path, [*line, f"--out={out}"], out, "*[0-9a-f].safetensors", 60)
    assert contents(out) == contents(tmp_path / "alone")


@pytest.mark.slow
def test_beam_writes_the_same_statistics_after_kills(start, tmp_path):
    digits.write_examples(tmp_path / "data", 60, size=16)
    clip = tiny_weights.clip_folder(tmp_path / "clip", "open_clip")
    line = ["diffusion_jax.metrics", "stats", f"--images={tmp_path}/data", f"--clip={clip}"]
    line += ["--shard_images=1", "--batch_size=1"]
    end(start(*line, f"--out={tmp_path}/alone.npz"), tmp_path)
    out = tmp_path / "beam.npz"
    killed_and_not(start, tmp_path, [*line, f"--out={out}"], tmp_path, ".beam.npz.*.tmp/*.npz", 60)
    assert out.read_bytes() == (tmp_path / "alone.npz").read_bytes()
    assert not list(tmp_path.glob(".*"))


@pytest.mark.slow
def test_beam_writes_the_same_laion_tables(start, tmp_path):
    for number in range(4):
        test_prepare.metadata(tmp_path / "in" / f"{number}.parquet", 500 + number)
    line = "sd_jax.prepare", "laion", f"--metadata={tmp_path}/in"
    printed = [
        end(start(*line, f"--out={tmp_path}/{name}", *more), tmp_path).replace(str(tmp_path / name), "OUT")
        for name, more in (("alone", ()), ("beam", BEAM))
    ]
    assert printed[0] == printed[1] and "of 2,006 rows, those whose LICENSE is not" in printed[0]
    assert contents(tmp_path / "beam") == contents(tmp_path / "alone")
