"""Published models sample the same image alone, in a batch, on one device, and from a file."""

import json
import re
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from diffusion_jax.devices import sharding
from diffusion_jax.precache import lookup
from sd_jax import drawing, task, vae
from sd_jax.settings import read_settings
from sd_jax.weights import checkpoints, lora_files, opened, published
from tests import written_runs
from tests.sd_jax import tiny
from tests.sd_jax.weights.test_checkpoints import compvis, written

VALUES = {"sampler": "ddim", "steps": 2, "guidance": 3.0, "height": 6, "width": 4}
PROMPTS = [*"abcdef"]  # Eight devices need two more, which repeat one of them.


@pytest.fixture(scope="module")
def model(published):
    return drawing.load(published / "d", **VALUES)


@pytest.fixture(scope="module")
def six(model):
    return model.draw(PROMPTS).images


def same(ours, theirs):
    """Sums in another order may change a pixel by 1."""
    np.testing.assert_allclose(ours.astype(int), theirs.astype(int), atol=1)


def test_six_prompts_give_six_different_pictures(six):
    assert (six.shape, six.dtype) == ((6, 6, 4, 3), np.uint8)
    assert len({image.tobytes() for image in six}) == 6


def test_an_image_sampled_alone_equals_the_one_in_a_batch(model, six):
    same(model.draw(["d"], seeds=[3]).images, six[3:4])
    assert np.abs(model.draw(["d"], seeds=[4]).images.astype(int) - six[3]).max() > 5
    assert np.abs(model.draw(["e"], seeds=[3]).images.astype(int) - six[3]).max() > 1


def test_a_single_file_on_one_device_draws_like_its_diffusers_directory_on_eight(published, six, monkeypatch):
    one = sharding.make_mesh(1, 1, 1)
    monkeypatch.setattr(sharding, "make_mesh", lambda: one)
    tokenizer, config = str(published / "tokenizer"), str(published / "ldm.yaml")
    values = {"prediction": "v", "tokenizer": tokenizer, "config": config, **VALUES}
    model = drawing.load(published / "a.npz", **values)
    same(model.draw(PROMPTS[3:5], seeds=[3, 4]).images, six[3:5])


def test_guidance_and_the_negative_prompt_change_the_image(model, six):
    """Both are arguments of the compiled program."""
    away = model.draw(PROMPTS, negative_prompt="b").images
    assert np.abs(away.astype(int) - six).max() > 1
    more = model.draw(PROMPTS, guidance=4.0).images
    assert np.abs(more.astype(int) - six).max() > 1


def test_settings_of_a_directory_come_from_its_configs(model):
    p = model.stages[0].settings
    assert (p.diffusion.predicts, p.latents.image_size, p.latents.scale) == ("v", 128, vae.SCALE)
    assert (p.sampler.name, p.sampler.steps, p.output_shape) == ("ddim", 2, (6, 4))
    assert published.DEFAULTS[:4] == ("plms", 50, 0.0, 7.5)


def test_the_card_of_a_drawing_over_a_picture_has_its_strength(model):
    """The card has the form of a line in metadata.jsonl."""
    before, after = model.card(), model.changed([{"steps": 4}], strengths=[0.5]).card()
    assert after == {**before, "steps": 4, "strength": 0.5, "steps_taken": 2}
    assert "steps" in before and "strength" not in before


