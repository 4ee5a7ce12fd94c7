"""The command python -m tests.parity: exit codes, JSON lines for all systems, messages."""

import json

import numpy as np
import pytest

from tests.diffusion_jax.text import tiny_weights
from tests.imagen_jax import cases as imagen_cases
from tests.imagen_jax import commands
from tests.parity import __main__ as parity
from tests.sd_jax import cases as sd_cases

pytestmark = [pytest.mark.slow, pytest.mark.gate]


def bare_text():
    """Return a T5 case without the prefixes in/ and out/, and with weights in float64."""
    case = tiny_weights.case("t5_relu")
    case = {name.removeprefix("in/").removeprefix("out/"): array for name, array in case.items()}
    return case | {n: a.astype(np.float64) for n, a in case.items() if n.startswith("w/")}


def short_text():
    """Return a T5 case without the text of 200 tokens, which needs another compilation."""
    return {n: a for n, a in tiny_weights.case("t5_relu").items() if "long" not in n}


GOOD = {
    "unet": lambda: imagen_cases.random_case(imagen_cases.TINY),
    "sd": lambda: sd_cases.unet_case(sd_cases.TINY | {"channel_mult": [1]}),
    "text": bare_text,
}


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """Return the lines that one command prints for a good case of each system, and the cases."""
    folder = tmp_path_factory.mktemp("cases")
    cases = {str(folder / f"{name}.npz"): make() for name, make in GOOD.items()}
    for path, case in cases.items():
        np.savez(path, **case)
    ended = commands.succeed("tests.parity", *cases)
    lines = dict(zip(GOOD, map(json.loads, ended.out.splitlines()), strict=True))
    return lines, dict(zip(GOOD, cases.items(), strict=True))


def test_a_good_case_prints_one_line_of_json(good):
    lines, cases = good
    assert [line["file"] for line in lines.values()] == [path for path, _ in cases.values()]
    assert lines["text"]["parameters"] == 6640  # The weights hold the embedding under two names.
    for name in ("unet", "sd"):
        weights = (a for key, a in cases[name][1].items() if key.startswith(("sd/", "w/")))
        assert lines[name]["parameters"] == sum(array.size for array in weights)


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


def test_a_case_that_cannot_be_read_exits_with_2(report, tmp_path):
    code, line, err = report({n: a for n, a in short_text().items() if n != "__meta__"})
    message = "the case lacks __meta__, its config as JSON"
    assert (code, line) == (2, {"error": message})
    assert err == f"error: cannot verify {tmp_path / 'case.npz'}: {message}\n"
