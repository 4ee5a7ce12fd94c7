"""The inventory of a data source: counts of used and skipped files, and how it is printed."""

import json

import numpy as np

from diffusion_jax.config.settings import Data
from diffusion_jax.data import sources, split
from diffusion_jax.data.inventory import Inventory
from diffusion_jax.examples.digits import rendering as digits


def test_an_inventory_lists_numbers_of_used_files_and_examples_of_skipped_files():
    inventory = Inventory()
    inventory.add("pictures", ["0.jpg", "1.jpg"])
    inventory.add("texts", [], 2)
    inventory.add("format", ["a.svg", "b\x1b.mp4", "c.svg", "d.svg"])
    inventory.add("no_caption", ["e.png"])
    inventory.add("link", [])
    other = Inventory(json.loads(json.dumps(inventory.saved())))
    other.update(inventory)
    assert inventory.left_out() == {"format": 4, "no_caption": 1}
    assert inventory.rows() == [
        ("files", "2 pictures, 2 texts"),
        ("left out", r"4 format: a.svg, b\x1b.mp4, c.svg, ..."),
        ("left out", "1 no_caption: e.png"),
    ]
    assert other.rows() == [
        ("files", "4 pictures, 4 texts"),
        ("left out", r"8 format: a.svg, b\x1b.mp4, c.svg, ..."),
        ("left out", "2 no_caption: e.png, e.png"),
    ]


def test_mixtures_and_splits_combine_the_inventories_of_their_sources(tmp_path):
    for name in ("a", "b"):
        digits.write_examples(tmp_path / name, 4, size=8)
        (tmp_path / name / f"{name}.svg").touch()
    parts = [(1, "folder", str(tmp_path / name), "txt") for name in ("a", "b")]
    opened = sources.open_pictures(Data("mixture", mixture=parts), 8)
    training, heldout = split.split(opened, 0.5)
    rows = [("files", "8 pictures, 8 texts"), ("left out", "2 format: a.svg, b.svg")]
    assert opened.inventory().rows() == training.inventory().rows() == rows
    assert len(heldout.read(np.arange(len(heldout)))[1]) == len(heldout) > 0
    assert opened.skipped() == {"format": 2}
