"""The sampling command: what it writes, image-to-image, what it warns of, its errors."""

import json

import numpy as np
import pytest
from PIL import Image

from tests.imagen_jax import commands

pytestmark = [pytest.mark.slow, pytest.mark.gate]


def run(*arguments, devices=8):
    return commands.run("sd_jax.sample", *arguments, devices=devices)


SMALL = ("--sampler=ddim", "--steps=4", "--height=6", "--width=4")


def draw(out, *arguments, devices=8):
    """Runs the command; returns its metadata, the pictures that it names, and its messages."""
    ended = run(f"--out={out}", *arguments, devices=devices)
    assert ended.code == 0, ended.err
    lines = [json.loads(line) for line in (out / "metadata.jsonl").read_text().splitlines()]
    return lines, [np.asarray(Image.open(out / line["file_name"])) for line in lines], ended.err


@pytest.fixture(scope="module")
def four(published, tmp_path_factory):
    """Two images of each of two prompts, one of them longer than the 16 tokens that are read."""
    out = tmp_path_factory.mktemp("four")
    long = " ".join(["a"] * 14 + ["b c"])
    prompts = (f"--model={published / 'd'}", f"--prompt={long}", "--prompt=b")
    more = ("--num_images=2", "--negative_prompt=c", "--guidance=3")
    return out, *draw(out, *prompts, *more, *SMALL)


def test_each_image_has_a_line_with_what_draws_it_again(four, published):
    _, lines, _, _ = four
    assert [line["seed"] for line in lines] == [0, 1, 2, 3]
    assert lines[3] == {
        "file_name": "seed_000003.png", "text": "b", "seed": 3, "model": str(published / "d"),
        "checkpoint": 0, "ema": "ema", "height": 6, "width": 4, "predicts": "v", "sampler": "ddim",
        "steps": 4, "eta": 0.0, "guidance": 3.0, "negative_prompt": "c", "grid": "leading",
        "end": "sigma_min", "offset": 1, "rho": 7.0, "sigma_min": 0.0, "sigma_max": 0.0,
        "unit_start": True,
    }  # fmt: skip


def test_the_pictures_are_the_named_files_and_a_sheet(four):
    out, lines, images, _ = four
    names = {line["file_name"] for line in lines}
    assert {path.name for path in out.iterdir()} == names | {"sheet.png", "metadata.jsonl"}
    assert {image.shape for image in images} == {(6, 4, 3)}
    assert len({image.tobytes() for image in images}) == 4


def test_a_rehearsal_makes_previews_and_pictures_and_leaves_nothing(published, tmp_path):
    model = (f"--model={published / 'd'}", "--prompt=b", "--num_images=5")
    ended = run(f"--out={tmp_path / 'out'}", *model, *SMALL, "--preview_every=3", "--rehearse")
    assert ended.code == 0 and "draws          5 images of 4x6, for 1 texts" in ended.out, ended.err
    assert "compiling" not in ended.err and list(tmp_path.iterdir()) == []


def test_what_a_long_prompt_loses_is_shown(four):
    assert "the text encoder ignores 'b c' in the text '" in four[3]
    assert four[3].count("or reads only the first 16 tokens") == 1
    assert "4/4 images | " in four[3] and " images/s | 0:00:00 left" in four[3]


def test_image_to_image_keeps_more_at_less_strength(four, published, tmp_path):
    """From the file, on one device, of a picture that is enlarged to the size that is drawn."""
    Image.new("RGB", (2, 3), (250, 10, 120)).save(tmp_path / "start.png")
    model = (f"--model={published / 'a.npz'}", f"--tokenizer={published / 'tokenizer'}",
             f"--config={published / 'ldm.yaml'}")  # fmt: skip
    picture = f"--image={tmp_path / 'start.png'}"
    arguments = (*model, "--prediction=v", "--prompt=b", picture, *SMALL)
    quarter = ("--strength=0.25", "--preview_every=1")
    some, few, _ = draw(tmp_path / "0.25", *arguments, *quarter, devices=1)
    every, all_steps, _ = draw(tmp_path / "1", *arguments, "--strength=1", devices=1)
    assert (some[0]["strength"], some[0]["steps_taken"]) == (0.25, 1)
    assert some[0]["image"] == str(tmp_path / "start.png") and "strength" not in every[0]
    # A sketch of 3x2 latents, enlarged, over its noise level.
    with Image.open(tmp_path / "0.25" / "preview.png") as preview:
        assert preview.size == (136, 216)
    assert not (tmp_path / "1" / "preview.png").exists()
    assert np.abs(few[0].astype(int) - all_steps[0]).max() > 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give exactly one of --workdir=FOLDER (a training run) and --model=PATH"),
        (
            ("--workdir={d}", "--prompt=a", "--dtype=float32"),
            "--prediction, --tokenizer, --norm_groups, --dtype, --config and --lora need --mod",
        ),
        (("--model={d}",), "there is nothing to draw: give --prompt=TEXT or --prompts=FILE"),
        (("--model={d}", "--prompts=nope.txt"), "nope.txt"),
        (("--model={d}", "--prompt=a", "--height=9"), "sampler.height is 9: it must be a mult"),
        (("--model={d}", "--prompt=a", "--sampler=ddimm"), "sampler.name is 'ddimm': did you mean"),
        (("--model={d}", "--prompt=a", "--steps=1001"), "sampler.steps is 1001: it must be"),
        (("--model=nope", "--prompt=a"), "nope"),
        (("--model={d}", "--prompt=a", "--image=nope.png"), "nope.png"),
    ],
)
def test_a_mistake_is_one_line(published, tmp_path, arguments, message):
    given = (argument.format(d=published / "d") for argument in arguments)
    ended = run(f"--out={tmp_path / 'out'}", *given)
    assert (ended.code, message in ended.err) == (2, True), ended.err
    assert ended.err.startswith("error: ") and ended.err.count("\n") == 1, ended.err
    assert not (tmp_path / "out").exists()
