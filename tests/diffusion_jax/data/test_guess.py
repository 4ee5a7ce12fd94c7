"""Guessing the data source of a path, and where its captions are."""

import json
import shutil

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from diffusion_jax.config.settings import Data
from diffusion_jax.data import show, sources, tars
from diffusion_jax.data.captions import every
from diffusion_jax.data.guess import guess
from diffusion_jax.examples.digits import rendering as digits
from diffusion_jax.files.untrusted import POINTER as _POINTER

POINTER = _POINTER.decode()


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Three pictures, each with a .txt caption, and a hidden file."""
    folder = digits.write_examples(tmp_path_factory.mktemp("guess") / "plain", 3, size=16)
    (folder / ".hidden.json").write_text("{}")
    return folder


@pytest.fixture
def bare(plain, tmp_path):
    """The same pictures without captions, and a readme.txt."""
    for picture in plain.glob("*.png"):
        shutil.copy(picture, tmp_path)
    (tmp_path / "readme.txt").write_text("of nobody in particular")
    return tmp_path


def first(data):
    """Return the caption of the first record, as the guessed source reads it."""
    return sources.open_records(data).texts([0])[0]


def test_txt_and_json_files_beside_pictures_are_read_as_captions(plain, bare):
    assert guess(str(plain)) == Data("folder", str(plain), "txt", uncaptioned="drop")
    for picture in bare.glob("*.png"):
        about = {"width": 16, "title": "t", "caption": "of " + picture.stem}
        picture.with_suffix(".json").write_text(json.dumps(about))
    assert guess(str(bare)).text == "json:caption" and first(guess(str(bare))) == "of 00000"
    assert guess(str(bare), "json:title").text == "json:title"


def test_pictures_without_captions_get_empty_captions(bare):
    data = guess(str(bare))
    assert data == Data("folder", str(bare), "txt", uncaptioned="empty")
    opened = sources.open_pictures(data, 16)
    assert opened.read(np.arange(3))[1] == ("", "", "")
    assert opened.skipped() == {"no_picture": 1}  # readme.txt.
    (bare / "00001.txt").write_text("one of three")
    # Pictures without captions are dropped if any picture has one.
    assert guess(str(bare)).uncaptioned == "drop"
    both = data._replace(uncaptioned="empty")
    assert sources.open_records(both).texts([0, 1]) == ["", "one of three"]


def test_jsonl_and_parquet_tables_beside_pictures_are_read_as_captions(bare):
    rows = [{"file_name": f"0000{i}.png", "url": "u", "text": f"row {i}"} for i in range(3)]
    (bare / "metadata.jsonl").write_text("\n" + "\n".join(map(json.dumps, rows)))
    for path in (bare, bare / "metadata.jsonl"):
        data = guess(str(path))
        assert (data.source, data.path, data.text) == ("folder", str(path), "jsonl:text")
    assert first(data) == "row 0"
    (bare / "metadata.jsonl").unlink()
    columns = {"key": ["00000"], "width": [3], "caption": ["of a table"]}
    (bare / "00000").mkdir()
    shutil.move(bare / "00000.png", bare / "00000")
    pyarrow.parquet.write_table(pyarrow.table(columns), bare / "00000.parquet")
    assert guess(str(bare)).text == "parquet:caption" and first(guess(str(bare))) == "of a table"


def coco(images, *annotations):
    listed = [{"id": number, "file_name": name} for number, name in images]
    return json.dumps({"images": listed, "annotations": annotations})


RAW = '[{"raw": "a cat", "sentid": 0}, {"raw": "it sits", "sentid": 1}]'
TURNS = '[{"from": "human", "value": "<image>"}, {"from": "gpt", "value": "a cat"}]'


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("metadata.csv", "file_name,width,text\n00000.png,16,a cat\n", "csv:text"),
        ("captions.tsv", "image\tcaption\n00000.png\ta cat\n", "tsv:caption"),
        ("m.jsonl", '{"image": "00001.png", "text": null}\n{"image": "00000.png", "text": "a cat"}\n', "jsonl:text"),
        ("metadata.jsonl", '\ufeff{"file_name": "00000.png", "captions": ["a cat", "b"]}\n', "jsonl:captions"),
        ("00000.caption", "a cat", "caption"),
        ("00000.TXT", "\ufeffa cat", "txt"),
        ("meta_cap.json", '{"00000": {"caption": "a cat", "tags": "cat"}}', "coco:caption"),
        ("captions.json", '{"00000.png": "a cat"}', "coco:caption"),
        ("metadata.csv", "sep=;\nfile_name;text\n00000.png;a cat\n", "csv:text"),
        ("metadata.csv", "00000.png,a cat\n", "csv:caption"),
        ("token.csv", "00000.png#0\ta cat\n00000.png#1\tit is asleep\n", "csv:caption"),
        ("metadata.csv", ",file_name,text,,\n0,00000.png,a cat,,\n,,,,\n", "csv:text"),
        ("results.csv", "image_name| comment_number| comment\n00000.png| 0| a cat", "csv:comment"),
        ("pandas.json", '{"file_name": {"0": "00000.png"}, "text": {"0": "a cat"}}', "coco:text"),
        ("columns.json", '{"image": ["00000.png"], "text": ["a cat"]}', "coco:text"),
        ("split.json", '{"columns": ["text", "path"], "index": [0], "data": [["a cat", "00000.png"]]}', "coco:text"),
        ("train_anno.jsonl", '{"img_path": "./00000.png", "prompt": "a cat"}', "jsonl:prompt"),
        ("lists.json", '{"00000.png": ["a cat"]}', "coco:caption"),
        ("index.json", '{"0": {"file_name": "00000.png", "text": "a cat"}}', "coco:text"),
        ("table.json", '{"schema": {}, "data": [{"file_name": "00000.png", "text": "a cat"}]}', "coco:text"),
        ("llava.json", f'[{{"id": "x", "image": "00000.png", "conversations": {TURNS}}}]', "coco:caption"),
        ("00000.png.json", '{"category": "danbooru", "author": "a b", "tag_string": "a cat"}', "json:tag_string"),
        ("00000.json", '{"id": "7", "words": "a cat"}', "json:words"),
        ("m.jsonl", '{"file_name": "00000.png", "hash": "a1", "\\u6587": "a cat"}', "jsonl:\u6587"),
        ("p.json", '{"00000.png": {"th": "2022-08-07 22:57:00", "p": "a cat", "sa": "k_lms"}}', "coco:p"),
        ("m.csv", "image,artist,negative,words\n00000.png,J B,a bad dog,a cat\n", "csv:words"),
        ("a.json", coco([(7, "00000.png")], {"id": 1, "image_id": 7, "caption": "a cat"}), "coco:caption"),
        (
            "dataset_coco.json",
            f'{{"images": [{{"filepath": "val", "filename": "00000.png", "sentences": {RAW}}}], "dataset": "x"}}',
            "coco:caption",
        ),
        ("caps.json", '{"set": "train", "data": [{"image_path": "00000.png", "caption": "a cat"}]}', "coco:caption"),
        ("x.json", '{"a": [{"filename": "00000.png", "raw": "a cat"}], "b": [{"id": 1}]}', "coco:raw"),
        ("to.json", '{"image": "00000.png", "text": "a cat"}\n{"image": "no.png", "text": "b"}\n', "coco:text"),
        ("to.json", '{"image": "00000.png", "text": "a cat"}\r\n{"image": "no.png", "text": "b"}\r\n', "coco:text"),
        ("a.json", '{"data": [\r\n{"image": "00000.png", "text": "a cat"}\n]}\n', "coco:text"),
        ("upload.csv", "Filename,Title,Keywords\n00000.png,a cat,cat\n", "csv:Title"),
        ("recipes.csv", ",Title,Image_Name\n0,a cat,00000\n", "csv:Title"),
        ("train.csv", "filepath\ttitle\n00000.png\ta cat\n", "csv:title"),
        ("docci.jsonl", '{"image_file": "00000.png", "description": "a cat"}', "jsonl:description"),
        ("token.csv", "no.png#0\ta dog, an ox, a fox\n00000.png#0\ta cat\n", "csv:caption"),
        ("metadata.csv", '"no.png","a dog; an ox; a fox"\n"00000.png","a cat"\n', "csv:caption"),
    ],
)
def test_every_supported_kind_of_caption_file_is_found(bare, name, content, text):
    (bare / name).write_text(content)
    data = guess(str(bare))
    assert data == Data("folder", str(bare), text, uncaptioned="drop")
    opened = sources.open_records(data)
    assert (len(opened), every(first(data))[0]) == (1, "a cat")
    assert opened.left_out()["no_caption"] == 2


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("m.json", '{"file_name": "00000.png", "text": ""}\n{"image": "00001.png"}', "m.json na"),
        ("m.json", '{"data": [{"file_name": "00000.png"}, "00001.png"]}', "m.json names"),
        ("m.json", '{"data": ["00000.png", "00001.png"]}', "m.json holds {"),
        ("m.json", coco([(1, "00000.png"), (1, "00001.png")]), '"00000.png" and "00001.png" both have the id 1'),
        ("m.json", coco([(1, "00000.png"), (2, "00001.png")], {"image_id": 3, "caption": "a cat"}), "image_id 3 is"),
        ("m.csv", "picture,words\n00000.png,a cat\n00001.png,b c\n", "m.csv names pictures, b"),
        ("m.jsonl", '{"file_name": "00000.png", "caption": {"a": "b"}}', "m.jsonl holds objects .* caption: .* texts$"),
        ("m.jsonl", '{"image": "00000.png", "caption": {"a": "b"}, "set": "b"}', "texts, or .* --text=jsonl:set$"),
        ("m.csv", "file_name,hash\n00000.png,a1\n00001.png,b2\n", "hash: name .*--text=csv:hash"),
        ("m.csv", "file_name,set\n00000.png,my set\n00001.png,my set\n", "--text=csv:set"),
        ("m.csv", "00000.png,a cat,x\n", 'begins with "00000.png" instead of names of columns'),
        ("00000.json", '{"category": "danbooru", "author": "x"}', "--text=json:category, or, if there are none, move"),
        ("00000.json", '["a cat"]', "00000.json has the name of a picture, but has no field with a text: write"),
        ("m.csv", "file_name,caption*2\n00000.png,a cat\n", "data.text cannot name 'caption.2': rename it"),
        ("m.csv", f"{POINTER}1", "m.csv is a pointer of Git LFS, not the file: run git lfs pull"),
        ("m.json", f"{POINTER}1", "m.json is a pointer of Git LFS, not the file: run git lfs pull"),
        ("00000.json", f"{POINTER}1", "a .json is a pointer of Git LFS, not the file: run git lfs"),
    ],
)
def test_captions_that_are_not_understood_are_an_error(bare, name, content, message):
    (bare / name).write_text(content)
    with pytest.raises(ValueError, match=message) as error:
        guess(str(bare))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "renamed", "content"),
    [
        ("captions.txt", "captions.csv", "image,caption\n00000.png,a cat\n00001.png,b\n"),
        ("Flickr8k.token.txt", "token.csv", "00000.png#0\ta cat\n00002.png#0\tb, and c\n"),
        ("results.token", "results.tsv", "00000.png#0\ta cat\n00002.png#0\tb\n"),
        ("d.jsonlines", "d.jsonl", '{"image": "00000.png", "text": "a cat"}\n{"image": "00001.png", "text": "b"}\n'),
    ],
)
def test_a_table_is_read_after_it_was_renamed_as_its_error_says(bare, name, renamed, content):
    (bare / name).write_text(content)
    (bare / "split.txt").write_text("00000.png\n00001.png\n")
    with pytest.raises(ValueError, match=rf"/{name} names pictures, but no .* \(rename a table to \.csv or \.jsonl\)"):
        guess(str(bare))
    if name.endswith(".txt"):
        with pytest.raises(ValueError, match=rf"/{name} is not a folder, .* or \.parquet: rename it if it is one"):
            guess(str(bare / name))
    (bare / name).rename(bare / renamed)
    assert first(guess(str(bare))) == "a cat"


@pytest.mark.parametrize("content", ["a cat", '{"caption": "a cat"}', '{"image": "00000.png", "words": "a cat"}'])
def test_a_text_in_another_folder_than_its_picture_is_named_before_lists_of_pictures(bare, content):
    (bare / "split.txt").write_text("00000.png\n00001.png\n" * 9)
    (bare / "texts").mkdir()
    name = "00000.txt" if content == "a cat" else "00000.json"
    (bare / "texts" / name).write_text(content)
    with pytest.raises(ValueError, match=rf"texts/{name} has the name of a picture, but lies in another folder: move"):
        guess(str(bare))
    (bare / "texts" / name).rename(bare / name)
    assert first(guess(str(bare))) == "a cat"


def test_the_error_of_a_damaged_json_that_is_named_says_so(bare):
    (bare / "m.json").write_text('{"file_name": "00000.png"')
    with pytest.raises(ValueError, match=r"m\.json: invalid JSON: Expecting ',' delimiter"):
        guess(str(bare / "m.json"))


def test_pictures_without_captions_beside_tars_or_parquet_are_previews(bare, plain, tmp_path):
    (bare / "readme.txt").unlink()
    members = {"png": (plain / "00000.png").read_bytes(), "txt": b"said"}
    tars.write(tmp_path / "a.tar", [{tars.KEY: b"0", **members}])
    assert guess(str(bare)) == Data("webdataset", str(bare), "txt", uncaptioned="drop")
    (tmp_path / "a.tar").unlink()
    kind = pyarrow.struct({"bytes": pyarrow.binary(), "path": pyarrow.string()})
    image = pyarrow.array([{"bytes": members["png"], "path": None}], kind)
    for text in (["said"], [b"said"]):
        pyarrow.parquet.write_table(pyarrow.table({"image": image, "text": text}), bare / "a.parquet")
        assert guess(str(bare)) == Data("huggingface", str(bare), "text", uncaptioned="drop")
    (bare / "00000.txt").write_text("said")
    doubts = show.doubts(sources.open_records(guess(str(bare))))
    assert doubts[1].startswith("files that may hold more pictures, but are not read: 1, such as a.parquet: ")


def test_an_empty_tar_is_an_error_that_says_so(tmp_path):
    tars.write(tmp_path / "a.tar", [])
    with pytest.raises(ValueError, match=r"a\.tar holds no files: copy or write it again"):
        guess(str(tmp_path))


def test_texts_inside_objects_of_a_parquet_table_are_an_error(tmp_path):
    image = pyarrow.array([{"bytes": b"x", "path": "p"}])
    table = pyarrow.table({"image": image, "sentences": [[{"raw": "a cat"}]]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="parquet holds objects in the field sentences: write"):
        guess(str(tmp_path / "a.parquet"))


def test_numbers_of_classes_are_no_captions(tmp_path):
    import datasets

    kinds = {"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])}
    rows = {"image": [{"bytes": b"x", "path": None}], "label": [1]}
    datasets.Dataset.from_dict(rows, datasets.Features(kinds)).to_parquet(tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"has no captions, but numbers of classes in label: add a"):
        guess(str(tmp_path / "a.parquet"))


def test_the_kind_of_captions_with_the_most_pictures_is_chosen(bare):
    (bare / "00000.txt").write_text("one of three")
    rows = [{"file_name": f"0000{i}.png", "text": f"row {i}"} for i in range(3)]
    (bare / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert guess(str(bare)).text == "jsonl:text"


def test_a_column_of_captions_that_is_known_by_its_values_alone_is_a_warning(bare, caplog):
    (bare / "m.csv").write_text("file_name,by,words\n00000.png,J B,a cat\n")
    guess(str(bare))
    assert "m.csv: reading words, not by, by its values alone" in caplog.text


def test_of_columns_with_captions_of_equally_many_pictures_the_one_with_the_likeliest_name_is_chosen(bare):
    for name, column in (("a.csv", "place"), ("b.csv", "caption")):
        (bare / name).write_text(f"file_name,{column}\n" + "".join(f"0000{i}.png,a {column} {i}\n" for i in range(3)))
    assert guess(str(bare)).text == "csv:caption"


@pytest.mark.parametrize(
    ("files", "text"),
    [
        ({"00001.txt": "a dog", "00000.caption": "a cat"}, "txt,caption"),
        ({"00001.txt": "a dog", "m.csv": "image,prompt\n00000.png,a cat\n"}, "txt,csv:prompt"),
        (
            {"m.csv": "image,text\n00001.png,a dog\n", "n.csv": "image,caption\n00000.png,a cat\n"},
            "csv:text,csv:caption",
        ),
        ({"00001.txt": "a dog", "00000.txt": "a cat", "00002.json": '{"note": "by me"}'}, "txt"),
        ({"00001.txt": "a dog", "00000.txt": "a cat", "m.csv": "image,text\n00000.png,an ox\n"}, "txt"),
        (
            {
                "captions.json": '{"00000.png": "a cat", "00001.png": "a dog"}',
                "image_info.json": '{"images": [{"id": 2, "file_name": "00002.png"}], "licenses": [{"id": 1}]}',
            },
            "coco:caption",
        ),
    ],
)
def test_captions_of_different_pictures_in_different_places_are_all_read(bare, files, text, caplog):
    for name, content in files.items():
        (bare / name).write_text(content)
    data = guess(str(bare))
    assert {*data.text.split(",")} == {*text.split(",")}
    caplog.clear()
    assert sources.open_records(data).texts([0, 1]) == ["a cat", "a dog"] and not caplog.records


def test_captions_in_a_second_place_that_also_has_those_of_others_are_named_in_a_warning(bare, caplog):
    (bare / "m.csv").write_text("file_name,text\n00000.png,a cat\n00001.png,a dog\n")
    for name in ("00001.txt", "00002.txt"):
        (bare / name).write_text("a bird")
    assert guess(str(bare)).text in ("csv:text", "txt")
    (message,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert "of 1 picture are in" in message and "which is not read: read both with --text=" in message


@pytest.mark.parametrize("name", ["set{1}", "photos@2x"])
def test_the_name_of_an_existing_folder_is_neither_a_pattern_nor_a_split(plain, tmp_path, name):
    shutil.copytree(plain, tmp_path / name)
    (tmp_path / "set1").mkdir()
    assert len(sources.open_records(guess(str(tmp_path / name)))) == 3
    tars.write(tmp_path / name / "a.tar", [{tars.KEY: b"0", "png": (plain / "00000.png").read_bytes(), "txt": b"said"}])
    assert first(guess(f"webdataset:{tmp_path / name}")) == "said"


def test_unreadable_captions_are_an_error_instead_of_empty_captions(bare):
    assert guess(str(bare)).uncaptioned == "empty"
    table = bare / "metadata.jsonl"
    table.write_text('{"file_name": "00000.png", "text": "x"}\n{"file_name": null, "text": "y"}')
    with pytest.raises(ValueError, match=r"jsonl, line 2: file_name is null, not the name"):
        guess(str(bare))
    table.write_text('{"photo": "00000.png", "text": "x"}')
    with pytest.raises(ValueError, match=r"jsonl has the column 'text', but no column of image na"):
        guess(str(bare))
    table.unlink()
    (bare / "captions").mkdir()
    (bare / "captions" / "00001.txt").write_text("beside nothing")
    with pytest.raises(ValueError, match=r"captions/00001\.txt has the name of a picture, but lies in another"):
        guess(str(bare))


def test_captions_in_tars_are_read_from_txt_or_json_members(plain, tmp_path):
    picture = (plain / "00000.png").read_bytes()
    members = {tars.KEY: b"0", "png": picture}
    about = json.dumps({"url": "u", "prompt": "asked"}).encode()
    tars.write(tmp_path / "json.tar", [{**members, "json": about}])
    tars.write(tmp_path / "txt.tar", [{**members, "json": about, "txt": b"said"}])
    assert first(guess(str(tmp_path / "json.tar"))) == "asked"
    assert first(guess(str(tmp_path / "{txt,json}.tar"))) == "said"
    other = {**members, tars.KEY: b"1", "json": about}
    tars.write(tmp_path / "both.tar", [{**members, "txt": b"said"}, other, {tars.KEY: b"README", "caption": b"x"}])
    data = guess(str(tmp_path / "both.tar"))
    assert data.text == "txt,json:prompt"
    assert sources.open_records(data).texts([0, 1]) == ["said", "asked"]
    (tmp_path / "none").mkdir()
    tars.write(tmp_path / "none" / "a.tar", [members])
    with pytest.raises(ValueError, match=r"no captions in .*a\.tar \(suffixes of its files: png\): set --text"):
        guess(str(tmp_path / "none"))
    tars.write(tmp_path / "dots.tar", [{tars.KEY: b"a.0", "png": picture, "txt": b"said"}])
    with pytest.raises(ValueError, match=r"rename the files that end in \.0\.png: in a tar, the name of a record ends"):
        sources.open_records(guess(str(tmp_path / "dots.tar")))
    (tmp_path / "none" / "captions.json").write_text('{"0.png": "asked"}')
    with pytest.raises(ValueError, match=r"captions are optional, and may be in a table, such as .*captions.json$"):
        guess(str(tmp_path / "none"))


def test_parquet_and_saved_hugging_face_data_sets_are_recognized(plain, tmp_path, monkeypatch, caplog):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    caplog.set_level("INFO")
    images = [{"bytes": p.read_bytes(), "path": None} for p in sorted(plain.glob("*.png"))]
    kinds = {"label": datasets.Value("int64"), "description": datasets.Value("string")}
    features = datasets.Features({"image": datasets.Image(), **kinds})
    columns = {"image": images, "label": [1, 2, 3], "description": ["x", "y", "z"]}
    rows = datasets.Dataset.from_dict(columns, features=features)
    rows.to_parquet(tmp_path / "one.parquet")
    assert first(guess(str(tmp_path / "one.parquet"))) == "x"
    (tmp_path / "clone" / "data").mkdir(parents=True)
    for split in ("test", "train"):
        rows.to_parquet(tmp_path / "clone" / "data" / f"{split}-00000-of-00001.parquet")
    data = guess(str(tmp_path / "clone"))
    assert "clone@train, not 1 file of other splits, such as data/test-00000-of-" in caplog.text
    assert data.path == f"{tmp_path}/clone@train" and first(data) == "x"
    datasets.DatasetDict(train=rows, test=rows).save_to_disk(tmp_path / "saved")
    datasets.load_from_disk(tmp_path / "saved/train").shuffle()  # Writes cache-NUMBER.arrow.
    data = guess(str(tmp_path / "saved"))
    assert (data.source, data.path) == ("arrow", f"{tmp_path}/saved@train") and first(data) == "x"
    assert guess(str(tmp_path / "saved" / "test")).path == f"{tmp_path}/saved/test"
    assert guess(f"{tmp_path}/saved@test").path == f"{tmp_path}/saved@test"
    rows.remove_columns("description").to_parquet(tmp_path / "bare.parquet")
    data = guess(str(tmp_path / "bare.parquet"))
    assert data.uncaptioned == "empty" and sources.open_records(data).read([2])[0].text == ""


def test_a_saved_folder_without_tables_is_an_error(tmp_path):
    (tmp_path / "state.json").write_text("{}")
    with pytest.raises(ValueError, match=rf"no \.arrow files in {tmp_path}: write the folder again with save_to_"):
        guess(str(tmp_path))


@pytest.mark.parametrize("content", [b"", b"PAR1", b"<html>Not found</html>"])
def test_the_error_of_a_damaged_table_names_it(tmp_path, content):
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "state.json").write_text("{}")
    for name in ("a.parquet", "saved/data-00000-of-00001.arrow"):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=rf"{name} is damaged: .*; copy or write it again"):
            guess(str(tmp_path / name.partition("/data")[0]))


def test_an_explicitly_named_source_or_table_is_used(plain, tmp_path):
    data = guess(f"folder:{plain}::txt")
    assert data == Data("folder", str(plain), "txt", uncaptioned="drop", max_broken=0.1)
    (tmp_path / "a.json").write_text('{"b.png": "a cat"}')
    assert guess(str(tmp_path / "a.json")).text == "coco:caption"
    with pytest.raises(FileNotFoundError, match="no data at /nowhere: check the path"):
        guess("/nowhere")
    with pytest.raises(ValueError, match=r"is not a folder, \.tar, \.csv, \.tsv"):
        guess(str(plain / "00000.txt"))
