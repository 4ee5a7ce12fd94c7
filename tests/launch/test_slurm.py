"""Scripts for sbatch, run by bash with stand-ins for Slurm's commands."""

import os
import re
import subprocess
import time

import pytest

from diffusion_jax import exits
from launch import accelerators, slurm
from launch.job import Job, JobRun
from tests.launch.launching import BASE, SCALING, SWEEP, flags, printed, refused

X = flags("workdir=/x accelerator=h100:8")

# Each stand-in records its arguments. srun runs the command until scancel signals it.
STAND_INS = {
    "srun": 'echo "srun $*" >> log; trap "exit 143" TERM; echo $$ > pid; $WORK & wait; exit $CODE',
    "scancel": 'echo "scancel $*" >> log; kill -TERM "$(cat pid)"',
    "scontrol": 'echo "scontrol $*" >> log',
}


@pytest.fixture(scope="module")
def rendered():
    fields = flags("workdir=/shared/runs accelerator=h100:16 image=registry#name:tag slurm.partition=gpu")
    words = ("--job.overrides=(\"prompts=('a b',)\",)", "--job.slurm.setup=export READY=1")
    return printed("slurm", SWEEP, *fields, *words, "--job.secrets=('HF_TOKEN',)")


@pytest.fixture(scope="module")
def script(rendered):
    return rendered[0].split("#!/bin/bash\n")[2]


def test_the_script_starts_one_process_per_node_with_all_gpus(script):
    options = dict(re.findall("^#SBATCH --(.*?)=(.*)$", script, re.MULTILINE))
    assert (options["nodes"], options["ntasks-per-node"], options["gpus-per-node"]) == ("2", "1", "8")
    assert (options["partition"], options["signal"]) == ("gpu", "B:USR1@300")
    assert "account" not in options and "#SBATCH --requeue\n" in script
    assert "export JAX_LOCAL_DEVICE_IDS=0,1,2,3,4,5,6,7\n" in script


