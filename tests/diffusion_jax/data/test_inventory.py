"""The inventory of a data source: what is used, what is left out, and how it is printed."""

import json

from diffusion_jax.data.inventory import Inventory


def test_the_table_counts_used_files_and_names_the_first_of_each_reason():
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
