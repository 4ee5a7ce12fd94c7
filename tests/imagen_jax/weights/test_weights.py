"""The command of the weights: its exit codes, its line of JSON, and what it makes."""

import json

import numpy as np
import pytest

from tests.imagen_jax import commands
from tests.imagen_jax.cases import TINY, TINY_EFFICIENT, random_case
from tests.parity import imagen as verify


def run_verify(case, tmp_path):
    np.savez(tmp_path / "case.npz", **case)
    return commands.run("weights", "verify", str(tmp_path / "case.npz"), devices=1)


@pytest.mark.parametrize("config", [TINY, TINY_EFFICIENT], ids=["unet", "efficient"])
def test_verify_prints_one_line_of_json(config, tmp_path):
    case = random_case(config)
    ended = run_verify(case | {"in/text_mask": case["in/text_mask"].astype(np.int64)}, tmp_path)
    assert ended.code == 0 and ended.out.count("\n") == 1, ended.err
    errors = json.loads(ended.out)
    assert list(errors) == [*verify.TOLERANCE, "parameters"]
    assert errors["max_abs_error"] < 1e-5 and errors["grad_max_abs_error"] is None
    assert errors["parameters"] == sum(a.size for n, a in case.items() if n.startswith("sd/"))


def test_an_output_that_is_not_finite_is_null_and_exits_with_1(tmp_path):
    case = random_case(TINY_EFFICIENT)
    ended = run_verify(case | {"sd/out.bias": np.full(3, np.nan, np.float32)}, tmp_path)
    assert ended.code == 1 and json.loads(ended.out)["max_abs_error"] is None
    assert "not finite: max_abs_error, cfg_max_abs_error" in ended.err


def test_a_case_that_cannot_be_read_exits_with_2(tmp_path):
    case = random_case(TINY_EFFICIENT) | {"config": np.array('{"unet_type": "sr"}')}
    ended = run_verify(case, tmp_path)
    message = "the config lacks `unet`, the network's fields: it holds unet_type"
    assert ended.code == 2 and json.loads(ended.out) == {"error": message}
    assert ended.err == f"error: cannot verify {tmp_path / 'case.npz'}: {message}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "usage: python -m imagen_jax.weights convert --from=FILE"),
        (("verify",), "usage: "),
        (("convert", "--from=a.npz", "--to=b"), "usage: "),
        (("verify", "--form=a.npz"), "error: Unknown command line flag 'form'"),
        (("export", "--from=nowhere", "--to=a.npz"), "error: nowhere holds no config.json"),
        (
            ("convert", "--from=no.ckpt", "--to=b", "--config=configs/base64_500m.py"),
            "error: no file no.ckpt",
        ),
    ],
)
def test_wrong_usage_exits_with_2(arguments, message):
    ended = commands.run("weights", *arguments, devices=1)
    assert ended.code == 2 and message in ended.err, ended.err
