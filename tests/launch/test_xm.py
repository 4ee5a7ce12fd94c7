"""Commands for XManager, and jobs that it cannot run."""

import pytest

from tests.launch.launching import SCALING, SWEEP, printed, refused

CLOUD = ("--executor=vertex", "--job.image=registry/name:tag", "--job.workdir=gs://bucket/x")


def test_a_local_run_is_a_python_command():
    text, table = printed("xm", SWEEP, "--job.workdir=runs/sweep")
    assert text.splitlines() == [
        f"python -m imagen_jax.train --config=configs/quickstart.py --config.seed={i} --workdir=runs/sweep/{i}"
        for i in range(3)
    ]
    assert table.splitlines()[2] == "quickstart-2  runs/sweep/2  seed=2"


def test_xm_can_run_benchmarks():
    text, _ = printed(
        "xm",
        SCALING,
        "--job.command=benchmarks.fid",
        "--job.config=",
        "--job.overrides=()",
        "--job.flags=('--rounds=3',)",
        "--job.workdir=runs/fid",
    )
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
        (
            (*CLOUD, "--job.accelerator=a100:1", "--job.env=('A=$(B)',)"),
            "job.sweep or job.env) holds '$(', which Vertex expands as a variable: use",
        ),
        (("--job.workdir=gs://bucket/x",), "--executor=local needs a folder on this machine"),
        (("--job.workdir=x", "--job.secrets=('A',)"), "not supported by XManager"),
    ],
)
def test_invalid_xm_jobs_are_errors_that_say_how_to_fix_them(arguments, message):
    assert message in refused("xm", SWEEP, *arguments)
