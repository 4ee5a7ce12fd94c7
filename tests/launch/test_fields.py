"""Fields of a job file must not be able to change other parts of a script or manifest."""

import pytest

from launch import fields


@pytest.mark.parametrize(
    ("job", "message"),
    [
        ({"slurm": {"partition": "gpu\n#SBATCH"}}, "job.slurm.partition holds 'gpu\\n#SBATCH': remove line breaks"),
        ({"slurm": {"partition": "gpu --uid=0"}}, "partition is 'gpu --uid=0': use letters, digits and . , _ -"),
        ({"slurm": {"account": "me #"}}, "job.slurm.account is 'me #': use letters, digits and"),
        ({"slurm": {"time": "1:00:00\rx"}}, "job.slurm.time holds '1:00:00\\rx': remove line"),
        ({"slurm": {"options": ("-v", "-v\n")}}, "job.slurm.options holds '-v\\n': remove line"),
        ({"secrets": ("A", "X}'\ntouch pwned")}, 'job.secrets holds "X}\'\\ntouch pwned": remove'),
        ({"secrets": ("A:-$(id)",)}, "job.secrets is 'A:-$(id)': write names of environment var"),
        ({"gke": {"namespace": "a b"}}, "job.gke.namespace is 'a b': use lower-case letters, dig"),
        ({"workdir": "/x\x00"}, "job.workdir holds '/x\\x00': remove line breaks and control"),
        ({"sweep": (("seed=1\u2028",),)}, "job.sweep holds 'seed=1\\u2028': remove line breaks"),
    ],
)
def test_a_field_that_would_change_other_lines_of_the_script_is_an_error(job, message):
    with pytest.raises(ValueError) as raised:
        fields.check(job)
    assert message in str(raised.value)


def test_setup_and_patch_can_have_several_lines_and_overrides_any_character():
    slurm = {"setup": "module load x\nsource y", "partition": "gpu,a100-80", "account": ""}
    gke = {"patch": "spec:\n  suspend: true\n", "queue": "", "namespace": "a.b-c"}
    words = {"name": "a-1", "secrets": ("HF_TOKEN",), "overrides": ("prompts=('größe $(A) \"b\"',)",)}
    fields.check({**words, "slurm": slurm, "gke": gke})
