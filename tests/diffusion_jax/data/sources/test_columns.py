"""Data sets in the formats of Hugging Face and TFDS."""

import json
import os
import shutil
import struct
import sys

import pyarrow
import pyarrow.parquet
import pytest

from diffusion_jax.config import picture_fields
from diffusion_jax.config.settings import Data
from diffusion_jax.data import home, sources, tf_examples
from diffusion_jax.data.captions import Captions
from diffusion_jax.data.decoding import Unusable
from diffusion_jax.data.inventory import LeftOut
from diffusion_jax.data.sources import arrayrecord, arrow
from diffusion_jax.data.sources.arrow import Columns, open_saved
from diffusion_jax.data.sources.tfds import open_split
from diffusion_jax.files.untrusted import POINTER
from tests.diffusion_jax.data.sources import messages


def write_arrow(path, images, texts, content=None, rows=None, **options):
    kind = pyarrow.struct({"bytes": content or pyarrow.binary(), "path": pyarrow.string()})
    table = pyarrow.table({"image": pyarrow.array(images, kind), "text": texts})
    options = pyarrow.ipc.IpcWriteOptions(**options)
    with pyarrow.ipc.new_stream(path, table.schema, options=options) as out:
        out.write_table(table, max_chunksize=rows)


def test_arrow_files_of_save_to_disk_are_read(tmp_path):
    (tmp_path / "outside.jpg").write_bytes(b"third")
    inside = [{"bytes": b"first", "path": None}, {"bytes": b"second", "path": "x.jpg"}]
    write_arrow(tmp_path / "data-00000-of-00002.arrow", inside, [" one", None])
    outside = {"bytes": None, "path": "outside.jpg"}
    write_arrow(tmp_path / "data-00001-of-00002.arrow", [outside], ["three"])
    records = open_saved(tmp_path)
    third, first, second = records.read([2, 0, 1])
    assert (third.image, third.text) == (b"third", "three")
    assert (first.image, first.text) == (b"first", "one")
    assert second.image == b"second"
    assert isinstance(second.text, Unusable) and second.text.reason == "no_caption"
    with pytest.raises(ValueError, match=r"data\.text is 'caption', but .* has only the columns image, text: set"):
        open_saved(tmp_path, "caption")


IMAGES = [{"bytes": b"%d" % i * 50, "path": None} for i in range(9)]
TEXTS = [f"text {i}" for i in range(9)]


@pytest.mark.parametrize("content", [pyarrow.binary(), pyarrow.large_binary()])
def test_pictures_are_read_at_their_places_in_the_arrow_file(tmp_path, content):
    images = [*IMAGES[:5], None, {"bytes": None, "path": None}, {"bytes": b"", "path": "x"}]
    write_arrow(tmp_path / "a.arrow", images, TEXTS[:8], content, rows=3)
    table = open_saved(tmp_path)
    places = table.places(range(8))
    assert {(place.file, place.kind) for place in places} == {(f"{tmp_path}/a.arrow", "bytes")}
    contents = (tmp_path / "a.arrow").read_bytes()
    for place, image in zip(places, images, strict=True):
        expected = (image or {}).get("bytes") or b""
        assert contents[place.at : place.at + place.size] == expected
    assert table.read([4])[0] == (b"4" * 50, "text 4", f"{tmp_path}, row 4", {}, None)
    assert table.origins([0]) == [("column text",)] and table.files() == [f"{tmp_path}/a.arrow"]


@pytest.mark.parametrize("compression", [None, "lz4"])
def test_a_copy_of_the_table_is_opened_in_place_of_the_data(tmp_path, compression):
    (tmp_path / "data").mkdir()
    write_arrow(tmp_path / "data/a.arrow", IMAGES, TEXTS, compression=compression)
    sources.open_records(Data("arrow", str(tmp_path / "data"), "text")).copy(tmp_path / "home")
    copied = sources.open_records(Data("arrow", str(tmp_path / "home"), "text"))
    assert [record.image for record in copied.read([8, 0])] == [b"8" * 50, b"0" * 50]
    assert copied.texts([8]) == ["text 8"]
    with pytest.raises(ValueError, match="was imported with text 'text', but this run has 'other"):
        sources.open_records(Data("arrow", str(tmp_path / "home"), "other"))


