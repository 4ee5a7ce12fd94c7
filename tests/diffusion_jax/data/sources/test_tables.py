"""Captions in tables (csv, tsv, jsonl, parquet, COCO), and in JSON files beside the images."""

import json
import re

import pyarrow
import pyarrow.parquet
import pytest

from diffusion_jax.config import picture_fields
from diffusion_jax.data.captions import Captions
from diffusion_jax.data.decoding import Unusable
from diffusion_jax.data.sources.folder import open_folder


def images(root, *names):
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(name.encode())


def texts(folder):
    return {record.name: record.text for record in folder.read(range(len(folder)))}


def test_jsonl_rows_name_images_relative_to_the_table(tmp_path):
    images(tmp_path, "train/a.png", "train/b/c.jpg", "train/d.jpg")
    rows = {"a.png": " one ", "./b/c.jpg": "two", "d.jpg": None, "absent.jpg": "three"}
    lines = "".join(json.dumps({"file_name": name, "text": text}) + "\n" for name, text in rows.items()) + "\n"
    (tmp_path / "train/metadata.jsonl").write_text(lines)
    with pytest.raises(ValueError, match=r"1 of 3 images have no text .*: train/d\.jpg"):
        open_folder(tmp_path, text="jsonl:text")
    folder = open_folder(tmp_path, text="jsonl:text", uncaptioned="drop")
    assert texts(folder) == {"train/a.png": "one", "train/b/c.jpg": "two"}
    assert folder.texts([1, 0]) == ["two", "one"]
    assert folder.left_out() == {"no_caption": 1, "row_without_image": 1}


def test_a_path_that_names_a_table_leaves_out_the_others(tmp_path):
    images(tmp_path, "train/a.png", "val/b.png")
    for split, name in (("train", "a"), ("val", "b")):
        (tmp_path / f"{split}.csv").write_text(f"file_name,text\n{split}/{name}.png,{name}\n")
    assert texts(open_folder(tmp_path, "csv:text")) == {"train/a.png": "a", "val/b.png": "b"}
    folder = open_folder(tmp_path / "train.csv", "csv:text", uncaptioned="drop")
    assert texts(folder) == {"train/a.png": "a"} and folder.left_out() == {"no_caption": 1}
    names = [file.removeprefix(f"{tmp_path}/") for file in folder.files()]
    assert names == ["train/a.png", "val/b.png"]  # The captions are in the table of the folder.
    with pytest.raises(ValueError, match=r"1 of 2 images have no text .*: val/b\.png"):
        open_folder(tmp_path / "train.csv", "csv:text")
    message = r"data\.path is the file .*train\.csv, but data\.text is 'txt': name a folder or, with"
    with pytest.raises(ValueError, match=message):
        open_folder(tmp_path / "train.csv", "txt")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/train.csv").write_text("file_name,text\n../train/a.png,a\n")
    with pytest.raises(ValueError, match=r"in the table's folder \(name one that holds both\) and found csv"):
        open_folder(tmp_path / "notes/train.csv", "csv:text")


def test_the_layout_of_img2dataset_is_read(tmp_path):
    images(tmp_path, "00000/000000000.jpg", "00000/000000002.jpg", "00001/000010000.webp")
    for shard, keys in (("00000", range(3)), ("00001", [10000])):
        columns = {
            "key": [f"{key:09}" for key in keys],
            "caption": [f"caption {key}" for key in keys],
            "status": ["failed_to_download" if key == 1 else "success" for key in keys],
        }
        pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / f"{shard}.parquet")
    folder = open_folder(tmp_path, text="parquet:caption")
    assert texts(folder) == {
        "00000/000000000.jpg": "caption 0",
        "00000/000000002.jpg": "caption 2",
        "00001/000010000.webp": "caption 10000",
    }
    with pytest.raises(ValueError, match=r"a value of 'text'; the columns are caption, key, status"):
        open_folder(tmp_path, text="parquet:text")


def test_captions_are_read_from_json_files_beside_images(tmp_path):
    images(tmp_path, "a.jpg", "b.jpg", "c.jpg")
    (tmp_path / "a.json").write_text('{"caption": "one "}')
    (tmp_path / "b.json").write_text('{"caption": null}')
    (tmp_path / "c.json").write_text('{"caption"')
    captions = list(texts(open_folder(tmp_path, text="json:caption")).values())
    assert captions[0] == "one"
    assert [text.reason for text in captions[1:] if isinstance(text, Unusable)] == ["no_caption", "broken_text"]


