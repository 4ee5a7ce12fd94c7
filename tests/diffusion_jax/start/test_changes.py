"""Captions, damaged records and a text encoder change the config that start writes."""

import json
import shutil

import numpy as np
import pytest

from diffusion_jax.config.settings import Data
from diffusion_jax.data import split
from diffusion_jax.data.records import Record, Records
from diffusion_jax.data.sources.folder import open_folder
from diffusion_jax.examples.digits import rendering as digits
from diffusion_jax.start import changes, training_pictures

BASE = "base32_8m"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return digits.write_examples(tmp_path_factory.mktemp("changes") / "set", 20, size=16)


def config(folder, weights="", uncaptioned="error"):
    """Return the complete config that start writes for a data set."""
    photos = training_pictures.read(Data("folder", str(folder), uncaptioned=uncaptioned))
    return changes.full_config(BASE, changes.of_data(BASE, photos, weights))


def test_start_derives_prompts_and_the_number_of_tokens_from_the_captions(folder):
    c = config(folder)
    captions = set(open_folder(folder).texts(range(20)))
    assert len(set(c["prompts"])) == 8 and set(c["prompts"]) <= captions
    # Captions have six words, and this is a CPU.
    assert c["text"]["max_tokens"] == 8 and c["unet"]["dtype"] == "float32"
    assert (c["data"]["path"], c["data"]["max_broken"]) == (str(folder), 0.1)


@pytest.mark.parametrize(("count", "batch_size"), [(20, 16), (64, 48), (200, 64)])
def test_start_chooses_a_batch_that_repeats_no_picture(tmp_path, count, batch_size):
    """The batch size is a multiple of 8 devices. Of 64 pictures, 10 are held out; of 20, none."""
    c = config(digits.write_examples(tmp_path / "set", count, size=16))
    assert c["batch_size"] == batch_size


class Captions(Records):
    """Records with captions only."""

    def __init__(self, texts):
        self._texts = texts

    def __len__(self):
        return len(self._texts)

    def read(self, indices):
        return [Record(b"", self._texts[i], str(i)) for i in indices]


def test_prompts_are_short_captions_with_frequent_words():
    texts = ["red star, stars", *["star, stars"] * 2, *["arrow, arrows"] * 2, "baggage check in, aiga", "", "→"]
    # The rarest words of captions: "star" occurs 3 times, "arrow" 2, "red" and "aiga" once.
    expected = ("star, stars", "arrow, arrows", "baggage check in, aiga", "red star, stars")
    assert changes.prompts(Captions(texts)) == expected
    assert changes.prompts(Captions(["", "→"])) == ("",) * 8
    assert len(changes.prompts(Captions([f"word{i}" for i in range(20)]))) == 8


def test_aspect_buckets_have_the_size_of_the_stage(folder):
    photos = training_pictures.read(Data("folder", str(folder)))
    of_data = lambda base: changes.of_data(base, photos, "", keep_shapes=True)
    data = {base: changes.full_config(base, of_data(base))["data"] for base in (BASE, "sd64_11m")}
    assert data["base32_8m"]["aspect_buckets"] == ((24, 40), (32, 32), (40, 24))
    assert data["sd64_11m"]["aspect_buckets"] == ((48, 80), (64, 64), (80, 48))


def test_max_broken_is_twice_the_share_of_damaged_records(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "set")
    (tmp_path / "set/00003.png").write_bytes(b"none")
    (tmp_path / "set/00007.png").write_bytes(b"none")
    assert config(tmp_path / "set")["data"]["max_broken"] == 0.2


def test_without_captions_there_is_no_text_dropout_and_no_guidance(folder, tmp_path):
    (tmp_path / "0.png").write_bytes((folder / "00000.png").read_bytes())
    c = config(tmp_path, uncaptioned="empty")
    assert c["prompts"] == ("",) * 8 and c["sampler"]["guidance"] == 1.0
    assert c["evaluation"]["guidance"] == (1.0,)
    assert (c["text"]["drop_prob"], c["data"]["uncaptioned"]) == (0.0, "empty")


@pytest.mark.parametrize(
    ("encoder_config", "group"),
    [
        ({"model_type": "t5", "d_model": 64}, ("t5", 64, 16, 16)),
        ({"model_type": "clip", "text_config": {"hidden_size": 48}}, ("clip", 48, 77, 512)),
    ],
)
def test_the_folder_of_text_weights_determines_the_text_encoder(folder, tmp_path, encoder_config, group):
    (tmp_path / "config.json").write_text(json.dumps(encoder_config))
    text = config(folder, str(tmp_path))["text"]
    assert tuple(text[k] for k in ("encoder", "width", "max_tokens", "read_tokens")) == group
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    with pytest.raises(ValueError, match=r"--text_weights=.* has the model_type 'bert': give a"):
        config(folder, str(tmp_path))


def test_a_written_config_has_comments_and_reads_back_unchanged():
    own = {
        "steps": (12_345, "A night."),
        "prompts": (('a "red" seven', "é\\"), ""),
        "data.path": ("it's\nthere", ""),
        "unet.dtype": ("bfloat16", ""),
    }
    text = changes.source("quickstart", own, 'Of """ and \\ in it.')
    assert "    c.steps = 12_345  # A night.\n" in text
    config = changes.full_config("quickstart", own)
    assert (config["steps"], config["data"]["path"]) == (12_345, "it's\nthere")
    assert config["prompts"] == ('a "red" seven', "é\\") and config["unet"]["patch"] == 4
    compile(text, "mine.py", "exec")


@pytest.mark.parametrize(("count", "least", "most"), [(5, 0, 0), (23, 0, 0), (24, 8, 12), (64, 8, 9), (1000, 80, 120)])
def test_a_tenth_of_the_pictures_is_held_out_and_at_least_eight(count, least, most):
    share = changes.held_out(Captions([""] * count))
    keys = np.arange(count, dtype=np.uint64)
    assert least <= (split.hashed(keys) < share).sum() <= most
    assert (share == 0.1) == (count == 1000)
