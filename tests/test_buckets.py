"""Runs in buckets, through the real commands, against emulators of both stores.

Each training run is killed while it saves and is then continued. It ends with the same weights as
an undisturbed run on a local disk.
"""

import csv
import io
import json
import os
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from PIL import Image

from diffusion_jax import files, runs
from diffusion_jax.logs import run_log
from diffusion_jax.weights import restore
from tests import emulators, shared
from tests.diffusion_jax import toy
from tests.imagen_jax import commands
from tests.processes import free_port

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("stores")]
STEPS, PATIENCE = 8, 600
SMALL = (
    "--config=configs/quickstart.py",
    f"--config.steps={STEPS}",
    *commands.config_flags(
        "optimizer.warmup=2 save_every=4 log_every=2 sample_every=4 batch_size=8 unet.embed_dim=32 unet.cond_dim=32 "
        "unet.head_dim=16 optimizer.ema_widths=(0.1,) optimizer.snapshot_every=4 data.heldout=0.05 heldout.every=4 "
        "heldout.records=8"
    ),
)
SAVED = {runs.CHECKPOINTS: ("params", "ema_0.999", "ema_power-0.1", "optimizer"), restore.SNAPSHOTS: ("ema_power-0.1",)}
TWO = ("--steps=24", "--step_timeout=60")


@pytest.fixture(scope="module", params=["s3", "gs"])
def bucket(request, stores):
    return f"{request.param}://{emulators.BUCKET}/buckets"


def start(name, *arguments, **options):
    environment = os.environ | {"XLA_FLAGS": commands.XLA_FLAGS, "JAX_PLATFORMS": "cpu"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, "-m", name, *map(str, arguments)]
    return subprocess.Popen(command, cwd=commands.ROOT, env=environment, **pipes, **options)


def run(name, *arguments, code=0):
    process = start(name, *arguments)
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == code, err[-5000:]
    return out, err


def arrays(workdir, kind, item):
    step = restore.steps(workdir / kind)[-1]
    with ocp.StandardCheckpointer() as reader:
        return reader.restore(restore.absolute(workdir / kind) / str(step) / item)


def assert_alike(workdir, other, saved=SAVED):
    for kind, items in saved.items():
        assert restore.steps(workdir / kind) == restore.steps(other / kind)
        for item in items:
            mine, theirs = (arrays(folder, kind, item) for folder in (workdir, other))
            jax.tree.map(np.testing.assert_array_equal, mine, theirs)
    lines = [run_log.read_metrics(folder / run_log.METRICS) for folder in (workdir, other)]
    assert shared.exact(lines[0]) == shared.exact(lines[1])
    pictures = {path.name: path.read_bytes() for path in (other / "samples").glob("*.png")}
    assert pictures == {path.name: path.read_bytes() for path in (workdir / "samples").glob("*")}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, stores):
    workdir = tmp_path_factory.mktemp("undisturbed")
    run("imagen_jax.train", *SMALL, f"--workdir={workdir}")
    return workdir


def kill_in_save(workdir, step):
    process, saved = start("imagen_jax.train", *SMALL, f"--workdir={workdir}"), workdir
    deadline = time.monotonic() + PATIENCE
    while process.poll() is None and time.monotonic() < deadline:
        names = (saved / runs.CHECKPOINTS / str(step)).objects()
        if names and "commit_success.txt" not in names:
            process.send_signal(signal.SIGKILL)
        time.sleep(0.01)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert step not in restore.steps(workdir / runs.CHECKPOINTS)


@pytest.fixture(scope="module")
def trained(bucket):
    workdir = files.path(f"{bucket}/run")
    kill_in_save(workdir, 4)
    kill_in_save(workdir, 8)
    assert restore.steps(workdir / runs.CHECKPOINTS) == [4]
    run("imagen_jax.train", *SMALL, f"--workdir={workdir}")
    return workdir


def test_a_run_in_a_bucket_killed_while_saving_ends_with_the_same_weights(trained, undisturbed):
    assert_alike(trained, undisturbed)
    assert list(trained.glob("writer-*.json")) == []
    assert not (commands.ROOT / str(trained).split("/")[0]).exists()  # No local folder "s3:" was created.


