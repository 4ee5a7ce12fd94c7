"""The command of the weights: its exit codes, its line of JSON, and what it converts."""

import json

import numpy as np
import pytest

from sd_jax.weights import checkpoints
from tests.imagen_jax import commands
from tests.sd_jax.cases import TINY, unet_case, unet_weights
from tests.sd_jax.weights.test_checkpoints import WIDE


def run(*arguments):
    return commands.run("sd_jax.weights", *arguments, devices=1)


@pytest.fixture(scope="module")
def case():
    return unet_case(TINY | {"channel_mult": [1]})


def run_verify(case, tmp_path):
    np.savez(tmp_path / "case.npz", **case)
    return run("verify", str(tmp_path / "case.npz"))


def test_verify_prints_one_line_of_json(case, tmp_path):
    ended = run_verify(case, tmp_path)
    assert ended.code == 0 and ended.out.count("\n") == 1, ended.err
    errors = json.loads(ended.out)
    assert list(errors) == [
        "y", "y_frac", "max_relative_error", "grad_max_relative_error", "parameters",
    ]  # fmt: skip
    assert errors["max_relative_error"] < 5e-6 and errors["grad_max_relative_error"] is None
    assert errors["parameters"] == sum(a.size for n, a in case.items() if n.startswith("w/"))


def test_an_output_that_is_not_finite_is_null_and_exits_with_1(case, tmp_path):
    ended = run_verify(case | {"w/out.2.bias": np.full(4, np.nan, np.float32)}, tmp_path)
    assert ended.code == 1 and json.loads(ended.out)["y"] is None
    assert "not finite: y, y_frac, max_relative_error" in ended.err


def test_a_case_that_cannot_be_read_exits_with_2(case, tmp_path):
    ended = run_verify(case | {"__meta__": np.array('{"config": {}}')}, tmp_path)
    message = "the LDM UNet's config lacks model_channels, attention_resolutions: it holds nothing"
    assert ended.code == 2 and json.loads(ended.out) == {"error": message}
    assert ended.err == f"error: cannot verify {tmp_path / 'case.npz'}: {message}\n"


def test_convert_says_what_it_mapped_and_that_it_is_the_same(tmp_path):
    np.savez(tmp_path / "mlperf.npz", **unet_weights(WIDE))
    target = tmp_path / "nemo.safetensors"
    flags = ("--names=nemo", "--norm_groups=16")
    ended = run("convert", f"--from={tmp_path / 'mlperf.npz'}", f"--to={target}", *flags)
    assert ended.code == 0, ended.err
    assert (
        ended.out.splitlines()[-1] == f"{target}: written and read again, the same to the last bit"
    )
    assert ended.out.startswith("unet: 168 arrays (ldm), ")
    assert checkpoints.load(target, norm_groups=16).unet.network == WIDE.clone(norm_groups=16)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "usage: python -m sd_jax.weights convert --from=PATH"),
        (("verify",), "usage: "),
        (("convert", "--from=a.npz"), "usage: "),
        (("convert", "--from=no.ckpt", "--to=b"), "error: no file no.ckpt"),
    ],
)
def test_wrong_usage_exits_with_2(arguments, message):
    ended = run(*arguments)
    assert ended.code == 2 and message in ended.err, ended.err
