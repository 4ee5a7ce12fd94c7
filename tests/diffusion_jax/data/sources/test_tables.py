"""Captions in metadata.jsonl, in img2dataset's parquet and in json beside the images."""

import json

import pyarrow
import pyarrow.parquet
import pytest

from diffusion_jax.data.sources.folder import Folder
from diffusion_jax.data.transforms import Unusable


def images(root, *names):
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(name.encode())


def texts(folder):
    return {record.name: record.text for record in folder.read(range(len(folder)))}


def test_jsonl_names_files_beside_itself(tmp_path):
    images(tmp_path, "train/a.png", "train/b/c.jpg", "train/d.jpg")
    rows = [
        {"file_name": "a.png", "text": " one "},
        {"file_name": "./b/c.jpg", "text": "two"},
        {"file_name": "d.jpg", "text": None},
        {"file_name": "absent.jpg", "text": "three"},
    ]
    lines = "\n".join(map(json.dumps, rows)) + "\n\n"
    (tmp_path / "train/metadata.jsonl").write_text(lines)
    with pytest.raises(ValueError, match=r"1 of 3 images have no text .*: train/d\.jpg"):
        Folder(tmp_path, text="jsonl:text")
    folder = Folder(tmp_path, text="jsonl:text", uncaptioned="drop")
    assert texts(folder) == {"train/a.png": "one", "train/b/c.jpg": "two"}
    assert folder.texts([1, 0]) == ["two", "one"]
    assert folder.left_out() == {"no_caption": 1, "row_without_image": 1}


def test_img2datasets_folders_and_parquet(tmp_path):
    images(tmp_path, "00000/000000000.jpg", "00000/000000002.jpg", "00001/000010000.webp")
    for shard, keys in (("00000", range(3)), ("00001", [10000])):
        columns = {
            "key": [f"{key:09}" for key in keys],
            "caption": [f"caption {key}" for key in keys],
            "status": ["failed_to_download" if key == 1 else "success" for key in keys],
        }
        pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / f"{shard}.parquet")
    folder = Folder(tmp_path, text="parquet:caption")
    assert texts(folder) == {
        "00000/000000000.jpg": "caption 0",
        "00000/000000002.jpg": "caption 2",
        "00001/000010000.webp": "caption 10000",
    }
    with pytest.raises(
        ValueError,
        match=r"a 'text'; the columns are caption, key, status",
    ):
        Folder(tmp_path, text="parquet:text")


def test_json_beside_an_image(tmp_path):
    images(tmp_path, "a.jpg", "b.jpg", "c.jpg")
    (tmp_path / "a.json").write_text('{"caption": "one "}')
    (tmp_path / "b.json").write_text('{"caption": null}')
    (tmp_path / "c.json").write_text('{"caption"')
    found = list(texts(Folder(tmp_path, text="json:caption")).values())
    assert found[0] == "one"
    assert [text.reason for text in found[1:] if isinstance(text, Unusable)] == [
        "no_caption",
        "broken_text",
    ]


def test_tables_that_say_nothing_are_named(tmp_path):
    images(tmp_path, "a.jpg")
    with pytest.raises(ValueError, match=r"no \.jsonl files in .*, but data\.text=jsonl:"):
        Folder(tmp_path, text="jsonl:text")
    (tmp_path / "m.jsonl").write_text('{"file_name": "a.jpg", "caption": "x"}')
    with pytest.raises(ValueError, match=r"'text'; the columns are caption, file_name"):
        Folder(tmp_path, text="jsonl:text")
    (tmp_path / "m.jsonl").write_text('{"file_name": "a.jpg"}\n{')
    with pytest.raises(ValueError, match=r"m\.jsonl, line 2: "):
        Folder(tmp_path, text="jsonl:text")
