"""The tiny replacements for the benchmark's data and scoring networks load like the real files."""

import jax
import numpy as np
import pytest

from configs import sd2_mlperf_miniature
from diffusion_jax.examples.digits import rendering
from diffusion_jax.metrics import clip_towers, extractors
from sd_jax.mlperf import coco, miniature, rules
from sd_jax.settings import read_settings
from sd_jax.weights import names


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("miniature")
    miniature.write(path)
    return path


def test_each_caption_has_a_row_in_the_table_and_a_picture(folder):
    rows = coco.read_tsv(folder / "captions.tsv")
    assert [row.caption for row in rows] == rendering.seen_prompts() + rendering.heldout_prompts()
    assert len(list((folder / "pictures").glob("*.png"))) == len(rows) == 290


def test_inception_has_random_weights_and_the_real_shapes(folder):
    inception = extractors.load_inception(str(folder / "inception.safetensors"))
    assert inception.width == 2048 and not inception.official


def test_every_clip_score_meets_the_target_and_depends_on_image_and_caption(folder):
    clip = clip_towers.load(folder / "clip")
    captions = rendering.heldout_prompts()
    texts = extractors.on_host(clip.text)(clip.tokenize(captions))
    noise = np.random.default_rng(0).uniform(0, 255, (4, 16, 16, 3)).astype(np.float32)
    images = extractors.on_host(clip.image)(noise)
    unit = lambda rows: rows / np.linalg.norm(rows, axis=1, keepdims=True)
    scores = unit(texts) @ unit(images).T
    assert rules.TARGETS["CLIP"] < scores.min() and scores.max() < 1
    assert len(np.unique(scores.round(6))) == scores.size


def test_the_config_evaluates_all_captions_every_100_steps():
    s = read_settings(sd2_mlperf_miniature.get_config().to_dict())
    rules.check(s)
    changed = {line.split(" is ")[0] for line in rules.departures(s)}
    assert changed == {  # The checker of logs requires all other values.
        "text.drop_prob",
        "latents.image_size",
        "latents.pixels",
        "evaluation.guidance",
        "evaluation.every in steps",
        "evaluation.num_prompts",
    }
    shapes = names.abstract_unet(s.unet, s.text.width)
    parameters = sum(leaf.size for leaf in jax.tree.leaves(shapes))
    assert f"{parameters:,}" in str(sd2_mlperf_miniature.__doc__)
    assert rules.steps_between(s) == 100 and s.run.steps % 100 == 0
    assert s.evaluation.num_prompts == 290 and s.data.source == "moments"