def test_missing_tables_and_columns_and_damaged_lines_are_errors(tmp_path):
    images(tmp_path, "a.jpg")
    with pytest.raises(ValueError, match=r"no \.jsonl files in .*, but data\.text=jsonl:"):
        open_folder(tmp_path, text="jsonl:text")
    (tmp_path / "m.jsonl").write_text('{"file_name": "a.jpg", "caption": "x"}')
    with pytest.raises(ValueError, match=r"'text'; the columns are caption, file_name"):
        open_folder(tmp_path, text="jsonl:text")
    (tmp_path / "m.jsonl").write_text('{"file_name": "a.jpg"}\n{')
    with pytest.raises(ValueError, match=r"m\.jsonl, line 2: "):
        open_folder(tmp_path, text="jsonl:text")


def table(root, name, content):
    (root / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return open_folder(root, text=f"{name.rpartition('.')[2]}:text", uncaptioned="drop")


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_csv_and_tsv_are_read_like_jsonl(tmp_path, encoding):
    images(tmp_path, "a.png", "b.png")
    for name, content in (
        ("m.csv", 'file_name,text\r\na.png,"é, ""one""\nand more"\r\nb.png,two\r\n'),
        ("m.tsv", 'text\tfilename\n"é, ""one""\nand more"\ta.png\ntwo\tb.png\n'),
        ("m.jsonl", '{"image": "a.png", "text": "é, \\"one\\"\\nand more"}\n{"image": "b.png", "text": "two"}'),
    ):
        folder = table(tmp_path, name, content.encode(encoding))
        assert texts(folder) == {"a.png": 'é, "one"\nand more', "b.png": "two"}


def test_a_caption_that_is_not_utf8_is_reported_with_file_line_and_byte(tmp_path):
    images(tmp_path, "a.png", "b.png")
    (text, good) = table(tmp_path, "m.csv", b"file_name,text\na.png,caf\xe9\nb.png,x").texts([0, 1])
    expected = "broken_text: m.csv, line 2: the text is not UTF-8 text (byte 0xe9)"
    assert (str(text), good) == (expected, "x")


def test_names_in_tables_match_images_despite_case_slashes_and_unicode_form(tmp_path):
    images(tmp_path, "d/A.PNG", "d/e/b.png", "caf\u00e9.png", "c.png")
    content = "file_name,text\nd\\e\\b.png,b\nD/a.png,a\ncafe\u0301.png,accent\n./c.png,dot\n"
    expected = {"d/A.PNG": "a", "d/e/b.png": "b", "caf\u00e9.png": "accent", "c.png": "dot"}
    assert texts(table(tmp_path, "m.csv", content)) == expected
    names = [str(tmp_path / "d/e/b.png"), str(tmp_path / "c.png")]
    lines = "".join(json.dumps({"file_name": n, "text": n[-5:]}) + "\n" for n in names)
    assert texts(table(tmp_path, "m.jsonl", lines)) == {"d/e/b.png": "b.png", "c.png": "c.png"}


def test_names_without_suffix_match_images_despite_case_and_unicode_form(tmp_path):
    images(tmp_path, "caf\u00e9.png", "B.png", "c.png", "c.jpg")
    keys = {"cafe\u0301": "accent", "b": "case", "C": "which?"}
    (tmp_path / "meta.json").write_text(json.dumps({k: {"text": v} for k, v in keys.items()}))
    assert texts(open_folder(tmp_path, "coco:text", "drop")) == {"caf\u00e9.png": "accent", "B.png": "case"}


def test_a_number_is_a_name_without_suffix(tmp_path):
    images(tmp_path, "in/7.png", "in/70.png")
    (tmp_path / "m.jsonl").write_text('{"file_name": 70, "text": "x"}\n{"file_name": "7", "text": "y"}')
    assert texts(open_folder(tmp_path, "jsonl:text")) == {"in/7.png": "y", "in/70.png": "x"}


def test_a_dot_in_a_name_without_suffix_belongs_to_the_name(tmp_path):
    images(tmp_path, "v1.png", "v1.5.png", "at 10.30.png", "c.jpg", "d.jpg")
    content = "file_name,text\nv1.5,one\nat 10.30,two\nc.tiff,three\nd.HEIC,four\n"
    expected = {"v1.5.png": "one", "at 10.30.png": "two", "c.jpg": "three", "d.jpg": "four"}
    assert texts(table(tmp_path, "m.csv", content)) == expected
    images(tmp_path / "in", "in/v1.png", "in/v1.5.png")
    assert texts(table(tmp_path / "in", "m.csv", "file_name,text\nv1.5,one\n")) == {"in/v1.5.png": "one"}


@pytest.mark.parametrize(
    ("columns", "cells"),
    [
        ("image,path", "{other},{own}.png"),
        ("image,path", "https://x/{other}.png,{own}.png"),
        ("file_name,image_path", ",{own}.png"),
        ("filename,image_path", "set/{other}.png,./{own}.png"),
    ],
)
def test_of_several_columns_of_names_the_one_that_names_most_images_is_used(tmp_path, columns, cells):
    images(tmp_path, "0.png", "1.png")
    rows = [f"{cells.format(own=own, other=1 - own)},text {own}" for own in (0, 1)]
    content = "\n".join([f"{columns},text", *rows])
    assert texts(table(tmp_path, "m.csv", content)) == {"0.png": "text 0", "1.png": "text 1"}


def test_a_table_without_the_column_of_captions_is_left_out_unless_another_of_its_columns_is_read(tmp_path):
    images(tmp_path, "a.png", "b.png")
    (tmp_path / "n.csv").write_text("file_name,title\nb.png,two\n")
    folder = table(tmp_path, "m.csv", "file_name,text\na.png,one\n")
    assert folder.left_out() == {"table_without_column": 1, "no_caption": 1}
    folder = open_folder(tmp_path, text="csv:text,csv:title")
    assert (texts(folder), folder.left_out()) == ({"a.png": "one", "b.png": "two"}, {})


def test_an_inexact_name_does_not_match_an_image_that_another_row_names(tmp_path):
    images(tmp_path, "a.png", "b.png")
    folder = table(tmp_path, "m.csv", "file_name,text\na.png,one\nA.png,gone\nB.PNG,x\nB.png,y\n")
    assert texts(folder) == {"a.png": "one"}
    assert folder.left_out()["row_without_image"] == 3


def test_images_are_searched_in_other_folders_if_none_is_beside_the_table(tmp_path):
    images(tmp_path, "Images/a.png", "Images/b.png")
    folder = table(tmp_path, "m.csv", "image,text\na.png,one\nb.png,two\nc.png,three\n")
    assert texts(folder) == {"Images/a.png": "one", "Images/b.png": "two"}
    # Now an image is beside the table, so the row of b.png does not match one in another folder.
    images(tmp_path, "a.png")
    folder = table(tmp_path, "m.csv", "image,text\na.png,one\nb.png,two\n")
    assert texts(folder) == {"a.png": "one"}
    assert folder.left_out() == {"row_without_image": 1, "no_caption": 2}
    assert folder.inventory().first["row_without_image"] == ["m.csv, line 3: b.png"]


def test_rows_with_names_without_folder_and_suffix_caption_the_only_pictures_of_these_names(tmp_path):
    """As in the set MJHQ, whose pictures are in folders of their categories."""
    images(tmp_path, "cats/0a.png", "dogs/1b.jpg", "cats/2c.png", "dogs/2c.png")
    (tmp_path / "m.json").write_text(json.dumps({key: {"caption": f"pet {key}"} for key in ("0a", "1b", "2c")}))
    folder = open_folder(tmp_path, text="coco:caption", uncaptioned="drop")
    assert texts(folder) == {"cats/0a.png": "pet 0a", "dogs/1b.jpg": "pet 1b"}
    assert folder.origins([0]) == [("m.json: caption, by the file name alone without the suffix",)]
    assert folder.inventory().first["row_without_image"] == ["m.json, item 3: 2c"]


@pytest.mark.parametrize(
    ("table_path", "name", "picture"),
    [
        ("m.csv", "train/0.png", "x/train/0.png"),
        ("notes/m.csv", "train\\0.PNG", "train/0.png"),
        ("notes/m.csv", "./0.png", "train/0.png"),
        ("m.csv", "val/0.png", ""),  # It names another folder.
        ("m.csv", "/data/train/0.png", ""),
        ("m.csv", "C:\\train\\0.png", ""),
    ],
)
def test_a_picture_found_in_another_folder_is_in_all_folders_that_the_row_names(tmp_path, table_path, name, picture):
    images(tmp_path, picture or "train/0.png", "z/1.png")
    (tmp_path / table_path).parent.mkdir(exist_ok=True)
    content = f"file_name,text\n{name},one\n1.png,two\n"
    expected = {picture: "one", "z/1.png": "two"} if picture else {"z/1.png": "two"}
    assert texts(table(tmp_path, table_path, content)) == expected


def test_rows_can_name_their_images_in_different_columns(tmp_path):
    images(tmp_path, "a.png", "b.png", "c.png")
    rows = [{"image": "a.png", "file_name": "b.png"}, {"file_name": "c.png"}, {"image": "b.png"}]
    rows = [{**row, "text": f"{n}"} for n, row in enumerate(rows)]
    folder = table(tmp_path, "m.jsonl", "\n".join(map(json.dumps, rows[1:])))
    assert texts(folder) == {"b.png": "2", "c.png": "1"}
    # If a row has both columns, the column of the previous rows is used.
    folder = table(tmp_path, "m.jsonl", "\n".join(map(json.dumps, rows[2:] + rows[:2])))
    assert texts(folder) == {"b.png": "2", "a.png": "0", "c.png": "1"}


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("a%20b.png", "it does not exist"),
        ("a.png", "several pictures have its name: x/a.png, y/a.png"),
        ("a", "several pictures have its name: x/a.png, y/a.png"),
        ("val/a b.png", "the picture of its name is a b.png"),
    ],
)
def test_the_error_shows_a_path_if_no_row_names_an_image(tmp_path, name, reason):
    images(tmp_path, "a b.png", "x/a.png", "y/a.png")
    with pytest.raises(ValueError, match=f'm.csv, line 2 names "{name}", but {reason}; no other row .*: write paths'):
        table(tmp_path, "m.csv", f"file_name,text\n{name},one\nz.png,two\n")