def test_kernels_are_stored_in_the_computing_dtype_and_biases_in_float32(published):
    model = drawing.load(published / "d", dtype="bfloat16", **VALUES)
    layer = model.stages[0].params["params"]["init_conv"]
    assert (layer["kernel"].dtype, layer["bias"].dtype) == (jnp.bfloat16, jnp.float32)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return a workdir at step 0 with its VAE. Its texts are hashed words."""
    workdir = tmp_path_factory.mktemp("run")
    config = tiny.config(tiny.write_vae(workdir / "vae.npz"), diffusion__predicts="v")
    s = read_settings(config.to_dict())
    written_runs.write(workdir, config, read_settings, task.make_task(s, lookup.open_encoder(s.text), None).init)
    return workdir


@pytest.mark.gate
@pytest.mark.slow
def test_a_run_can_be_sampled_and_saved_as_a_diffusers_directory(run, tmp_path):
    model = drawing.load(run, steps=2)
    images = model.draw(["a red one"], seeds=[3]).images
    assert (images.shape, model.stages[0].settings.sampler.name) == ((1, 8, 8, 3), "ddim")
    written = opened.open_checkpoint(run)
    checkpoints.save_diffusers(written, tmp_path / "d")
    read = checkpoints.load(tmp_path / "d")
    assert checkpoints.equal(read, written)
    assert (read.predicts, read.latent_size, read.scale) == ("v", 4, 0.5)


@pytest.mark.parametrize(
    ("left_out", "values", "message"),
    [
        ((), {"prediction": "v"}, "has no tokenizer: give --tokenizer=FOLDER"),
        (("model.diffusion_model", "model_ema"), {}, "a.npz holds no UNet: choose a model"),
        ("first_stage_model", {}, "a.npz holds no VAE: give one with --vae_weights"),
        ("cond_stage_model", {}, "holds no text encoder: give one with --text_weigh"),
        ((), {}, "does not state whether its UNet predicts eps or v"),
    ],
)
def test_a_file_with_missing_parts_is_an_error_that_names_them(tmp_path, left_out, values, message):
    state = {n: w for n, w in compvis().items() if not n.startswith(left_out)}
    path = written(tmp_path / "a.npz", state)
    with pytest.raises(ValueError, match=re.escape(message)):
        drawing.load(path, config=tmp_path / "ldm.yaml", **values, **VALUES)


def test_a_tokenizer_with_more_tokens_than_the_text_encoder_is_an_error(published, tmp_path):
    shutil.copytree(published / "d", tmp_path / "d")
    names = '{"pad_token": "[PAD]", "eos_token": "<|endoftext|>"}'
    (tmp_path / "d" / "tokenizer" / "tokenizer_config.json").write_text(names)
    with pytest.raises(ValueError, match="tokenizer has 41 tokens, but the weights have only 40"):
        drawing.load(tmp_path / "d", **VALUES)


def test_wrong_numbers_of_seeds_or_images_and_odd_sizes_are_errors(model):
    with pytest.raises(ValueError, match="2 prompts and 1 seeds: give at least one prompt, and"):
        model.draw(["a", "b"], seeds=[0])
    model = drawing.StableDiffusion(model.stages, [{}])  # No chosen height and width.
    for name, size in (("height", (4, 5)), ("width", (5, 4))):
        with pytest.raises(ValueError, match=f"sampler.{name} is 5: it must be a multiple of 2"):
            model.draw("a", image=Image.new("RGB", size))
    with pytest.raises(ValueError, match="low_res is given, but Stable Diffusion has no stage"):
        model.draw("a", low_res=Image.new("RGB", (4, 4)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompts": 5}, "the prompt 5 is not a text"),
        ({"prompts": None}, "the prompt None is not a text"),
        ({"prompts": ["a", 5]}, "the prompt 5 is not a text"),
        ({"prompts": b"a"}, "the prompt b'a' is not a text"),
        ({"prompts": []}, "0 prompts and 0 seeds: give at least one"),
        ({"seeds": "3"}, "the seed '3' is not a whole number"),
        ({"seeds": [1.5]}, "the seed 1.5 is not a whole number"),
        ({"seeds": True}, "the seed True is not a whole number"),
        ({"seed": -1}, "the seed is -1: it must be"),
        ({"seed": 1, "seeds": [2]}, r"seed=1 and seeds=\[2\] exclude each other"),
        ({"num_images": 0}, "num_images is 0: it must be above 0"),
        ({"image": 5}, "the image is 5: give a path, a Pillow image or an array uint8"),
        ({"image": np.zeros((4, 4, 3))}, r"the image is float64\[4, 4, 3\]: give a path"),
        ({"image": "none.png"}, r"^image=none.png cannot be opened: \[Errno 2\]"),
        ({"strength": 0.5}, "a strength was given without an image to draw over: give an image"),
        ({"lora": "a.pt"}, r"lora cannot change after loading: pass it to load\(\)"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_wrong_arguments_of_draw_are_errors_of_one_line(model, arguments, message):
    with pytest.raises((ValueError, OSError), match=message) as raised:
        model.draw(**{"prompts": "a", **arguments})
    assert "\n" not in str(raised.value)


def test_draw_takes_the_seeds_and_the_number_of_images_of_the_command(model, six):
    pairs = model.draw(["c", "d"], seed=2, num_images=2)
    assert (pairs.prompts, pairs.seeds) == (["c", "c", "d", "d"], [2, 3, 4, 5])
    same(pairs[0], six[2])
    assert model.draw("d", seeds=np.arange(3, 5)).seeds == [3, 4]
    for three in (np.int64(3), jnp.uint32(3)):
        assert model.draw("d", seeds=three, num_images=2).seeds == [3, 4]


def test_pictures_to_draw_over_are_paths_arrays_or_images_of_pillow(model, tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (6, 4, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    half = np.arange(4) < np.full((6, 1), 2)  # bool [6, 4]
    masks = (half, jnp.asarray(half), Image.fromarray(np.uint8(255) * half))
    images = (pixels, Image.fromarray(pixels), tmp_path / "a.png")
    drawn = [
        model.draw("a", image=image, mask=mask, strength=0.5).images for image, mask in zip(images, masks, strict=True)
    ]
    np.testing.assert_array_equal(drawn[0], drawn[1])
    np.testing.assert_array_equal(drawn[0], drawn[2])


def test_load_takes_the_settings_of_files_and_lists_of_loras_like_the_commands(published, monkeypatch):
    merged = []
    apply = lambda specs, opened: merged.append(list(specs)) or opened
    monkeypatch.setattr(lora_files, "apply", apply)
    monkeypatch.setattr(lora_files, "add_words", lambda specs, *of_text: of_text)
    path, loras = published / "a.npz", ["a.pt:0.5", "b"]
    facts = {"tokenizer": published / "tokenizer", "config": published / "ldm.yaml"}
    for lora in (loras, "a.pt:0.5,b"):
        model = drawing.load(path, prediction="v", lora=lora, **facts, **VALUES)
        assert model.stages[0].settings.diffusion.predicts == "v"
        assert model.card()["lora"] == loras
    assert merged == [loras, loras]
    with pytest.raises(ValueError, match="prediction is 'w': choose from eps, v"):
        drawing.load(path, prediction="w")


def test_a_saved_drawing_has_its_prompts_seeds_and_settings(model, tmp_path):
    drawn = model.draw(["a", "b"], seeds=[3, 3], negative_prompt="c")
    drawn.save(tmp_path / "out")
    lines = [json.loads(x) for x in (tmp_path / "out/metadata.jsonl").read_text().splitlines()]
    assert [(x["text"], x["seed"], x["guidance"]) for x in lines] == [("a", 3, 3.0), ("b", 3, 3.0)]
    for line, pixels in zip(lines, drawn.images, strict=True):
        image = Image.open(tmp_path / "out" / line["file_name"])
        np.testing.assert_array_equal(np.asarray(image), pixels)
        start = f"{line['text']}\nNegative prompt: c\nSteps: 2, Sampler: DDIM, CFG scale: 3.0, Seed: 3"
        assert image.info["parameters"].startswith(f"{start}, Size: 4x6, Model: d, ")
    assert (tmp_path / "out/sheet.png").is_file()
    with pytest.raises(ValueError, match="out holds a drawing already: choose another folder"):
        drawn.save(tmp_path / "out")


def test_a_negative_prompt_without_effect_is_a_warning(model, caplog):
    model.draw("a", negative_prompt="b")
    assert not caplog.messages
    model.draw("a", negative_prompt="b", guidance=1)
    assert caplog.messages == ["the negative prompt 'b' has no effect at guidance 1: choose a larger guidance"]


def test_a_picture_that_is_stretched_by_more_than_a_twentieth_is_named(model, caplog):
    model.draw("a", image=Image.new("RGB", (62, 60)), height=4, width=4)
    assert "stretched" not in caplog.text
    model.draw("a", image=Image.new("RGB", (64, 60)), height=4, width=4)
    assert "the picture is 64x60, and is stretched to 4x4: crop it first" in caplog.text


def test_prompt_weights_does_not_change_the_pictures_of_prompts_without_weights(model, six):
    same(model.draw(PROMPTS, prompt_weights=True).images, six)


def test_prompt_weights_and_long_prompts_change_the_picture(model):
    drawn = lambda prompt, **values: model.draw(prompt, **values).images.astype(int)
    weighted = lambda prompt, **values: drawn(prompt, prompt_weights=True, **values)
    plain, long = drawn("a b"), "a b" + 80 * " c"
    for other in ("a (b:1.5)", "[a] b", "a BREAK b", long):
        assert np.abs(weighted(other) - plain).max() > 2
    assert np.abs(weighted(long + " b") - weighted(long)).max() > 0
    same(drawn(long + " b"), drawn(long))
    # The negative prompt and the empty text get as many chunks as the prompt.
    values = {"negative_prompt": "(d:1.5)", "guiding": "perp_neg"}
    assert np.abs(weighted(long, **values) - weighted(long)).max() > 0
    assert np.abs(weighted("a b", negative_prompt=long) - plain).max() > 2
    # A picture depends neither on the other prompts nor on their lengths.
    together = weighted(["a b", long])
    same(together[1:], weighted([long], seeds=[1]))
    assert np.abs(together[:1] - plain).max() <= 1
    assert model.changed([{"prompt_weights": True}]).card()["prompt_weights"] is True


def test_weights_that_are_not_read_are_counted_in_one_warning(model, monkeypatch):
    """absl logs only the first warning of a process."""
    warnings = []
    log = lambda level, message, n, *values: warnings.append((n, message % values))
    monkeypatch.setattr(drawing.logging, "log_first_n", log)
    model.tokenize(model.stages[0], ["a (b:1.3)", "a", "BREAK b"])
    ((most, line),) = warnings
    assert most == 1 and line.startswith(
        "2 of 3 prompts contain weights or BREAK, such as 'a (b:1.3)', which are read as words"
    )
    model.tokenize(model.stages[0], [r"\(b\)"])
    weighted = model.changed([{"prompt_weights": True}])
    weighted.tokenize(weighted.stages[0], ["(b)"])
    assert len(warnings) == 1