def test_a_folder_is_imported_once_and_again_after_it_has_changed(tmp_path, monkeypatch):
    write_arrow(tmp_path / "a.arrow", IMAGES, TEXTS)
    assert open_saved(tmp_path).texts([8]) == ["text 8"]
    with monkeypatch.context() as patch:
        patch.setattr(arrow, "_batches", None)  # The file's batches are not read.
        assert open_saved(tmp_path).read([8])[0].image == b"8" * 50
        with pytest.raises(TypeError):
            open_saved(tmp_path, uncaptioned="empty")  # This is another table.
    write_arrow(tmp_path / "a.arrow", IMAGES[:3], ["new"] * 3)
    assert open_saved(tmp_path).texts([0, 1, 2]) == ["new"] * 3


def test_one_batch_of_a_compressed_file_is_unpacked_at_a_time(tmp_path):
    images = [{"bytes": bytes(2**20), "path": None}] * 12
    write_arrow(tmp_path / "a.arrow", images, ["a"] * 12, rows=4, compression="zstd")
    del images
    before = pyarrow.total_allocated_bytes()
    rows = Columns("a", "text").rows(arrow._saved(tmp_path, [tmp_path / "a.arrow"]), "", LeftOut())
    peaks = [pyarrow.total_allocated_bytes() - before for _ in rows]
    assert len(peaks) == 12 and 4 * 2**20 < max(peaks) < 6 * 2**20


def test_pictures_in_compressed_files_are_stored_beside_the_table(tmp_path):
    images = [*IMAGES, None, {"bytes": None, "path": "outside.png"}]
    (tmp_path / "outside.png").write_bytes(b"outside")
    write_arrow(tmp_path / "a.arrow", images, ["a"] * 11, rows=4, compression="zstd")
    kept = tmp_path
    for _ in range(2):
        table = open_saved(tmp_path)
        read = [record.image for record in table.read(range(11))]
        assert read == [*(image["bytes"] for image in IMAGES), b"", b"outside"]
        (kept,) = tmp_path.rglob("*.pictures")
        assert kept.read_bytes() == b"".join(read[:9]) and not list(tmp_path.rglob("*.tmp"))
        files = [str(kept), f"{tmp_path}/a.arrow", f"{tmp_path}/outside.png"]
        assert table.files() == files
        assert table.names([9]) == [f"{tmp_path}, row 9"]
    kept.unlink()  # The table is damaged, so the data set is imported again.
    assert open_saved(tmp_path).read([3])[0].image == b"3" * 50
    for number in range(4):
        write_arrow(tmp_path / "a.arrow", IMAGES[number:], TEXTS[number:], compression="zstd")
        open_saved(tmp_path)
    assert len(list(tmp_path.rglob("*.pictures"))) == 3  # As many as tables.


def test_a_run_goes_on_with_its_rows_when_tables_come_that_are_compressed(tmp_path):
    (data := tmp_path / "data").mkdir()
    for number, images in enumerate((IMAGES, [{"bytes": None, "path": "x.png"}] * 9)):
        (data / "x.png").write_bytes(b"x")
        write_arrow(data / f"{number}.arrow", images, TEXTS, compression="zstd")
    with home.tables_of(tmp_path, begun=False) as tables:
        first = open_saved(data)
    tables.write()
    write_arrow(data / "2.arrow", IMAGES, TEXTS)
    with home.tables_of(tmp_path):
        assert open_saved(data).id() == first.id()
    assert len(open_saved(data)) == 27


def test_the_path_of_a_picture_is_relative_to_the_folder_or_to_the_current_one(tmp_path, monkeypatch):
    for folder in ("data", "here"):
        (tmp_path / folder).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    names = ["both.png", "here.png", f"{tmp_path}/far.png"]
    for name in ("data/both.png", "here/both.png", "here/here.png", "far.png"):
        (tmp_path / name).write_bytes(name.encode())
    images = [{"bytes": None, "path": name} for name in names]
    write_arrow(tmp_path / "data/a.arrow", images, ["a"] * 3)
    read = [record.image for record in open_saved("../data").read(range(3))]
    assert read == [b"data/both.png", b"here/here.png", b"far.png"]
    (tmp_path / "data/both.png").unlink()
    with pytest.raises(FileNotFoundError, match=r"stores the paths of its images, and \.\./data/b"):
        open_saved("../data")


def rows_of(table, text):
    """Return the rows of a table called t."""
    batches = ((batch, "") for batch in table.to_batches())
    return list(Columns("t", text).rows(batches, "", LeftOut()))