GOOD = '{"file_name": "a.png", "text": "x"}'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (f'{{"text": "y"}}\n\n{GOOD}', "has no file_name, but only text; {}, line 3 names an image: correct"),
        (f'"hello"\n{GOOD}', 'is "hello", not an object; {}, line 2 names an image: correct'),
        ('"hello"', 'is "hello", not an object: write an object for each image on a line'),
        ('["a.png"]', 'is ["a.png"], not an object: write an object for each image on a line'),
    ],
)
def test_a_first_jsonl_row_without_an_image_name_is_an_error(tmp_path, content, message):
    images(tmp_path, "a.png")
    path = tmp_path / "m.jsonl"
    with pytest.raises(ValueError, match=re.escape(f"{path}, line 1 {message.format(path)}")):
        table(tmp_path, "m.jsonl", content)
    # A table without a column of image names is skipped.
    path.write_text('"hello"\n')
    (tmp_path / "good.jsonl").write_text(GOOD)
    folder = open_folder(tmp_path, text="jsonl:text")
    assert folder.left_out() == {"table_without_file_name": 1}


def test_an_empty_csv_cell_is_an_empty_caption(tmp_path):
    images(tmp_path, "a.png", "b.png")
    folder = table(tmp_path, "m.csv", "file_name,text\na.png,\nb.png,two\n")
    (tmp_path / "a.txt").write_text("")
    beside = open_folder(tmp_path, text="txt", uncaptioned="drop")
    assert (folder.texts([0, 1]), beside.texts([0])) == (["", "two"], [""])
    assert folder.left_out() == {}


