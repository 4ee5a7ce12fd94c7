"""Prepare TFDS's coco_captions with TFDS's code, from a few pictures in COCO's layout.

    python -m tests.diffusion_jax.data.sources.write_coco_captions DOWNLOADS DATA_DIR

Picture i has the grey level 4 i, and its captions are "number i, caption 0" to 4. 1 to 24 are the
split train, 50 restval, 51 test, 52 to 59 val.
"""

import json
import pathlib
import sys

import numpy as np
import tensorflow_datasets as tfds
from PIL import Image

_PLACES = {"train_images": "train2014", "validation_images": "val2014", "karpathy_and_li_splits": "."}


def write_downloads(root: pathlib.Path) -> None:
    """Write the files that TFDS would have downloaded and unpacked."""
    captioned = []
    annotations = root / "annotations/annotations"
    annotations.mkdir(parents=True)
    for split, numbers in {"train2014": range(1, 25), "val2014": range(50, 60)}.items():
        (root / split / split).mkdir(parents=True)
        rows = []
        for i in numbers:
            name = f"COCO_{split}_{i:012}.jpg"
            grey = Image.fromarray(np.full((16, 16, 3), 4 * i, np.uint8))
            grey.save(root / split / split / name, quality=95)
            rows.append({"id": i, "file_name": name, "height": 16, "width": 16})
            part = {50: "restval", 51: "test"}.get(i, "train" if i < 50 else "val")
            texts = [{"sentid": 10 * i + j, "raw": f"number {i}, caption {j}"} for j in range(5)]
            captioned.append({"split": part, "filename": name, "sentences": texts})
        categories = [{"id": i, "name": str(i)} for i in range(80)]
        listed = {"images": rows, "categories": categories, "annotations": []}
        (annotations / f"instances_{split}.json").write_text(json.dumps(listed))
    (root / "dataset_coco.json").write_text(json.dumps({"images": captioned}))


if __name__ == "__main__":
    downloads, data_dir = map(pathlib.Path, sys.argv[1:])
    write_downloads(downloads)
    tfds.download.DownloadManager.download_and_extract = lambda self, urls: {
        name: str(downloads / _PLACES.get(name, "annotations")) for name in urls
    }
    tfds.builder("coco_captions", data_dir=data_dir).download_and_prepare()
