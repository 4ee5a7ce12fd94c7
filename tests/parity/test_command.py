"""The command python -m tests.parity: exit codes, lines of JSON for all systems, messages."""

import json

import numpy as np
import pytest

from tests.diffusion_jax.text import tiny_weights
from tests.imagen_jax import cases as imagen_cases
from tests.imagen_jax import commands
from tests.parity import __main__ as parity
from tests.parity import imagen
from tests.parity import text as text_parity
from tests.sd_jax import cases as sd_cases

pytestmark = [pytest.mark.slow, pytest.mark.gate]

SD_OUTPUTS = ["y", "y_frac", "max_relative_error", "grad_max_relative_error"]
TEXT_OUTPUTS = ["hidden_1", "long", "hidden_2"]


def bare_text():
    """Return a T5 case without the prefixes in/ and out/, and with weights in float64."""
    case = tiny_weights.case("t5_relu")
    case = {name.removeprefix("in/").removeprefix("out/"): array for name, array in case.items()}
    return case | {n: a.astype(np.float64) for n, a in case.items() if n.startswith("w/")}


def short_text():
    """Return a T5 case without the text of 200 tokens, which needs another compilation."""
    return {n: a for n, a in tiny_weights.case("t5_relu").items() if "long" not in n}


def sd_case():
    return sd_cases.unet_case(sd_cases.TINY | {"channel_mult": [1]})


def integer_mask(case):
    return case | {"in/text_mask": case["in/text_mask"].astype(np.int64)}


GOOD = {
    "unet": lambda: integer_mask(imagen_cases.random_case(imagen_cases.TINY)),
    "sd": sd_case,
    "text": bare_text,
}


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """Return the lines that one command prints for a good case of each system, and the cases."""
    folder = tmp_path_factory.mktemp("cases")
    cases = {str(folder / f"{name}.npz"): make() for name, make in GOOD.items()}
    for path, case in cases.items():
        np.savez(path, **case)
    ended = commands.run("tests.parity", *cases, devices=1)
    assert ended.code == 0, ended.err
    lines = dict(zip(GOOD, map(json.loads, ended.out.splitlines()), strict=True))
    return lines, dict(zip(GOOD, cases.items(), strict=True))


@pytest.mark.parametrize(
    ("name", "outputs"),
    [
        ("unet", list(imagen.TOLERANCE)),
        ("sd", SD_OUTPUTS),
        ("text", None),
    ],
)
def test_a_good_case_is_one_line_of_json(good, name, outputs):
    line, (path, case) = good[0][name], good[1][name]
    assert line.pop("file") == path
    if name == "text":
        assert line["max_relative_error"] == max(line[n] for n in TEXT_OUTPUTS)
        assert line["max_relative_error"] < text_parity.TOLERANCE["max_relative_error"]
        assert line["parameters"] == 6640  # The embedding has two names.
        return
    assert list(line) == [*outputs, "parameters"]
    largest, gradient = outputs[0 if name != "sd" else 2], outputs[-1]
    assert line[largest] < (5e-6 if name == "sd" else 1e-5) and line[gradient] is None
    weights = (array for key, array in case.items() if key.startswith(("sd/", "w/")))
    assert line["parameters"] == sum(array.size for array in weights)


@pytest.fixture
def report(tmp_path, capsys):
    """Return a function that maps a case to its exit code, its line of JSON and the messages."""

    def report(case):
        np.savez(tmp_path / "case.npz", **case)
        code = parity.main([str(tmp_path / "case.npz")])
        out, err = capsys.readouterr()
        line = json.loads(out)
        assert line.pop("file") == str(tmp_path / "case.npz")
        return code, line, err

    return report


@pytest.mark.parametrize("by", [3e-5, np.nan])
def test_a_case_beyond_its_tolerance_exits_with_1(report, by):
    case = short_text()
    last = case["out/last_hidden_state"].copy()
    last[0, 5, 3] += by * np.abs(last).max()
    code, line, _ = report(case | {"out/last_hidden_state": last})
    assert code == 1
    error = line["max_relative_error"]
    assert error is None if np.isnan(by) else error > 2e-5


@pytest.mark.parametrize(
    ("make", "kernel", "infinite"),
    [
        (
            lambda: imagen_cases.random_case(imagen_cases.TINY_EFFICIENT),
            "sd/out.weight",
            "max_abs_error, cfg_max_abs_error",
        ),
        (sd_case, "w/out.2.weight", "y, y_frac, max_relative_error"),
    ],
    ids=["imagen", "sd"],
)
def test_an_output_that_is_not_finite_is_null_and_exits_with_1(report, make, kernel, infinite):
    case = make()
    code, line, err = report(case | {kernel: np.full_like(case[kernel], 3e38)})  # It overflows.
    assert code == 1 and all(line[name] is None for name in infinite.split(", "))
    assert f"not finite: {infinite}" in err


@pytest.mark.parametrize(
    ("make", "change", "message"),
    [
        (
            lambda: imagen_cases.random_case(imagen_cases.TINY_EFFICIENT),
            {"config": np.array('{"unet_type": "sr"}')},
            "NeMo's config has no group `unet` with the network's fields: its keys are unet_type",
        ),
        (
            sd_case,
            {"__meta__": np.array('{"config": {}}')},
            "the LDM UNet's config lacks model_channels, attention_resolutions: it has no fields",
        ),
        (
            short_text,
            {"out/hidden_1": np.zeros((3, 16))},
            "the case's hidden_1 has shape (3, 16), but ours has (3, 9, 16)",
        ),
        (short_text, {"__meta__": None}, "the case lacks __meta__, its config as JSON"),
        (
            short_text,
            {"w/shared.weight": None, "w/encoder.embed_tokens.weight": None},
            "the weights are not a T5 encoder's: their 18 arrays lack shared.weight",
        ),
        (
            short_text,
            {"w/encoder.block.1.layer.0.layer_norm.weight": None},
            "the state dict does not fit the model: missing keys (1): "
            "encoder.block.1.layer.0.layer_norm.weight; keys left over (0): none. Use weights "
            "of this model, or the config that these weights were trained with",
        ),
        (short_text, {"in/ids": None}, "the case lacks inputs: it needs ids"),
    ],
)
def test_a_case_that_cannot_be_read_exits_with_2(report, tmp_path, make, change, message):
    case = {name: array for name, array in (make() | change).items() if array is not None}
    code, line, err = report(case)
    assert (code, line) == (2, {"error": message})
    assert err == f"error: cannot verify {tmp_path / 'case.npz'}: {message}\n"


def test_other_arguments_exit_with_2(tmp_path, capsys):
    for arguments in ([], ["--from=a.npz"], ["-h"]):
        assert parity.main(arguments) == 2
        assert "python -m tests.parity CASE.npz ..." in capsys.readouterr().err
    assert parity.main([str(tmp_path / "nothing.npz")]) == 2
    assert f"error: cannot verify {tmp_path}/nothing.npz: no file" in capsys.readouterr().err


def test_the_worst_case_decides_over_the_exit_code(good, tmp_path, capsys):
    path = good[1]["text"][0]
    assert parity.main([str(tmp_path / "nothing.npz"), path]) == 2
    assert [json.loads(line)["file"] for line in capsys.readouterr().out.splitlines()] == [
        str(tmp_path / "nothing.npz"), path,
    ]  # fmt: skip


def test_nothing_to_compare_is_no_success():
    case = {n: a for n, a in tiny_weights.case("clip").items() if n.startswith(("w/", "ids", "__"))}
    with pytest.raises(
        ValueError, match="the case holds no output that can be compared: add one of"
    ):
        text_parity.verify(case)