def run(script, folder, *, work="true", code=0, signal=None, **environment):
    """Run a script, and return its exit code and the stand-ins' calls. /shared is in the folder."""
    script = script.replace("/shared/", f"{folder}/shared/")
    for name, content in STAND_INS.items():
        path = folder / name
        path.write_text(f"#!/bin/bash\n{content}\n")
        path.chmod(0o755)
    stood_in = {"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "WORK": work, "CODE": str(code)}
    environment = {**os.environ, **stood_in, **environment}
    process = subprocess.Popen(["bash", "-c", script], cwd=folder, env=environment)
    if signal:
        deadline, pid = time.monotonic() + 120, folder / "pid"
        while not (pid.exists() and pid.read_text()) and time.monotonic() < deadline:
            time.sleep(0.01)
        process.send_signal(signal)
    ended = process.wait(timeout=300)
    calls = folder / "log"
    return ended, calls.read_text().splitlines() if calls.exists() else []


def test_srun_receives_the_complete_command(script, tmp_path):
    code, calls = run(script, tmp_path, HF_TOKEN="x")
    workdir = tmp_path / "shared/runs/1"
    container = f"--container-image registry#name:tag --container-mounts {workdir}:{workdir}"
    train = "python -m imagen_jax.train --config=configs/quickstart.py --config.prompts=('a b',) --config.seed=1"
    assert (code, calls) == (0, [f"srun --kill-on-bad-exit=0 --wait=60 {container} {train} --workdir={workdir}"])


def test_at_the_time_limit_the_run_is_signalled_to_save_and_requeued(script, tmp_path):
    code, calls = run(script, tmp_path, work="sleep 30", signal=10, HF_TOKEN="x")
    assert code == 143
    assert calls[1:] == ["scancel --signal=TERM 7.0", "scontrol requeue 7"]


def test_a_run_that_slurm_preempts_is_requeued(script, tmp_path):
    code, calls = run(script, tmp_path, code=143, HF_TOKEN="x")
    assert (code, calls[1:]) == (143, ["scontrol requeue 7"])


def test_a_run_with_bad_input_is_not_requeued(script, tmp_path):
    code, calls = run(script, tmp_path, code=2, HF_TOKEN="x")
    assert (code, len(calls)) == (2, 1)


def test_a_crashed_run_is_requeued_up_to_job_restarts_times(tmp_path):
    text, _ = printed("slurm", BASE, f"--job.workdir={tmp_path}/a run", *flags("accelerator=h100:8 restarts=2"))
    for times, ended in enumerate([1, 134, exits.BUSY], start=1):
        code, calls = run(text, tmp_path, code=ended)
        assert code == ended
        assert calls.count("scontrol requeue 7") == min(times, 2)
    assert (tmp_path / "a run" / "crashes-7").read_text() == f"1\n134\n{exits.BUSY}\n"


JOB = Job("run", "imagen_jax.train", "", (), (), (), "h100:8", "", "/x", ())
SLURM = slurm.Slurm("", "", "24:00:00", 300, "")


def test_three_preemptions_without_a_new_checkpoint_end_a_run(tmp_path):
    run_of = JobRun("run", ("imagen_jax.train",), str(tmp_path / "a run"), ())
    text = slurm.render(JOB, SLURM, accelerators.parse("h100:8"), run_of)
    ends, calls = [], []
    for start, code in enumerate([143, 143, 1, 143, 143, 143, 143, 143, 143]):
        if start == 5:
            (tmp_path / "a run" / "checkpoints" / "50").mkdir(parents=True)
        ended, calls = run(text, tmp_path, code=code)
        ends.append((ended, calls.count("scontrol requeue 7")))
    assert ends == [(143, 1), (143, 2), (1, 3), (143, 4), (143, 5), (143, 6), (143, 7), (1, 7), (1, 7)]
    # The last start ended before srun.
    assert sum(line.startswith("srun") for line in calls) == 8


def test_a_task_of_a_job_array_exits_with_2(script, tmp_path):
    assert run(script, tmp_path, HF_TOKEN="x", SLURM_ARRAY_TASK_ID="0") == (2, [])


@pytest.mark.parametrize(
    ("time", "seconds", "reading"),
    [
        ("5", 300, "job.slurm.time=5 means 0 h 5 min 0 s"),
        ("5:00", 300, "job.slurm.time=5:00 means 0 h 5 min 0 s"),
        ("5:00:01", 18001, "job.slurm.time=5:00:01 means 5 h 0 min 1 s"),
        ("2-12", 216000, "job.slurm.time=2-12 means 60 h 0 min 0 s"),
        ("2-12:30", 217800, "job.slurm.time=2-12:30 means 60 h 30 min 0 s"),
        ("1-0:0:9", 86409, "job.slurm.time=1-0:0:9 means 24 h 0 min 9 s"),
        ("", float("inf"), "job.slurm.time sets no limit; the partition may have one"),
        ("0", float("inf"), "job.slurm.time sets no limit; the partition may have one"),
    ],
)
def test_time_limits_are_parsed_like_sbatch(time, seconds, reading):
    assert (slurm.seconds(time), slurm.reading(time)) == (seconds, reading)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"time": "2:00"}, "job.slurm.time=2:00 means 0 h 2 min 0 s, which is not longer than job."),
        ({"time": "5:00"}, "write hours as 5:00:00, or choose a smaller job.slurm.grace"),
        ({"time": "1h"}, "job.slurm.time is '1h': write HOURS:MINUTES:SECONDS, such as 24:00:00"),
        ({"options": ("exclusive",)}, "job.slurm.options holds 'exclusive': write --NAME=VALUE"),
        ({"options": ("--array=0-1",)}, "use job.sweep, which gives each run its own"),
        ({"options": ("-Q -a 0-1",)}, "holds '-Q -a 0-1': all tasks would share one workdir"),
        ({"options": ("--time=2:00",)}, "holds '--time=2:00': set job.slurm.time instead"),
    ],
)
def test_settings_that_slurm_would_misread_are_errors(changes, message):
    with pytest.raises(ValueError) as raised:
        slurm.check(JOB, SLURM._replace(**changes), accelerators.parse("h100:8"))
    assert message in str(raised.value)


def test_a_grace_period_just_shorter_than_the_time_limit_is_accepted():
    allowed = SLURM._replace(time="5:01", options=("--time-min=2:00", "--comment=array"))
    slurm.check(JOB, allowed, accelerators.parse("h100:8"))


