"""The sampling command: its files, image-to-image, warnings and errors."""

import numpy as np
import pytest
from PIL import Image

from tests.imagen_jax import commands

pytestmark = [pytest.mark.slow, pytest.mark.gate]


SMALL = ("--sampler=ddim", "--steps=4", "--height=6", "--width=4")


def draw(out, *arguments, devices=8):
    """Run the command, and return its metadata, its pictures and its messages."""
    return commands.draw("sd_jax.sample", out, *arguments, devices=devices)


@pytest.fixture(scope="module")
def four(published, tmp_path_factory):
    """Draw two images for each of two prompts. One is longer than the limit of 16 tokens."""
    long = " ".join(["a"] * 14 + ["b c"])
    prompts = (f"--model={published / 'd'}", f"--prompt={long}", "--prompt=b")
    more = ("--num_images=2", "--negative_prompt=c", "--guidance=3")
    return draw(tmp_path_factory.mktemp("four"), *prompts, *more, *SMALL)


def test_the_metadata_of_an_image_has_all_settings_to_sample_it_again(four, published):
    lines, images, _ = four
    assert [line["seed"] for line in lines] == [0, 1, 2, 3]
    assert {image.shape for image in images} == {(6, 4, 3)} and len({x.tobytes() for x in images}) == 4
    assert lines[3] == {
        "file_name": "seed_000003.png",
        "text": "b",
        "seed": 3,
        "model": str(published / "d"),
        "checkpoint": 0,
        "ema": "ema",
        "height": 6,
        "width": 4,
        "predicts": "v",
        "sampler": "ddim",
        "steps": 4,
        "eta": 0.0,
        "guidance": 3.0,
        "negative_prompt": "c",
        "grid": "leading",
        "end": "sigma_min",
        "offset": 1,
        "rho": 7.0,
        "sigma_min": 0.0,
        "sigma_max": 0.0,
        "unit_start": True,
    }


def test_a_rehearsal_samples_with_previews_and_writes_no_files(published, tmp_path):
    model = (f"--model={published / 'd'}", "--prompt=b", "--num_images=5")
    flags = (*SMALL, "--preview_every=3", "--rehearse", f"--out={tmp_path / 'out'}")
    ended = commands.succeed("sd_jax.sample", *model, *flags, devices=8)
    assert "draws          5 images of 4x6, for 1 texts" in ended.out
    assert "compiling" not in ended.err and list(tmp_path.iterdir()) == []


def test_a_long_prompt_warns_which_words_are_ignored(four):
    assert "the text encoder ignores 'b c' in the text '" in four[2]
    assert four[2].count("or reads only the first 16 tokens") == 1
    assert "4/4 images | " in four[2] and " images/s | 0:00:00 left" in four[2]


def test_image_to_image_changes_less_with_a_lower_strength(four, published, tmp_path):
    """Loads the model from a file, on one device. The picture is enlarged to the image's size."""
    Image.new("RGB", (2, 3), (250, 10, 120)).save(tmp_path / "start.png")
    model = (
        f"--model={published / 'a.npz'}",
        f"--tokenizer={published / 'tokenizer'}",
        f"--config={published / 'ldm.yaml'}",
    )
    picture = f"--image={tmp_path / 'start.png'}"
    arguments = (*model, "--prediction=v", "--prompt=b", picture, *SMALL)
    quarter = ("--strength=0.25", "--preview_every=1")
    some, few, _ = draw(tmp_path / "0.25", *arguments, *quarter, devices=1)
    every, all_steps, _ = draw(tmp_path / "1", *arguments, "--strength=1", devices=1)
    assert (some[0]["strength"], some[0]["steps_taken"]) == (0.25, 1)
    assert some[0]["image"] == str(tmp_path / "start.png") and "strength" not in every[0]
    # The preview has 3x2 latents, enlarged, and a caption with the noise level.
    with Image.open(tmp_path / "0.25" / "preview.png") as preview:
        assert preview.size == (136, 216)
    assert not (tmp_path / "1" / "preview.png").exists()
    assert np.abs(few[0].astype(int) - all_steps[0]).max() > 5