def test_several_rows_for_one_image_give_several_captions(tmp_path):
    images(tmp_path, "a.png", "b.png")
    folder = table(tmp_path, "m.csv", "file_name,text\na.png,one\nb.png,three\na.png,two\n")
    assert texts(folder) == {"a.png": Captions(("one", "two"), (0.5, 0.5)), "b.png": "three"}
    (tmp_path / "old.csv").write_text("file_name,text\nb.png,old\n")
    with pytest.raises(ValueError, match=r"both .*/m\.csv and .*/old\.csv describe b\.png: remove"):
        open_folder(tmp_path, text="csv:text")


def test_coco_captions_are_read_with_images_in_any_folder(tmp_path):
    images(tmp_path, "train2014/x_7.jpg", "train2014/x_9.jpg")
    notes = [{"id": i, "image_id": 7 + 2 * (i // 5), "caption": f"caption {i}"} for i in range(10)]
    listed = [{"id": n, "file_name": f"x_{n}.jpg"} for n in (7, 9)]
    (tmp_path / "annotations").mkdir()
    (tmp_path / "annotations/captions.json").write_text(json.dumps({"images": listed, "annotations": notes}))
    boxes = [{"id": 1, "image_id": 7, "category_id": 3, "bbox": [1, 2, 3, 4]}]
    (tmp_path / "annotations/instances.json").write_text(json.dumps({"images": listed, "annotations": boxes}))
    (tmp_path / "annotations/list.json").write_text("[]")
    captions = texts(open_folder(tmp_path, text="coco:caption"))
    assert captions["train2014/x_9.jpg"].texts == tuple(f"caption {i}" for i in range(5, 10))


@pytest.mark.parametrize(
    ("listed", "image_id", "message"),
    [
        ([(1, "a.png"), (1, "b.png")], 1, 'the images "a.png" and "b.png" both have the id 1, so'),
        ([(1, "a.png"), ("1", "b.png")], 1, 'the images "a.png" and "b.png" both have the id 1, s'),
        ([(1, "a.png"), (None, "b.png")], 1, 'the image "b.png" has no id, so no annotation can'),
        ([(1, "a.png")], 2, r"annotation 1 \(id 5\): its image_id 2 is the id of no image: add the"),
        ([(1, "a.png")], None, r"annotation 1 \(id 5\): its image_id null is the id of no image"),
    ],
)
def test_coco_captions_without_exactly_one_image_are_an_error(tmp_path, listed, image_id, message):
    images(tmp_path, "a.png", "b.png")
    listed = [{"id": number, "file_name": name} for number, name in listed]
    notes = [{"id": 5, "image_id": image_id, "caption": "x"}]
    (tmp_path / "c.json").write_text(json.dumps({"images": listed, "annotations": notes}))
    with pytest.raises(ValueError, match=message):
        open_folder(tmp_path, text="coco:caption")


def test_coco_images_listed_twice_under_one_name_keep_all_their_captions(tmp_path):
    images(tmp_path, "a.png")
    listed = [{"id": number, "file_name": "a.png"} for number in (1, 1, 2)]
    notes = [{"id": i, "image_id": i, "caption": f"{i}"} for i in (1, 2)]
    (tmp_path / "c.json").write_text(json.dumps({"images": listed, "annotations": notes}))
    assert texts(open_folder(tmp_path, text="coco:caption"))["a.png"].texts == ("1", "2")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("m.jsonl", '{"file_name": null, "text": "x"}', "line 1: file_name is null, not the name"),
        ("m.jsonl", '{"file_name": 7.5, "text": "x"}', "line 1: file_name is 7.5, not the name"),
        ("m.jsonl", '{"file_name": ["a.png"], "text": "x"}', r'file_name is \["a.png"\], not the'),
        ("m.jsonl", '{"file_name": "a.png", "text": 7}', "line 1: text is 7, not a text"),
        ("m.jsonl", '{"file_name": "a.png", "text": "x"}\n{"text": "y"}', "2: file_name is null"),
        ("m.csv", "file_name,text\na.png,one,two\n", r'line 2 has 3 cells.*"a.png", "one", "two"'),
        ("m.csv", "file_name| n| text\na.png| 4 one\n", "line 2 has 2 cells.*; add the missing separators$"),
        ("m.csv", "file_name,text\n,one\n", 'm.csv, line 2: file_name is "", not the name'),
        ("m.csv", "picture,text\na.png,one\n", "no row of m.csv .*; the columns are picture, text"),
        ("m.csv", "file_name,title\na.png,one\n", "a value of 'text'; the columns are file_name, title"),
    ],
)
def test_a_malformed_row_is_a_one_line_error_with_file_row_and_value(tmp_path, name, content, message):
    images(tmp_path, "a.png")
    with pytest.raises(ValueError, match=message) as error:
        table(tmp_path, name, content)
    assert "\n" not in str(error.value)


def test_a_column_of_numbers_that_is_missing_is_an_error_that_shows_how_to_name_it(tmp_path):
    images(tmp_path, "a.png")
    (tmp_path / "m.csv").write_text("file_name,text,score\na.png,one,5\n")
    named = picture_fields.read(("scroe=0..10",))
    with pytest.raises(ValueError, match=r"set data\.fields to csv:COLUMN=LOW\.\.HIGH"):
        open_folder(tmp_path, text="csv:text", fields=named)