def test_a_table_without_rows_or_an_image_column_is_an_error():
    table = pyarrow.table({"text": ["a"]})
    with pytest.raises(ValueError, match=r"t has no image column, but only the columns text: "):
        rows_of(table, "text")
    table = table.append_column("jpg", pyarrow.array([b"x"]))
    with pytest.raises(ValueError, match=r"text, jpg: if jpg holds .* cast_column\('jpg', datasets"):
        rows_of(table, "text")
    with pytest.raises(ValueError, match=r"columns URL, TEXT: download the pictures that URL names, as `prepare downl"):
        rows_of(pyarrow.table({"URL": ["http://a/b.jpg"], "TEXT": ["a"]}), "TEXT")
    with pytest.raises(ValueError, match=r"t has no rows: choose another data set or split"):
        rows_of(table[:0], "text")


def test_a_folder_with_splits_is_an_error_that_lists_them(tmp_path):
    for split in ("test", "train"):
        (tmp_path / split).mkdir()
        (tmp_path / split / "state.json").touch()
    with pytest.raises(ValueError, match=r"no \.arrow files in .* \(splits of .*: test, train\)"):
        open_saved(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"there is no folder .*nowhere: check"):
        open_saved(tmp_path / "nowhere")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """Files in TFDS's format: FeaturesDict(image, caption, captions/text), three examples."""
    folder = tmp_path_factory.mktemp("tiny") / "1.0.0"
    folder.mkdir()
    name = "tensorflow_datasets.core.features."
    text = {"pythonClassName": name + "text_feature.Text", "text": {}}
    image = {
        "pythonClassName": name + "image_feature.Image",
        "image": {"dtype": "uint8", "shape": {"dimensions": ["-1", "-1", "3"]}},
    }
    nested = {"pythonClassName": name + "features_dict.FeaturesDict", "featuresDict": {"features": {"text": text}}}
    several = {"pythonClassName": name + "sequence_feature.Sequence", "sequence": {"feature": nested, "length": "-1"}}
    features = {"image": image, "caption": text, "captions": several}
    top = {"pythonClassName": nested["pythonClassName"], "featuresDict": {"features": features}}
    (folder / "features.json").write_text(json.dumps(top))
    split = {
        "name": "train",
        "numBytes": "9",
        "shardLengths": ["3"],
        "filepathTemplate": "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}",
    }
    info = {"fileFormat": "array_record", "name": "tiny", "version": "1.0.0", "splits": [split]}
    (folder / "dataset_info.json").write_text(json.dumps(info))
    rows = ({"image": b"image %d" % i, "caption": b" number %d" % i, "captions/text": b"c%d" % i} for i in range(3))
    arrayrecord.write(folder / "tiny-train.array_record-00000-of-00001", rows)
    return folder


def test_tfds_array_records_and_splits_are_read_without_tensorflow(prepared):
    records = open_split(f"{prepared}@train")
    assert [(r.image, r.text) for r in records.read([2, 0])] == [(b"image 2", "number 2"), (b"image 0", "number 0")]
    nested = open_split(f"{prepared}@train[1:]", "captions/text")
    assert [record.text for record in nested.read([0, 1])] == ["c1", "c2"]


def test_all_captions_of_a_tfds_example_are_read_with_weights(prepared, tmp_path):
    shutil.copytree(prepared, folder := tmp_path / "1.0.0")
    example = messages.encode({"image": [b"image"], "caption": [b"one"], "captions/text": [b"two", b" three"]})
    info = json.loads((folder / "dataset_info.json").read_text())
    info["splits"][0]["shardLengths"] = ["1"]
    (folder / "dataset_info.json").write_text(json.dumps(info))
    messages.write(next(folder.glob("*array_record*")), example)
    table = open_split(f"{folder}@train", "captions/text,caption*2")
    assert table.origins([0]) == [(*["feature captions/text"] * 2, "feature caption")]
    assert table.read([0])[0].text == Captions(("two", "three", "one"), (1 / 6, 1 / 6, 2 / 3))


def test_list_columns_and_several_columns_give_several_captions(tmp_path):
    image = [{"bytes": b"x", "path": None}] * 3
    kind = pyarrow.struct({"bytes": pyarrow.binary(), "path": pyarrow.string()})
    columns = {"text": [["a", "b"], [], None], "long": ["c", None, "d"]}
    table = pyarrow.table({"image": pyarrow.array(image, kind), **columns})
    texts = [row.text for row in rows_of(table, "text*2,long")]
    assert texts[0] == Captions(("a", "b", "c"), (1 / 3, 1 / 3, 1 / 3)) and texts[2] == "d"
    assert isinstance(texts[1], Unusable) and texts[1].reason == "no_caption"


