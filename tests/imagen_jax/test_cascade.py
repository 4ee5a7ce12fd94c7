"""Cascades of two models: the command, the function, and errors."""

import json
import re
import shutil

import numpy as np
import pytest
from PIL import Image

import imagen_jax
from configs import base64_500m, sr256_600m, sr1024_600m
from diffusion_jax import verdict
from diffusion_jax.draw.program import default_batch_size
from diffusion_jax.draw.stage import Stage
from imagen_jax import cascade
from imagen_jax.settings import read_settings
from tests.imagen_jax import commands
from tests.imagen_jax.conftest import TINY

PROMPTS = ("a red seven on gray paper", "a white two on cyan paper", "a blue one on black paper")
SR = ("--config=configs/quickstart_sr.py", *TINY[1:], "--config.steps=2")


@pytest.fixture(scope="module")
def enlarger(tmp_path_factory):
    """A super-resolution model (16 to 64 pixels) after two steps."""
    workdir = tmp_path_factory.mktemp("enlarger")
    arguments = (*SR, f"--workdir={workdir}", "--config.sample_every=2")
    commands.succeed("train", *arguments, before=commands.skip_rehearsal)
    return workdir


def draw(out, *arguments):
    return commands.draw("sample", out, *arguments)[:2]


@pytest.fixture(scope="module")
def drawn(trained, enlarger, tmp_path_factory):
    """One image per prompt, drawn two at a time in the second stage."""
    out = tmp_path_factory.mktemp("drawn")
    stages = (f"--workdir={trained}", f"--workdir={enlarger}")
    prompts = [f"--prompt={prompt}" for prompt in PROMPTS]
    settings = ("--guidance=3,1.5", "--steps=2,3", "--all_sizes", "--batch_size=3,2")
    return out, *draw(out, *stages, *prompts, *settings)


@pytest.mark.gate
@pytest.mark.slow
def test_training_a_super_resolution_model_draws_enlarged_pictures(enlarger):
    (sheet,) = (enlarger / "samples").iterdir()
    assert commands.picture(sheet).std() > 20


@pytest.mark.gate
@pytest.mark.slow
def test_a_cascade_draws_the_last_size_and_records_settings_of_each_stage(drawn, trained, enlarger):
    _, lines, images = drawn
    assert [image.shape for image in images] == [(64, 64, 3)] * 3
    base, larger = lines[2]["stages"]
    assert (base["workdir"], base["size"], base["guidance"]) == (str(trained), 16, 3.0)
    assert (larger["workdir"], larger["size"], larger["guidance"]) == (str(enlarger), 64, 1.5)
    assert (base["steps"], larger["steps"], larger["low_res"]) == (2, 3, 16)
    assert larger["aug_sigma"] == 0.2


@pytest.mark.gate
@pytest.mark.slow
def test_the_smaller_pictures_of_a_cascade_match_the_first_stage_alone(drawn, trained, tmp_path):
    out, lines, _ = drawn
    assert [line["smaller"] for line in lines] == [[f"seed_00000{i}_16.png"] for i in range(3)]
    prompts = [f"--prompt={prompt}" for prompt in PROMPTS]
    _, alone = draw(tmp_path, f"--workdir={trained}", *prompts, "--guidance=3", "--steps=2")
    for line, expected in zip(lines, alone, strict=True):
        np.testing.assert_allclose(commands.picture(out / line["smaller"][0]), expected, atol=1)


@pytest.mark.gate
@pytest.mark.slow
def test_cascade_draw_matches_the_sample_command(drawn, trained, enlarger):
    _, _, images = drawn
    model = imagen_jax.load(trained, enlarger, guidance=[3.0, 1.5], steps=[2, 3])
    drawing = model.draw(PROMPTS[1:], seeds=[1, 2])
    (small,), large = drawing.smaller, drawing.images
    assert small.shape == (2, 16, 16, 3) and large.dtype == np.uint8
    np.testing.assert_allclose(large.astype(int), images[1:], atol=2)


def test_default_batch_sizes_decrease_with_the_image_size():
    models = (base64_500m, sr256_600m, sr1024_600m)
    settings = [read_settings(model.get_config().to_dict()) for model in models]
    shapes = cascade.output_shapes(settings)
    assert [default_batch_size(*shape) for shape in shapes] == [512, 512, 32]


def test_the_first_stage_must_fit_the_pictures_to_enlarge():
    base, enlarger = (
        Stage(name, read_settings(model.get_config().to_dict()), None, None, "ema", 1, *[None] * 5)
        for name, model in (("base", base64_500m), ("sr", sr256_600m))
    )
    both, alone = cascade.Cascade([base, enlarger], [{}, {}]), cascade.Cascade([enlarger], [{}])
    assert (both.enlarger, alone.enlarger) == ((1, 64), (0, 64))  # (stage, side)
    both.check([], [1, 1])
    alone.check([(64, 64)], [1])
    with pytest.raises(ValueError, match=r"^base is a base model, which draws from text alone"):
        both.check([(64, 64)], [1, 1])
    with pytest.raises(ValueError, match=r"^sr enlarges images of 64x64: name a model that draws"):
        alone.check([], [1])
    with pytest.raises(ValueError, match=r"^sr enlarges images of 64x64, but .* of 32x64: resize"):
        alone.check([(64, 64), (64, 32)], [1])