def test_a_mounted_folder_with_a_colon_in_its_name_is_an_error():
    job = JOB._replace(image="i", mounts=("/etc:/x",))
    run_of, target = JobRun("run", ("x.train",), "/x", ()), accelerators.parse("h100:8")
    with pytest.raises(ValueError, match=r"^/etc:/x cannot be mounted: its name contains ':' or"):
        slurm.render(job, SLURM, target, run_of)


def test_containers_mount_every_path_of_config_and_flags(tmp_path):
    weights = tmp_path / "inception.safetensors"
    weights.touch()
    data = "'data.path=/data/laion/{000..100}.tar','evaluation.reference=/data/coco.npz'"
    image = flags(f"image=registry#name:tag mounts=('/home/me',) overrides=({data},'evaluation.inception={weights}')")
    text, _ = printed("slurm", BASE, *X, *image)
    mounts = text.split("--container-mounts ")[1].split()[0].split(",")
    assert mounts == [f"{folder}:{folder}" for folder in ("/x", *sorted(["/data", "/home/me", str(tmp_path)]))]


def test_env_and_slurm_options_are_in_the_script():
    more = ("--job.env=('XLA_FLAGS=--a=1 --b=2', 'NCCL_DEBUG=INFO')", "--job.slurm.options=('--reservation=ours',)")
    text, notes = printed("slurm", BASE, *X, *more)
    header, body = text.split("\n\n", 1)
    assert "#SBATCH --reservation=ours" in header
    assert notes.splitlines()[-1] == "job.slurm.time=24:00:00 means 24 h 0 min 0 s"
    assert "export XLA_FLAGS='--a=1 --b=2'\nexport NCCL_DEBUG=INFO\n" in body
    assert "export JAX_COMPILATION_CACHE_DIR=/x/compiled\n" in body
    assert "export XLA_CLIENT_MEM_FRACTION=0.9\n" in body


def test_an_unset_secret_ends_the_script_before_srun(script, tmp_path):
    code, calls = run(script, tmp_path)
    assert code != 0 and calls == []


def test_a_sweep_gives_one_script_per_run(rendered):
    text, table = rendered
    assert text.count("#!/bin/bash\n") == 3
    assert table.splitlines()[2] == "quickstart-2  /shared/runs/2  seed=2"


def test_slurm_can_run_benchmarks():
    text, _ = printed("slurm", SCALING, "--job.workdir=/x", "--job.flags=('--nodes=1,8',)")
    assert "python -m benchmarks.scaling --config=configs/base64_500m.py --config.unet.attention_impl=cudnn " in text
    assert " --config.batch_size=4096 --nodes=1,8 --workdir=/x" in text


def test_with_a_workdir_in_a_bucket_crashes_are_counted_beside_the_log():
    text, _ = printed("slurm", BASE, *flags("workdir=s3://b/x accelerator=h100:8 image=IMAGE"))
    assert "--workdir=s3://b/x" in text and "container-mounts" not in text
    assert 'crashes=base64-500m-crashes-"$SLURM_JOB_ID"' in text


def test_a_config_can_have_an_argument():
    mlperf = flags("command=sd_jax.mlperf config=configs/sd2_mlperf.py:2048 flags=('--mode=train',)")
    text, _ = printed("slurm", BASE, *X, *mlperf)
    assert "sd_jax.mlperf --config=configs/sd2_mlperf.py:2048 --mode=train --workdir=/x" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--job.accelerator=v5p:2x2x2",), "choose GPUs for Slurm, such as"),
        (("--job.slurm.partition=a\nb",), "job.slurm.partition holds 'a\\nb': remove line breaks"),
        (("--job.env=('A B=1',)",), "job.env holds 'A B=1': write NAME=VALUE"),
        (("--job.workdir=runs/x",), "of a folder that all nodes can"),
        (flags("workdir=gs://b/x command=benchmarks.scaling config="), "of a folder that all nodes"),
    ],
)
def test_invalid_slurm_jobs_are_errors_that_say_how_to_fix_them(arguments, message):
    assert message in refused("slurm", BASE, *X, *arguments)