def test_credentials_that_expire_end_a_run_with_one_line_and_exit_code_1(stores):
    workdir = files.path(f"s3://{emulators.BUCKET}/expired")
    long = ("--config.steps=1000000", "--config.keep_last=2", "--config.sample_every=0")
    process = start("imagen_jax.train", *SMALL, *long, f"--workdir={workdir}")
    deadline = time.monotonic() + PATIENCE
    while not restore.steps(workdir / runs.CHECKPOINTS):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    with emulators.locked(os.environ["AWS_ENDPOINT_URL"]):
        err = process.communicate(timeout=PATIENCE)[1]
    assert process.returncode == 1 and "Traceback" not in err, err[-5000:]
    (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
    assert "have the credentials expired?" in line or "check that the credentials" in line


def test_sample_reads_prompts_from_a_bucket_and_draws_into_one(trained, undisturbed, bucket, tmp_path):
    prompts = files.path(f"{bucket}/prompts.txt")
    files.write_whole(prompts, "a red 3\na blue 7\n")
    (tmp_path / "prompts.txt").write_bytes(prompts.read_bytes())
    out = files.path(f"{bucket}/drawn")
    run("imagen_jax.sample", f"--workdir={trained}", f"--prompts={prompts}", f"--out={out}")
    prompts_flag = f"--prompts={tmp_path / 'prompts.txt'}"
    run("imagen_jax.sample", f"--workdir={undisturbed}", prompts_flag, f"--out={tmp_path / 'drawn'}")
    # The texts in the files name the runs, which differ.
    pixels = lambda path: np.asarray(Image.open(io.BytesIO(path.read_bytes()))).tolist()
    local = {path.name: pixels(path) for path in (tmp_path / "drawn").glob("*.png")}
    assert local == {path.name: pixels(path) for path in out.glob("*.png")}
    assert len(local) == 3
    lines = (out / "metadata.jsonl").read_text().splitlines()
    assert [json.loads(line)["text"] for line in lines] == ["a red 3", "a blue 7"]


def test_scores_and_held_out_losses_of_a_run_in_a_bucket_match_a_local_run(trained, undisturbed):
    scores = ("--guidance=1", "--num_seen=1", "--num_heldout=1")
    for workdir in (trained, undisturbed):
        run("imagen_jax.evaluate", f"--workdir={workdir}", *scores)
    tables = [workdir / "evaluation" / "step_00000008" for workdir in (trained, undisturbed)]
    read = lambda path: list(csv.DictReader((path / "sweep.csv").read_text().splitlines()))
    rows = [read(path) for path in tables]
    for row in (*rows[0], *rows[1]):
        row.pop("features_share_of_time")
    assert rows[0] == rows[1] and len(rows[0]) == 1
    assert "<html" in (trained / "report.html").read_text()
    assert list((tables[0] / "tensorboard").rglob("events.out.tfevents.*"))
    losses = [run("diffusion_jax.heldout", f"--workdir={w}")[0] for w in (trained, undisturbed)]
    assert losses[0] == losses[1] and json.loads(losses[0].splitlines()[0])["step"] == STEPS


def test_weights_are_converted_exported_and_adapted_in_buckets(bucket, tmp_path):
    """Export to NeMo's names, convert back, and train LoRA factors on weights in a bucket."""
    tiny = [
        *SMALL,
        *commands.config_flags(
            "unet.patch=1 steps=1 optimizer.ema_widths=() optimizer.schedule=constant heldout.every=0"
        ),
    ]
    run("imagen_jax.train", *tiny, f"--workdir={bucket}/tiny")
    files_of = [f"{bucket}/weights.safetensors", tmp_path / "weights.safetensors"]
    run("imagen_jax.weights", "export", f"--from={bucket}/tiny", f"--to={files_of[0]}")
    converted = f"--from={files_of[0]}", *tiny, f"--to={bucket}/converted"
    run("imagen_jax.weights", "convert", *converted)
    run("imagen_jax.weights", "export", f"--from={bucket}/converted", f"--to={files_of[1]}")
    assert files.path(files_of[0]).read_bytes() == files_of[1].read_bytes()
    factors = "--config.lora.rank=2", f"--config.unet.weights={bucket}/tiny"
    run("imagen_jax.train", *tiny, *factors, f"--workdir={bucket}/lora")
    run("diffusion_jax.pack", f"--workdir={bucket}/lora", f"--out={bucket}/small")
    drawn = []
    for name in ("lora", "small"):
        out = tmp_path / name
        run("imagen_jax.sample", f"--workdir={bucket}/{name}", "--prompt=a red six", f"--out={out}")
        drawn.append(np.asarray(Image.open(out / "seed_000000.png"), int))
    assert np.abs(drawn[0] - drawn[1]).max() <= 2


def together(workdir, *more):
    port = free_port()
    group = [
        start(
            "tests.diffusion_jax.toy_train",
            f"--workdir={workdir}",
            *TWO,
            *more,
            f"--coordinator=127.0.0.1:{port}",
            "--num_processes=2",
            f"--process_id={number}",
        )
        for number in (0, 1)
    ]
    errors = [process.communicate(timeout=PATIENCE)[1] for process in group]
    return [process.returncode for process in group], "\n".join(errors)


def test_two_processes_in_a_bucket_survive_a_kill_in_every_phase(bucket, tmp_path):
    which = int(bucket.startswith("s3"))
    workdir, other = files.path(f"{bucket}/two"), tmp_path
    for phase in ("start", "compile", "step", "save", "evaluation"):
        codes, errors = together(workdir, f"--kill={phase}", f"--killed={which}")
        assert codes[which] == -9 and codes[1 - which] not in (0, 2, 143), errors
    for folder in (workdir, other):
        codes, errors = together(folder)
        assert codes == [0, 0], errors
    shapes = jax.eval_shape(toy.init, jax.random.key(0))
    for name in ("raw", "0.1", "0.08"):
        mine, theirs = (restore.load_params(folder / runs.CHECKPOINTS, shapes, name, 24) for folder in (workdir, other))
        jax.tree.map(np.testing.assert_array_equal, mine, theirs)
    lines = [run_log.read_metrics(folder / run_log.METRICS) for folder in (workdir, other)]
    assert [x["loss"] for x in lines[0]] == [x["loss"] for x in lines[1]] and len(lines[0]) == 24
