"""The command diffusion_jax.text: exit codes, messages, and the files of convert."""

import pathlib
import shutil

import numpy as np
import pytest

from diffusion_jax.text import __main__ as commands
from diffusion_jax.text import convert
from diffusion_jax.weights import pretrained, torch_files
from tests.diffusion_jax.weights import torch_writer

FIXTURES = pathlib.Path(__file__).parents[2] / "fixtures"


@pytest.fixture
def run(capsys):
    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            commands.main(["text", *map(str, arguments)])
        return ended.value.code, *capsys.readouterr()

    return run


def test_unknown_arguments_print_the_usage_and_exit_with_2(run):
    for arguments in ((), ("convert",), ("prove", "x"), ("convert", "a", "b", "c")):
        code, _, err = run(*arguments)
        assert (code, err[:6]) == (2, "Usage:")


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


def test_convert_drops_the_decoder_only_from_a_t5(tmp_path):
    names = (
        "encoder.block.0.layer.0.layer_norm.weight",
        "decoder.conv_in.weight",
        "lm_head.weight",
    )
    arrays = {name: np.full(2, i, np.float32) for i, name in enumerate(names)}
    for folder, saved_names in (("t5", names), ("other", names[1:])):
        (tmp_path / folder).mkdir()
        path = tmp_path / folder / "pytorch_model.bin"
        torch_writer.save(path, {name: arrays[name] for name in saved_names})
        convert.convert(tmp_path / folder, tmp_path / f"{folder}_out")
    assert list(pretrained.open_weights(tmp_path / "t5_out")) == [names[0]]
    assert set(pretrained.open_weights(tmp_path / "other_out")) == set(names[1:])


def test_convert_rejects_a_folder_of_diffusers(run, tmp_path):
    torch_writer.save(
        tmp_path / "diffusion_pytorch_model.bin", {"decoder.a": np.ones(1, np.float32)}
    )
    (tmp_path / "config.json").write_text('{"_class_name": "AutoencoderKL"}')
    code, _, err = run("convert", tmp_path, tmp_path / "out")
    assert code == 2 and "holds diffusers' AutoencoderKL, not a text encoder" in err
    assert not (tmp_path / "out").exists()


def test_convert_errors_name_missing_damaged_and_existing_files(run, tmp_path):
    code, _, err = run("convert", tmp_path, tmp_path / "out")
    assert (code, err) == (2, f"error: {tmp_path} holds no .bin files to convert\n")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    code, _, err = run("convert", tmp_path, tmp_path)
    assert (code, err) == (2, f"error: {tmp_path} is not empty: choose a new folder\n")
    code, _, err = run("convert", tmp_path, tmp_path / "out")
    assert code == 2
    assert "pytorch_model.bin: ValueError: the file is not a torch checkpoint" in err
