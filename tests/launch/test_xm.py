"""Commands for XManager, and jobs that it cannot run."""

import pytest

from tests.launch.launching import SCALING, SWEEP, flags, printed, refused

CLOUD = ("--executor=vertex", *flags("image=registry/name:tag workdir=gs://bucket/x"))


def test_a_local_run_is_a_python_command():
    text, table = printed("xm", SWEEP, "--job.workdir=runs/sweep")
    train = "python -m imagen_jax.train --config=configs/quickstart.py"
    assert text.splitlines() == [f"{train} --config.seed={i} --workdir=runs/sweep/{i}" for i in range(3)]
    assert table.splitlines()[2] == "quickstart-2  runs/sweep/2  seed=2"


def test_xm_can_run_benchmarks():
    fid = flags("command=benchmarks.fid config= overrides=() flags=('--rounds=3',) workdir=runs/fid")
    text, _ = printed("xm", SCALING, *fid)
    assert text == "python -m benchmarks.fid --rounds=3 --workdir=runs/fid\n"


def test_on_vertex_the_workdir_is_in_the_bucket():
    text, _ = printed("xm", SWEEP, *CLOUD, "--job.accelerator=a100:8")
    assert text.splitlines()[1].endswith("--config.seed=1 --workdir=gs://bucket/x/1")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((*CLOUD, "--job.accelerator=h100:8"), "XManager supports only a100:1 to a100:8;"),
        ((*CLOUD, "--job.accelerator=a100:16"), "XManager supports only a100:1 to a100:8;"),
        ((*CLOUD, "--job.accelerator=a100:1", "--job.image="), "job.image is empty"),
        ((*CLOUD, *flags("accelerator=a100:1 env=('A=$(B)',)")), "holds '$(', which Vertex expands as a variable: use"),
        (("--job.workdir=gs://bucket/x",), "--executor=local needs a folder on this machine"),
        (("--job.workdir=x", "--job.secrets=('A',)"), "not supported by XManager"),
    ],
)
def test_invalid_xm_jobs_are_errors_that_say_how_to_fix_them(arguments, message):
    assert message in refused("xm", SWEEP, *arguments)
