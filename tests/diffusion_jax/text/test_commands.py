"""python -m diffusion_jax.text: exit codes, one line of JSON, messages."""

import json
import pathlib
import shutil

import numpy as np
import pytest

from diffusion_jax.text import __main__ as commands
from diffusion_jax.text import convert
from diffusion_jax.weights import pretrained, torch_files
from tests.diffusion_jax.text import tiny_weights
from tests.parity import text as verify

FIXTURES = pathlib.Path(__file__).parents[2] / "fixtures"


@pytest.fixture
def run(capsys):
    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            commands.main(["text", *map(str, arguments)])
        return ended.value.code, *capsys.readouterr()

    return run


def saved(path, case, **changes):
    np.savez(path, **(case | changes))
    return path


def test_a_case_within_tolerance_exits_with_0(run, tmp_path):
    """Also without the prefixes in/ and out/, and with weights in float64."""
    case = tiny_weights.case("t5_relu")
    case = {name.removeprefix("in/").removeprefix("out/"): array for name, array in case.items()}
    case |= {n: a.astype(np.float64) for n, a in case.items() if n.startswith("w/")}
    code, out, _ = run("verify", saved(tmp_path / "case.npz", case))
    assert code == 0
    errors = json.loads(out)
    assert errors["max_relative_error"] == max(errors[n] for n in ("hidden_1", "long", "hidden_2"))
    assert errors["parameters"] == 6640


def short_case():
    """Without the text of 200 tokens, which is a program of its own."""
    return {n: a for n, a in tiny_weights.case("t5_relu").items() if "long" not in n}


@pytest.mark.parametrize("by", [3e-5, np.nan])
def test_a_case_beyond_it_exits_with_1(run, tmp_path, by):
    case = short_case()
    last = case["out/last_hidden_state"].copy()
    last[0, 5, 3] += by * np.abs(last).max()
    case["out/last_hidden_state"] = last
    code, out, _ = run("verify", saved(tmp_path / "case.npz", case))
    assert code == 1
    error = json.loads(out)["max_relative_error"]
    assert error is None if np.isnan(by) else error > 2e-5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"out/hidden_1": np.zeros((3, 16))}, "the case's hidden_1 is (3, 16), and ours is (3, 9,"),
        ({"__meta__": None}, "the case lacks its config"),
        ({"w/shared.weight": None}, "the weights are no T5 encoder: they lack shared.weight"),
        ({"w/encoder.block.1.layer.0.layer_norm.weight": None}, "1 keys are missing"),
        ({"in/ids": None}, "the case lacks inputs: it needs ids"),
    ],
)
def test_a_case_that_cannot_be_read_exits_with_2(run, tmp_path, change, message):
    case = short_case() | change
    case = {name: array for name, array in case.items() if array is not None}
    if "w/shared.weight" in change:
        del case["w/encoder.embed_tokens.weight"]
    code, _, err = run("verify", saved(tmp_path / "case.npz", case))
    assert code == 2
    assert message in err


def test_other_arguments_exit_with_2(run, tmp_path):
    for arguments in ((), ("verify",), ("prove", "x"), ("verify", "a", "b")):
        code, _, err = run(*arguments)
        assert (code, err[:6]) == (2, "Usage:")
    code, _, err = run("verify", tmp_path / "nothing.npz")
    assert code == 2
    assert f"error: cannot verify {tmp_path}/nothing.npz: no file" in err


def test_nothing_to_compare_is_no_success():
    case = {n: a for n, a in tiny_weights.case("clip").items() if n.startswith(("w/", "ids", "__"))}
    with pytest.raises(
        ValueError, match="the case holds no output that can be compared: known are"
    ):
        verify.verify(case)


def test_pickles_are_converted_in_parts_of_limited_size(monkeypatch):
    monkeypatch.setattr(convert, "_PART", 100)
    tensors = [(str(i), np.zeros(12, np.float32)) for i in range(5)]  # 48 bytes each.
    assert [list(part) for part in convert._parts(tensors)] == [["0", "1"], ["2", "3"], ["4"]]


@pytest.mark.parametrize("name", ["lightning.ckpt", "legacy.pth"])
def test_a_pickle_becomes_safetensors_without_torch(tmp_path, name):
    folder, out = tmp_path / "in", tmp_path / "out"
    folder.mkdir()
    shutil.copy(FIXTURES / name, folder / "pytorch_model.bin")
    (folder / "config.json").write_text("{}")
    convert.convert(folder, out)
    expected = torch_files.read_state_dict(FIXTURES / name)
    written = pretrained.open_weights(out)
    assert written.keys() == expected.keys()
    for key, array in expected.items():
        np.testing.assert_array_equal(written[key], array)
        assert written[key].dtype == array.dtype
    assert (out / "config.json").read_text() == "{}"


def test_what_cannot_be_converted_is_named(run, tmp_path):
    code, _, err = run("convert", tmp_path, tmp_path / "out")
    assert (code, err) == (2, f"error: {tmp_path} holds no .bin files to convert\n")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    code, _, err = run("convert", tmp_path, tmp_path)
    assert (code, err) == (2, f"error: {tmp_path} is not empty: give a new folder\n")
    code, _, err = run("convert", tmp_path, tmp_path / "out")
    assert code == 2
    assert "pytorch_model.bin: ValueError: it is neither a zip nor an older file" in err
