"""The same pictures and captions in every supported format give the same training batches.

Batches are opened like in each system's training command.
"""

import functools
import json
import pathlib
import shutil

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

import imagen_jax.train
import sd_jax.train
from diffusion_jax.data import tars
from diffusion_jax.devices import sharding
from diffusion_jax.examples.digits import rendering as digits
from imagen_jax.settings import read_settings
from tests.diffusion_jax import toy
from tests.sd_jax import tiny

NUM = 12


@pytest.fixture(scope="module")
def forms(tmp_path_factory):
    """A folder with the pictures in every format, each written by its own tool."""
    import datasets

    root = tmp_path_factory.mktemp("forms")
    plain = digits.write_examples(root / "folder", NUM, size=toy.SIZE)
    names = sorted(path.stem for path in plain.glob("*.png"))
    captions = {name: (plain / f"{name}.txt").read_text().strip() for name in names}
    for form in ("json", "jsonl", "img2dataset/00000"):
        (root / form).mkdir(parents=True)
        for name in names:
            shutil.copy(plain / f"{name}.png", root / form)
    members = []
    for name, caption in captions.items():
        beside = json.dumps({"caption": caption})
        (root / "json" / f"{name}.json").write_text(beside)
        image = (plain / f"{name}.png").read_bytes()
        members.append({tars.KEY: name.encode(), "png": image, "json": beside.encode()})
    rows = [{"file_name": f"{name}.png", "text": text} for name, text in captions.items()]
    (root / "jsonl/metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    table = pyarrow.table({"key": names, "caption": list(captions.values())})
    pyarrow.parquet.write_table(table, root / "img2dataset/00000.parquet")
    tars.write(root / "shard.tar", members)
    _write_huggingface(root, [m["png"] for m in members], list(captions.values()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", root / "cache")
        yield root


def _write_huggingface(root: pathlib.Path, images: list[bytes], captions: list[str]) -> None:
    """Write a DatasetDict with save_to_disk, and in the layout of a clone from the Hub."""
    import datasets

    features = datasets.Features({"image": datasets.Image(), "text": datasets.Value("string")})
    columns = {"image": [{"bytes": i, "path": None} for i in images], "text": captions}
    rows = datasets.Dataset.from_dict(columns, features=features)
    datasets.DatasetDict({"train": rows, "test": rows}).save_to_disk(root / "saved")
    (root / "clone/data").mkdir(parents=True)
    for split in ("train", "test"):
        rows.to_parquet(root / f"clone/data/{split}-00000-of-00001.parquet")


def imagen_batches(data, mesh):
    """Return the batches of imagen_jax.train for this data group."""
    from configs import quickstart

    c = quickstart.get_config()
    c.unet.update(image_size=toy.SIZE, patch=2, embed_dim=32, head_dim=32)
    c.optimizer.update(schedule="constant")
    c.data.update(data)
    c.update(steps=2, batch_size=8)
    s = read_settings(c.to_dict())
    return imagen_jax.train.open_batches(s, toy.ENCODER, mesh)


def sd_batches(data, mesh):
    """Return the batches of sd_jax.train for this data group."""
    s = tiny.settings(**{f"data__{name}": value for name, value in data.items()})
    return sd_jax.train.open_batches(s, toy.ENCODER, None, mesh)


@functools.cache
def first_batches(open_batches, source, path, text):
    """Return two batches of eight, of which the second extends into the second epoch."""
    data = {"source": source, "path": path, "text": text}
    with open_batches(data, sharding.make_mesh(1, 1, 1)) as batches:
        return [next(batches), next(batches)]


@pytest.mark.parametrize("open_batches", [imagen_batches, sd_batches])
@pytest.mark.parametrize(
    ("source", "path", "text"),
    [
        ("folder", "json", "json:caption"),
        ("folder", "jsonl", "jsonl:text"),
        ("folder", "img2dataset", "parquet:caption"),
        ("webdataset", "shard.tar", "json:caption"),
        ("arrow", "saved@train", "text"),
        ("huggingface", "saved@test", "text"),
        ("huggingface", "clone@train", "text"),
        ("huggingface", "clone/data/test-00000-of-00001.parquet", "text"),
    ],
)
def test_every_data_format_gives_the_same_training_batches(forms, open_batches, source, path, text):
    expected = first_batches(open_batches, "folder", str(forms / "folder"), "txt")
    batches = first_batches(open_batches, source, str(forms / path), text)
    for batch, other in zip(batches, expected, strict=True):
        assert batch.keys() == other.keys() and len(batch) > 1
        for name in batch:
            np.testing.assert_array_equal(batch[name], other[name])
