"""The sampling command: its files, reproducible seeds, and errors."""

import itertools
import re

import numpy as np
import pytest

import imagen_jax
from diffusion_jax.draw import model as draw_model
from tests.imagen_jax import commands

PROMPTS = ("a red seven on gray paper", "a white two on cyan paper", "a blue one on black paper")


def draw(workdir, out, *arguments):
    """Run the command, and return its metadata, pictures and messages."""
    return commands.draw("sample", out, f"--workdir={workdir}", *arguments, devices=8)


@pytest.fixture(scope="module")
def six(trained, tmp_path_factory):
    """Two images for each of three prompts from a file."""
    folder = tmp_path_factory.mktemp("six")
    (folder / "prompts.txt").write_text("\n".join(PROMPTS) + "\n\n")
    arguments = (f"--prompts={folder / 'prompts.txt'}", "--num_images=2", "--guidance=3")
    return folder / "out", *draw(trained, folder / "out", *arguments)


def test_metadata_jsonl_records_everything_needed_to_draw_each_image_again(six, trained):
    _, lines, _, _ = six
    assert [line["text"] for line in lines] == [p for p in PROMPTS for _ in range(2)]
    assert [line["seed"] for line in lines] == [0, 1, 2, 3, 4, 5]
    assert {line["guidance"] for line in lines} == {3.0}
    (stage,) = lines[0]["stages"]
    assert (stage["workdir"], stage["ema"], stage["steps"]) == (str(trained), "ema", 2)
    assert (stage["size"], stage["sampler"], stage["guidance"]) == (16, "ddim", 3.0)
    assert (stage["eta"], stage["sigma_min"], stage["sigma_max"]) == (1.0, 0.4, 40.0)
    assert "guidance_high" not in stage  # It is infinite, which JSON cannot represent.


def test_sample_writes_the_listed_pictures_and_a_sheet(six):
    out, lines, images, _ = six
    names = {line["file_name"] for line in lines}
    assert {path.name for path in out.iterdir()} == names | {"sheet.png", "metadata.jsonl"}
    assert {image.shape for image in images} == {(16, 16, 3)}
    assert len({image.tobytes() for image in images}) == 6


def _draw_in_a_notebook(workdir, out):
    model = imagen_jax.load(workdir)
    prompts, seen = [p for p in PROMPTS for _ in range(2)], []
    before = model.draw(prompts, guidance=1, steps=1)
    again = model.draw(prompts, guidance=3, progress=lambda images, sigma: seen.append(sigma))
    assert again._repr_png_()[1:4] == b"PNG" and repr(again) == "6 pictures of 16x16"
    assert re.fullmatch(rf"{workdir}, step \d+, ema, ddim, 2 steps, guidance 2", repr(model))
    assert len(seen) == 2 and seen[0] > seen[1]
    euler = model.denoiser(prompts, guidance=3, sampler="euler")
    x = euler.start(0)
    for sigma, lower in itertools.pairwise(euler.sigmas):
        x = x + (lower - sigma) * (x - euler(x, sigma)) / sigma
    drawn = model.draw(prompts, guidance=3, sampler="euler").images
    np.testing.assert_allclose(euler.pictures(x).astype(int), drawn, atol=1)
    with pytest.raises(ValueError, match="there is no option 'stepz': did you mean steps"):
        model.draw("a", stepz=3)
    with pytest.raises(ValueError, match="guide cannot change after loading"):
        model.draw("a", guide="run")
    with pytest.raises(draw_model.Cancelled):
        model.draw("a", progress=_cancel)
    for n in range(len(again)):
        (out / f"{n}.png").write_bytes(again.png(n))
    assert (before.images != again.images).any()


def _cancel(images, sigma):
    raise draw_model.Cancelled


@pytest.mark.gate
@pytest.mark.slow
def test_a_model_loaded_in_python_draws_the_same_bytes_as_the_command(six, trained, tmp_path):
    process = commands.fork(_draw_in_a_notebook, trained, tmp_path, devices=8)
    process.join()
    assert process.exitcode == 0
    for n, line in enumerate(six[1]):
        assert (tmp_path / f"{n}.png").read_bytes() == (six[0] / line["file_name"]).read_bytes()


def test_a_seed_draws_the_same_image_alone_and_in_a_batch(six, trained, tmp_path):
    lines, images, _ = draw(trained, tmp_path, f"--prompt={PROMPTS[2]}", "--seed=5", "--guidance=3", "--batch_size=1")
    assert (len(images), lines[0]["seed"]) == (1, 5)
    # Rounding to uint8 can differ.
    np.testing.assert_allclose(images[0], six[2][5], atol=1)


def test_steps_and_ema_are_recorded_and_change_the_picture(six, trained, tmp_path):
    arguments = (f"--prompt={PROMPTS[0]}", "--guidance=3", "--steps=3", "--ema=raw")
    lines, images, _ = draw(trained, tmp_path, *arguments)
    stage = lines[0]["stages"][0]
    assert (stage["steps"], stage["ema"]) == (3, "raw")
    assert np.abs(images[0] - six[2][0]).max() > 1


def test_sample_logs_the_rate_and_the_time_left(six):
    assert "6/6 images | " in six[3]
    assert " images/s | 0:00:00 left" in six[3]


def test_missing_flags_are_named_with_their_meaning(trained):
    ended = commands.run("sample", f"--workdir={trained}", "--prompt=a")
    assert (ended.code, ended.err) == (2, "error: --out is missing: the folder to write to\n")
    ended = commands.run("sample", f"--out={trained}", "--prompt=a")
    repeated = "--workdir is missing: the workdir of a training run; repeat it for a cascade"
    assert (ended.code, ended.err) == (2, f"error: {repeated}\n")
    both = "--workdir is missing: the folder of this run; created if needed; --config is missing: "
    ended = commands.run("train")
    assert ended.code == 2 and ended.err.startswith(f"error: {both}"), ended.err
    assert ended.err.count("\n") == 1
