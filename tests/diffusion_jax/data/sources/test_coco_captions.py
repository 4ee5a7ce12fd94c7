"""The data set coco_captions of TFDS, prepared by TFDS in its default format, TFRecord.

TensorFlow writes it in a separate process. Reading it does not import TensorFlow.
"""

import subprocess
import sys

import numpy as np
import pytest
import tensorflow_datasets as tfds
from PIL import Image
from tensorflow_datasets.core.utils import file_utils

from diffusion_jax.data import prompts
from diffusion_jax.data.captions import every, first
from diffusion_jax.data.sources.tfds import open_split
from diffusion_jax.metrics import images
from tests.imagen_jax import commands
from tests.imagen_jax.conftest import TINY

pytestmark = pytest.mark.slow
NAME = "tfds:coco_captions@val::captions/text"


@pytest.fixture(scope="module")
def coco(tmp_path_factory):
    """The folder of the data set's version, which TFDS also finds by name."""
    root = tmp_path_factory.mktemp("coco")
    program = "tests.diffusion_jax.data.sources.write_coco_captions"
    call = [sys.executable, "-m", program, str(root / "downloads"), str(root / "tfds")]
    subprocess.run(call, check=True, capture_output=True, cwd=commands.ROOT)
    tfds.core.add_data_dir(root / "tfds")
    yield next((root / "tfds/coco_captions/2014").iterdir())
    file_utils.clear_registered_data_dirs()


def test_coco_captions_are_read_by_name_at_random_positions(coco):
    assert len(list(coco.glob("*.tfrecord-*"))) == 4
    records = open_split("coco_captions@val", "captions/text")
    several = records.texts(range(len(records)))
    texts = [first(text) for text in several]
    assert [len(every(text)) for text in several] == [5] * 8
    assert sorted(texts) == [f"number {i}, caption 0" for i in range(52, 60)]
    assert [record.text for record in records.read([5, 2])] == [several[5], several[2]]


def test_coco_captions_can_be_prompts(coco):
    captions = [f"number {i}, caption 0" for i in range(52, 60)]
    assert sorted(prompts.read(NAME)) == captions
    assert prompts.read(NAME, 3) == prompts.read(NAME, 3) and set(prompts.read(NAME, 3)) < {*captions}


def test_coco_pictures_can_be_reference_images_of_metrics(coco):
    source = images.DecodedFiles(images.open_files(NAME))
    pixels, status = source.read(np.arange(len(source)))
    assert status.tolist() == [0] * 8
    for image, text in zip(pixels, prompts.read(NAME), strict=True):
        number = int(text.removeprefix("number ").partition(",")[0])
        name = f"downloads/val2014/val2014/COCO_val2014_{number:012}.jpg"
        with Image.open(coco.parents[3] / name) as original:
            np.testing.assert_array_equal(image, np.asarray(original))


def test_train_accepts_coco_captions(coco, tmp_path):
    ended = commands.run(
        "train",
        *TINY,
        f"--workdir={tmp_path}/run",
        "--config.steps=4",
        "--config.save_every=4",
        "--config.data.source=tfds",
        f"--config.data.path={coco}@train",
        "--config.data.text=captions/text",
        devices=1,
    )
    assert ended.code == 0, ended.err
    assert (tmp_path / "run/checkpoints/4").is_dir()
