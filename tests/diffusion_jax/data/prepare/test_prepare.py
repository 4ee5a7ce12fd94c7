"""The commands that prepare data sets, and their output."""

import functools
import json
import os

import numpy as np
import pytest
from PIL import Image

from diffusion_jax.data.prepare import __main__ as prepare
from diffusion_jax.data.prepare.validate import validate
from diffusion_jax.data.sources.folder import open_folder
from diffusion_jax.examples.digits import rendering as digits
from tests.diffusion_jax.data import calls
from tests.imagen_jax import commands

run = functools.partial(calls.exit_code, prepare.main)


@pytest.mark.parametrize(
    ("command", "flags"),
    [
        ("fetch", "--url, --out"),
        ("download", "--urls, --out"),
        ("reshard", "--out"),
        ("index", "--path"),
        ("validate", "--out"),
        ("emoji", "--out"),
    ],
)
def test_a_command_without_its_paths_is_an_error_that_lists_them(command, flags, capsys):
    assert run(command) == 2
    assert capsys.readouterr().err.endswith(f"arguments are required: {flags}\n")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Twelve digits: one damaged, one larger, one with an empty caption, one without a caption."""
    path = digits.write_examples(tmp_path_factory.mktemp("data") / "set", 12, size=16)
    (path / "00003.png").write_bytes((path / "00003.png").read_bytes()[:60])
    Image.fromarray(np.zeros((40, 80, 3), np.uint8)).save(path / "00004.png")
    (path / "00005.txt").write_text("")
    (path / "00006.txt").unlink()
    return path


def test_validate_counts_sizes_texts_and_broken_images(folder):
    report = validate(open_folder(folder, uncaptioned="drop"))
    assert (report["records"], report["read"], report["usable"]) == (11, 11, 10)
    assert report["left_out"] == {"no_caption": 1}
    assert report["unusable"] == {"broken_image": 1}
    [first] = report["unusable_first"]
    assert first.startswith("00003.png: broken_image: ") and "truncated" in first
    assert report["formats"] == {"PNG": 10}
    assert report["smaller_side"] == {"min": 16, "p5": 16, "median": 16, "p95": 29.2, "max": 40}
    assert (report["aspect"]["median"], report["aspect"]["max"]) == (1, 2)
    assert (report["text_length"]["min"], report["empty_texts"]) == (0, 1)
    texts = open_folder(folder, uncaptioned="drop").texts([0, 1, 2, 4, 5, 6, 7, 8, 9, 10])
    assert report["text_length"]["max"] == max(map(len, texts))
    assert (report["words"]["on"], report["text_words"]["max"], report["duplicates"]) == (9, 6, 0)
    assert validate(open_folder(folder, uncaptioned="drop"), num=4)["read"] == 4


def test_validate_counts_duplicate_pictures_and_texts(tmp_path):
    path = digits.write_examples(tmp_path / "set", 4, size=16)
    (path / "00002.png").write_bytes((path / "00001.png").read_bytes())
    for name in ("00000", "00003"):
        (path / f"{name}.txt").write_text(f"The same, {name[0]}!")
    report = validate(open_folder(path))
    assert (report["duplicates"], report["different_texts"]) == (1, 3)


def test_validate_counts_different_embeddings(tmp_path):
    path = digits.write_examples(tmp_path / "set", 3, size=16)
    for i, value in enumerate((1, 2, 1)):
        np.save(path / f"{i:05}.npy", np.full((2, 4), value, np.float16))
    assert validate(open_folder(path, "npy"))["different_texts"] == 2


def test_validate_writes_its_report_and_a_sheet(folder, tmp_path, capsys):
    others = tmp_path / "report" / "parts" / "a"  # A file of the user.
    others.parent.mkdir(parents=True)
    others.touch()
    arguments = ("validate", "--source=folder", f"--path={folder}", f"--out={tmp_path}/report")
    assert run(*arguments) == 0
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert "files          11 pictures, 11 texts\nleft out       1 no_caption: 00006.png\n" in err
    assert report["left_out_first"] == {"no_caption": ["00006.png"]}
    assert json.loads((tmp_path / "report/report.json").read_text()) == report
    with Image.open(tmp_path / "report/samples.png") as sheet:
        assert sheet.width == 4 + 8 * 132  # The ten usable pictures are shown eight per row.
    assert run(*arguments, "--max_broken=0.05") == 1
    assert "error: 1 of 11 records are unusable" in capsys.readouterr().err
    assert others.exists()
    assert sorted(p.name for p in others.parents[1].iterdir()) == ["parts", "report.json", "samples.png"]


def test_resharded_data_can_be_indexed_and_validated(folder, tmp_path, capsys):
    source = ("--source=folder", f"--path={folder}")
    assert run("reshard", *source, f"--out={tmp_path}/tars", "--num=5") == 0
    # Truncated images are only found by decoding.
    assert json.loads(capsys.readouterr().out) == {"no_caption": 1, "written": 11}
    assert run("index", f"--path={tmp_path}/tars") == 0
    counts = json.loads(capsys.readouterr().out)
    assert counts == {"tars": 3, "records": 11, "files": 22, "damaged": 0}
    assert len(list((tmp_path / "tars").glob("*.tar.index.npz"))) == 3


def test_reshard_logs_how_many_shards_are_already_done(folder, tmp_path):
    """Run as a process, because the command configures which log lines are shown."""
    arguments = ("reshard", "--source=folder", f"--path={folder}", f"--out={tmp_path}", "--num=5")
    for done in (0, 3):
        ended = commands.run("diffusion_jax.data.prepare", *arguments, devices=1)
        assert ended.code == 0 and ("3 of 3 shards are done" in ended.err) == (done == 3), ended.err
        assert "0 of 3" not in ended.err


def test_download_dry_run_prints_the_img2dataset_call_with_extra_arguments(capsys):
    extra = "--save_additional_columns=[similarity]"
    assert run("download", "--urls=laion", "--out=shards", "--size=256", "--dry_run", extra) == 0
    call = capsys.readouterr().out
    assert call.startswith("img2dataset --url_list=laion --input_format=parquet --url_col=URL ")
    assert "--resize_mode=keep_ratio --image_size=256 --resize_only_if_bigger=True" in call
    assert call.endswith(f"'{extra}'\n")


def test_download_runs_img2dataset_or_prints_how_to_install_it(tmp_path, monkeypatch, capsys):
    arguments = ("download", f"--urls={tmp_path}", f"--out={tmp_path}/o")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert run(*arguments) == 2
    assert "-m venv img2dataset-env && img2dataset-env/bin/pip install" in capsys.readouterr().err
    program = tmp_path / "img2dataset"
    program.write_text(f'#!/bin/sh\necho "$1" > {tmp_path}/called\nexit 3\n')
    os.chmod(program, 0o755)
    assert run(*arguments) == 3
    assert (tmp_path / "called").read_text() == f"--url_list={tmp_path}\n"
    assert run("download", f"--urls={tmp_path}/gone", "--out=o") == 2
    assert "there is no such file or folder" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["folder:{}::txt", "{}"])
def test_validate_takes_the_data_as_one_name_as_other_commands_do(folder, tmp_path, capsys, name):
    assert run("validate", f"--data={name.format(folder)}", f"--out={tmp_path}/report") == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["usable"], report["left_out_first"]) == (10, {"no_caption": ["00006.png"]})


def test_invalid_arguments_are_one_line_errors_with_exit_code_2(tmp_path, capsys):
    assert run("index", f"--path={tmp_path}/gone") == 2
    assert capsys.readouterr().err.startswith(f"error: no data at {tmp_path}/gone: check")
    source = "diffusion_jax.examples.digits"
    assert run("validate", f"--source={source}", "--path=x", "--out=o") == 2
    assert f"the data source {source!r} has no image files" in capsys.readouterr().err
    assert run("validate", "--out=o") == 2
    message = "error: --data is missing: give a path, or SOURCE:PATH::TEXT\n"
    assert capsys.readouterr().err == message
    assert run("index", "--path=x", "--more=y") == 2
    assert "unknown arguments --more=y" in capsys.readouterr().err
    for part in ("3", "4/4", "a/b"):
        assert run("reshard", "--source=folder", "--path=x", "--out=o", f"--part={part}") == 2
        assert f"--part={part}: give I/N" in capsys.readouterr().err