def test_invalid_tfds_names_features_and_splits_are_errors(prepared):
    with pytest.raises(ValueError, match="write NAME@SPLIT, such as coco@train"):
        open_split("coco")
    with pytest.raises(ValueError, match=r"no feature 'text': it has .*\. Set data\.text"):
        open_split(f"{prepared}@train", "text")
    with pytest.raises(ValueError, match=r"TFDS cannot read .*--file_format=array_record"):
        open_split(f"{prepared}@validation")


@pytest.fixture(scope="module")
def tf_records(prepared, tmp_path_factory):
    """Examples in TFDS's default format: two TFRecord files."""
    folder = tmp_path_factory.mktemp("records") / "1.0.0"
    shutil.copytree(prepared, folder)
    (folder / "tiny-train.array_record-00000-of-00001").unlink()
    info = json.loads((folder / "dataset_info.json").read_text())
    info["fileFormat"], info["splits"][0]["shardLengths"] = "tfrecord", ["2", "3"]
    (folder / "dataset_info.json").write_text(json.dumps(info))
    for shard, numbers in enumerate((range(2), range(2, 5))):
        row = lambda i: {"image": b"image %d" % i * (i + 1), "caption": b" number %d" % i, "captions/text": b"c%d" % i}
        frames = [tf_examples.encode(row(i)) for i in numbers]
        contents = [struct.pack("<Q4x", len(f)) + f + struct.pack("<I", tf_examples.checksum(f)) for f in frames]
        (folder / f"tiny-train.tfrecord-0000{shard}-of-00002").write_bytes(b"".join(contents))
    return folder


def test_tf_records_are_read_at_random_positions_without_tensorflow(tf_records):
    loaded = "tensorflow" in sys.modules  # Other tests may have imported it.
    records = open_split(f"{tf_records}@train")
    expected = [(b"image %d" % i * (i + 1), f"number {i}") for i in (4, 0, 2)]
    assert [(r.image, r.text) for r in records.read([4, 0, 2])] == expected
    part = open_split(f"{tf_records}@train[1:4]", "captions/text")
    assert [record.text for record in part.read(range(len(part)))] == ["c1", "c2", "c3"]
    assert ("tensorflow" in sys.modules) == loaded


def test_checksums_of_tf_records_equal_those_that_tensorflow_writes():
    written = {b"a fox": b"\xee\xc5\x94\x9a", b"": b"\xd8\xea\x82\xa2"}  # By TFRecordWriter.
    for contents, checksum in written.items():
        assert struct.pack("<I", tf_examples.checksum(contents)) == checksum


def test_a_changed_byte_in_a_tf_record_makes_only_this_record_unusable(tf_records, tmp_path):
    shutil.copytree(tf_records, tmp_path / "1.0.0")
    file = tmp_path / "1.0.0/tiny-train.tfrecord-00001-of-00002"
    file.write_bytes(file.read_bytes().replace(b" number 3", b" number 8"))
    images = [record.image for record in open_split(f"{tmp_path}/1.0.0@train").read(range(5))]
    texts = [record.text for record in open_split(f"{tmp_path}/1.0.0@train").read(range(5))]
    assert images[3] == b"" and texts[3].reason == "wrong_checksum"
    assert [*texts[:3], texts[4]] == ["number 0", "number 1", "number 2", "number 4"]


