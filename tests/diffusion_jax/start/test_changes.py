"""What captions, damaged records and a text encoder change of a config."""

import json
import shutil

import pytest

from diffusion_jax.config.settings import Data
from diffusion_jax.data.records import Record, Records
from diffusion_jax.data.sources.folder import Folder
from diffusion_jax.examples.digits import rendering as digits
from diffusion_jax.start import changes, training_pictures, written
from diffusion_jax.start.stages import Stage

BASE = Stage("base32_8m", "", "imagen_jax.train", lambda s, mesh: pytest.fail("nothing is opened"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return digits.write_examples(tmp_path_factory.mktemp("changes") / "set", 20, size=16)


def config(folder, weights="", uncaptioned="error"):
    """The config that a set becomes, whole."""
    photos = training_pictures.read(Data("folder", str(folder), uncaptioned=uncaptioned))
    own = changes.of_data(photos, weights)(BASE)
    return written.config(BASE.base, own)


def test_captions_give_the_prompts_and_the_tokens(folder):
    c = config(folder)
    captions = set(Folder(folder).texts(range(20)))
    assert len(set(c["prompts"])) == 8 and set(c["prompts"]) <= captions
    assert c["text"]["max_tokens"] == 8 and c["unet"]["dtype"] == "float32"  # Six words; a CPU.
    assert (c["data"]["path"], c["data"]["max_broken"]) == (str(folder), 0.1)


class Captions(Records):
    """Records of which only the captions are read."""

    def __init__(self, texts):
        self._texts = texts

    def __len__(self):
        return len(self._texts)

    def read(self, indices):
        return [Record(b"", self._texts[i], str(i)) for i in indices]


def test_prompts_are_short_captions_of_frequent_words():
    texts = ["red star, stars", "star, stars", "star, stars", "arrow, arrows", "arrow, arrows",
             "baggage check in, aiga", "", "→"]  # fmt: skip
    # Rarest words: "star" 3 times, "arrow" 2, and once "red" and "aiga".
    expected = ("star, stars", "arrow, arrows", "baggage check in, aiga", "red star, stars")
    assert changes.prompts(Captions(texts)) == expected
    assert changes.prompts(Captions(["", "→"])) == ("",) * 8
    assert len(changes.prompts(Captions([f"word{i}" for i in range(20)]))) == 8


def test_shapes_that_are_kept_are_those_of_the_stage(folder):
    photos = training_pictures.read(Data("folder", str(folder)))
    of_data = changes.of_data(photos, "", keep_shapes=True)
    data = {base: written.config(base, of_data(BASE._replace(base=base)))["data"]
            for base in ("base32_8m", "sd64_11m")}  # fmt: skip
    assert data["base32_8m"]["aspect_buckets"] == ((24, 40), (32, 32), (40, 24))
    assert data["sd64_11m"]["aspect_buckets"] == ((48, 80), (64, 64), (80, 48))


def test_damaged_records_that_are_there_are_allowed_twice(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "set")
    (tmp_path / "set/00003.png").write_bytes(b"none")
    (tmp_path / "set/00007.png").write_bytes(b"none")
    assert config(tmp_path / "set")["data"]["max_broken"] == 0.2


def test_without_captions_nothing_is_dropped_or_guided(folder, tmp_path):
    (tmp_path / "0.png").write_bytes((folder / "00000.png").read_bytes())
    c = config(tmp_path, uncaptioned="empty")
    assert c["prompts"] == ("",) * 8 and c["sampler"]["guidance"] == 1.0
    assert c["evaluation"]["guidance"] == (1.0,)
    assert (c["text"]["drop_prob"], c["data"]["uncaptioned"]) == (0.0, "empty")


@pytest.mark.parametrize(
    ("said", "group"),
    [
        ({"model_type": "t5", "d_model": 64}, ("t5", 64, 16, 16)),
        ({"model_type": "clip", "text_config": {"hidden_size": 48}}, ("clip", 48, 77, 77)),
    ],
)
def test_a_folder_of_an_encoder_reads_the_captions(folder, tmp_path, said, group):
    (tmp_path / "config.json").write_text(json.dumps(said))
    text = config(folder, str(tmp_path))["text"]
    assert tuple(text[k] for k in ("encoder", "width", "max_tokens", "read_tokens")) == group
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    with pytest.raises(ValueError, match=r"--text_weights=.* has the model_type 'bert': give a"):
        config(folder, str(tmp_path))