@pytest.mark.slow
def test_a_cascade_draws_over_a_picture_in_both_stages(trained, enlarger, tmp_path):
    blocks = np.random.default_rng(0).integers(0, 256, (16, 16, 3), np.uint8)
    pixels = blocks.repeat(4, 0).repeat(4, 1)
    mask = np.zeros((64, 64), np.uint8)
    mask[:32] = 255
    for name, array in (("a.png", pixels), ("mask.png", mask)):
        Image.fromarray(array).save(tmp_path / name)
    stages = (f"--workdir={trained}", f"--workdir={enlarger}", f"--prompt={PROMPTS[0]}")
    edit_flags = (f"--image={tmp_path / 'a.png'}", f"--mask={tmp_path / 'mask.png'}", "--strength=1")
    out = tmp_path / "out"
    lines, (large,) = draw(out, *stages, *edit_flags, "--guidance=1", "--steps=2", "--all_sizes")
    np.testing.assert_array_equal(large[32:], pixels[32:])  # Masked-out pixels are exact.
    assert np.abs(large[:32] - pixels[:32]).mean() > 20
    small = commands.picture(out / lines[0]["smaller"][0])
    error = np.abs(small - blocks)  # The filter that reduced the picture blurs it.
    assert error[8:].mean() < 25 and error[:8].mean() > 50, (error[8:].mean(), error[:8].mean())


@pytest.mark.gate
@pytest.mark.slow
def test_a_later_stage_can_start_from_pictures_on_disk(trained, drawn, enlarger, tmp_path):
    """Pictures are rounded to 8 bits, so the result is close but not equal."""
    out, lines, images = drawn
    first = out / lines[0]["smaller"][0]
    arguments = (f"--low_res={first}", f"--prompt={PROMPTS[0]}", "--guidance=1.5", "--steps=3")
    again, (larger,) = draw(tmp_path, f"--workdir={enlarger}", *arguments)
    assert (again[0]["low_res"], len(again[0]["stages"])) == (str(first), 1)
    same, other = (np.abs(larger - image).mean() for image in images[:2])
    # The distance to other pictures varies, because the first stage has a random number of steps.
    assert same < 0.5 and other > 20 * same, (same, other)
    folder = tmp_path / "small"
    folder.mkdir()
    for name, line in zip(("10.png", "9.png"), lines, strict=False):
        shutil.copy(out / line["smaller"][0], folder / name)
    prompts = (f"--prompt={PROMPTS[0]}", f"--prompt={PROMPTS[0]}")
    named = (f"--workdir={enlarger}", f"--low_res={folder}", *prompts, *arguments[2:])
    pair, both_larger = draw(tmp_path / "pair", *named)
    assert [line["low_res"] for line in pair] == [str(folder / n) for n in ("9.png", "10.png")]
    assert np.abs(both_larger[1] - images[0]).mean() < np.abs(both_larger[0] - images[0]).mean()
    both = imagen_jax.load(trained, enlarger)
    assert both.enlarger == (1, 16) and imagen_jax.load(trained).enlarger is None
    opened = Image.open(first)
    drawing = both.draw(PROMPTS[0], low_res=opened, guidance=1.5, steps=3)
    np.testing.assert_array_equal(drawing.images[0], larger)


@pytest.mark.gate
@pytest.mark.slow
@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ("base base", "{base} is a base model, which enlarges nothing"),
        ("larger larger", "{larger} draws images of 64 pixels, but {larger} enlarges images of 16 pixels to 64: add"),
        ("base other", "{other}"),
    ],
)
def test_stages_that_do_not_fit_together_are_errors(trained, enlarger, tmp_path, stages, message):
    names = {"base": trained, "larger": enlarger, "other": tmp_path / "other"}
    if "other" in stages:  # A checkpoint of another architecture.
        shutil.copytree(enlarger, names["other"])
        config = json.loads((enlarger / "config.json").read_text())
        config["unet"]["embed_dim"] = 64
        (names["other"] / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=re.escape(message.format(**names))):
        imagen_jax.load(*(names[name] for name in stages.split()))


@pytest.mark.gate
@pytest.mark.slow
def test_more_pictures_to_enlarge_than_texts_are_a_one_line_error(enlarger, drawn, tmp_path):
    pictures = [f"--low_res={drawn[0] / 'seed_000000_16.png'}"] * 2
    arguments = (f"--workdir={enlarger}", *pictures, "--prompt=a red one", f"--out={tmp_path / 'out'}")
    ended = commands.run("sample", *arguments, devices=1)
    assert (ended.code, ended.err.count("\n")) == (2, 1), ended.err
    assert "2 pictures for 1 text:" in ended.err and not (tmp_path / "out").exists()


@pytest.mark.slow
def test_verdict_compares_the_losses_of_all_stages_and_the_pictures_of_the_last(
    trained, enlarger, tmp_path, monkeypatch
):
    draw, calls, sheet = verdict._draw, [], tmp_path / "sheet.png"

    def drawn(opened, texts):
        calls.append((texts, draw(opened, texts)))
        return calls[-1][1]

    monkeypatch.setattr(verdict, "_draw", drawn)
    rows = [*verdict.verdict([trained, enlarger], "", sheet)]
    assert [name for name, _ in rows] == ["model", "loss", "model", "loss", "sheet", "distance"]
    assert str(trained) in rows[0][1] and str(enlarger) in rows[2][1]
    (base, first), (larger, last) = calls
    np.testing.assert_allclose(larger["low_res"], first / 127.5 - 1, atol=1e-6)
    np.testing.assert_array_equal(larger["text_ids"], base["text_ids"])  # The same encoder.
    assert last.shape == (32, 64, 64, 3)
    with pytest.raises(ValueError, match=f"{trained} does not enlarge pictures of 64x64"):
        [*verdict.verdict([enlarger, trained], "", sheet)]
    # Pictures that a stage enlarges alone are its training pictures, so they are no copies.
    alone = [name for name, _ in verdict.verdict([enlarger], "", sheet)]
    assert alone == ["model", "loss", "sheet"]