def test_a_bit_that_flips_in_an_imported_tf_record_is_noticed_when_it_is_read(tf_records, tmp_path):
    shutil.copytree(tf_records, tmp_path / "1.0.0")
    table = open_split(f"{tmp_path}/1.0.0@train")
    file, before = tmp_path / "1.0.0/tiny-train.tfrecord-00001-of-00002", table.read(range(5))
    stamp, contents = file.stat(), bytearray(file.read_bytes())
    contents[contents.index(b"image 3") + 8] ^= 1
    file.write_bytes(contents)
    os.utime(file, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    for again in (table, open_split(f"{tmp_path}/1.0.0@train")):
        after = again.read(range(5))
        assert after[3].image == b"" and after[3].text.reason == "wrong_checksum"
        assert [*after[:3], after[4]] == [*before[:3], before[4]]
    file.write_bytes(contents[:-9])
    texts = [record.text for record in table.read([2, 4])]
    assert texts[0] == "number 2" and texts[1].reason == "wrong_checksum"


def test_a_damaged_array_record_of_tfds_makes_only_this_record_unusable(prepared, tmp_path):
    shutil.copytree(prepared, tmp_path / "1.0.0")
    file = next((tmp_path / "1.0.0").glob("*array_record*"))
    contents = bytearray(file.read_bytes())
    contents[contents.index(b"image 1") + 4] ^= 255
    file.write_bytes(contents)
    records = open_split(f"{tmp_path}/1.0.0@train").read(range(3))
    assert [record.image for record in records] == [b"image 0", b"", b"image 2"]
    assert records[1].text.reason == "broken_record" and records[2].text == "number 2"
    assert [record.name for record in records[:2]] == [f"{tmp_path}/1.0.0@train, {i}" for i in (0, 1)]


@pytest.mark.parametrize(
    ("files", "name"),
    [
        ("prepared", "tiny-train.array_record-00000-of-00001"),
        ("tf_records", "tiny-train.tfrecord-00001-of-00002"),
        ("prepared", "dataset_info.json"),
        ("prepared", "features.json"),
    ],
)
def test_a_pointer_of_git_lfs_in_place_of_a_file_of_tfds_is_named(request, tmp_path, files, name):
    shutil.copytree(request.getfixturevalue(files), tmp_path / "1.0.0")
    (tmp_path / "1.0.0" / name).write_bytes(POINTER + b"v1\noid sha256:0\nsize 3\n")
    with pytest.raises(ValueError, match=rf"/1\.0\.0/{name} is a pointer of Git LFS, not the file: run git lfs pull"):
        open_split(f"{tmp_path}/1.0.0@train")


def test_truncated_tf_records_and_unsupported_formats_are_errors(tf_records, tmp_path):
    shutil.copytree(tf_records, tmp_path / "1.0.0")
    file = tmp_path / "1.0.0/tiny-train.tfrecord-00001-of-00002"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"tfrecord-00001-of-00002 is not a complete TFRecord file"):
        open_split(f"{tmp_path}/1.0.0@train")
    info = json.loads((tmp_path / "1.0.0/dataset_info.json").read_text()) | {"fileFormat": "riegeli"}
    (tmp_path / "1.0.0/dataset_info.json").write_text(json.dumps(info))
    with pytest.raises(ValueError, match="the file format RIEGELI has no random access"):
        open_split(f"{tmp_path}/1.0.0@train")


def test_damaged_arrow_files_are_errors_and_do_not_crash_the_process(tmp_path):
    path = tmp_path / "data.arrow"
    write_arrow(path, [{"bytes": b"x" * 20, "path": None}] * 9, ["a cat"] * 9)
    # The first offsets of the captions.
    whole, offsets = path.read_bytes(), struct.pack("<3i", 0, 5, 10)
    assert whole.count(offsets) == 1
    for damaged in (whole[:-300], whole.replace(offsets, struct.pack("<3i", 0, 2**30, 10)), b"x"):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"data\.arrow is damaged: "):
            open_saved(tmp_path)


def test_damaged_parquet_files_are_errors(tmp_path):
    path = tmp_path / "data.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"image": [b"x"], "caption": ["a"]}), path)
    for damaged in (path.read_bytes()[:-20], b"PAR1" * 9):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"datasets cannot open .*data\.parquet"):
            arrow._load(str(path), "")


def test_the_number_of_a_tfds_example_is_one_of_its_features(prepared, tmp_path):
    shutil.copytree(prepared, folder := tmp_path / "1.0.0")
    top = json.loads((folder / "features.json").read_text())
    name = "tensorflow_datasets.core.features.tensor_feature.Tensor"
    tensor = {"shape": {}, "dtype": "float32", "encoding": "none"}
    features = top["featuresDict"]["features"]
    features["score"] = {"pythonClassName": name, "tensor": tensor}
    (folder / "features.json").write_text(json.dumps(top))
    texts = {"image": [b"image"], "caption": [b"a"], "captions/text": [b"a"]}
    examples = [messages.encode(texts, {"score": [n / 2]}) for n in range(3)]
    messages.write(next(folder.glob("*array_record*")), *examples)
    records = open_split(f"{folder}@train", fields=picture_fields.read(("score=0..10",)))
    assert [record.numbers["score"] for record in records.read([2, 0])] == [1.0, 0.0]
    with pytest.raises(ValueError, match=r"no feature 'taste': it has .*\. Set data\.fields"):
        open_split(f"{folder}@train", fields=picture_fields.read(("taste",)))
