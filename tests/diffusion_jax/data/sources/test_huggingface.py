"""Data sets written by the package `datasets`: save_to_disk, and parquet as on the Hub."""

import io
import shutil
from typing import Any

import numpy as np
import pytest
from PIL import Image

from diffusion_jax.config.settings import Data
from diffusion_jax.data import __main__ as data_command
from diffusion_jax.data import prompts, show, sources
from diffusion_jax.data.pictures import TaskShapes
from diffusion_jax.data.sources import arrow

NUM = 7


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """Let `datasets` use a temporary cache."""
    import datasets

    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", folder)
        yield folder


def pixels(number):
    """Return a picture of one colour."""
    return np.full((6, 8, 3), (number, 2 * number, 90), np.uint8)


def rows_of(numbers, *masks):
    """Return a Dataset of pictures with captions, and with columns of masks before them."""
    import datasets

    columns = {"text": [f"number {i} " for i in numbers]}
    for name in (*masks, "image"):
        columns[name] = [Image.fromarray(pixels(i if name == "image" else 99)) for i in numbers]
    kinds = {name: datasets.Value("string") if name == "text" else datasets.Image() for name in columns}
    return datasets.Dataset.from_dict(columns, features=datasets.Features(kinds))


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A DatasetDict written by save_to_disk, and the same data in the layout of the Hub."""
    import datasets

    folder = tmp_path_factory.mktemp("written")
    both = datasets.DatasetDict({"train": rows_of(range(NUM)), "test": rows_of(range(50, 52))})
    both.save_to_disk(folder / "saved")
    data = folder / "clone/data"
    data.mkdir(parents=True)
    for shard in range(2):
        part = both["train"].shard(2, shard, contiguous=True)
        part.to_parquet(data / f"train-0000{shard}-of-00002.parquet")
    both["test"].to_parquet(data / "test-00000-of-00001.parquet")
    return folder


def read(source, path, text="text"):
    """Return (number of the picture, caption) for every record, in order."""
    records = sources.open_records(Data(source, str(path), text))
    rows = []
    for record in records.read(range(len(records))):
        image = np.asarray(Image.open(io.BytesIO(record.image)))
        np.testing.assert_array_equal(image, pixels(image[0, 0, 0]))
        rows.append((int(image[0, 0, 0]), record.text))
    assert records.texts(range(len(records))) == [text for _, text in rows]
    return rows


TRAIN = [(i, f"number {i}") for i in range(NUM)]
TEST = [(i, f"number {i}") for i in (50, 51)]


@pytest.mark.parametrize(
    ("source", "path", "rows"),
    [
        ("arrow", "saved@train", TRAIN),
        ("arrow", "saved/test", TEST),
        ("huggingface", "saved@test", TEST),
        ("huggingface", "clone@train", TRAIN),
        ("huggingface", "clone@test", TEST),
        ("huggingface", "clone@train[2:4]", TRAIN[2:4]),
        ("huggingface", "clone/data/train-0000{0,1}-of-00002.parquet", TRAIN),
    ],
)
def test_every_layout_is_read_with_pictures_and_captions(written, source, path, rows):
    assert read(source, written / path) == rows


def test_an_import_prints_the_source_that_opens_its_table(written, tmp_path, capsys):
    saved = f"huggingface:{written}/saved@train::text"
    data_command.main(["import", saved, f"--out={tmp_path}/out"])
    assert f"--config.data.source=arrow --config.data.path={tmp_path}/out" in capsys.readouterr().out


@pytest.mark.parametrize(("source", "path"), [("huggingface", "clone@train"), ("huggingface", "saved@test")])
def test_pictures_and_tables_beside_the_records_are_named(written, tmp_path, source, path):
    shutil.copytree(written / path.partition("@")[0], tmp_path / path.partition("@")[0])
    data = Data(source, f"{tmp_path}/{path}", "text")
    before = sources.open_records(data)
    for name in ("b.jpg", "captions.csv", "README.md", ".gitattributes"):
        (tmp_path / path.partition("@")[0] / name).write_text("file_name,caption\nb.jpg,a cat\n")
    opened: Any = sources.open_records(data)
    assert opened.id() == before.id() and before.left_out() == {}
    assert opened.left_out() == {"hidden": 1, "beside_records": 2}
    left = {name.rpartition("/")[2]: reason for name, reason in opened.left()}
    assert left == {".gitattributes": "hidden", "b.jpg": "beside_records", "captions.csv": "beside_records"}
    (doubt,) = [doubt for doubt in show.doubts(opened) if "captions.csv" in doubt]
    assert doubt.endswith("captions must be in the records: write the data set again with them")


def test_pictures_of_parquet_are_read_at_their_places_in_the_cache_of_datasets(written, cache):
    opened = lambda split: arrow.open_any(Data("huggingface", f"{written}/clone@{split}", "text"), TaskShapes(8))
    table = opened("train[2:4]")
    for place, record in zip(table.places([0, 1]), table.read([0, 1]), strict=True):
        contents = (cache / place.file).read_bytes()
        assert contents[place.at : place.at + place.size] == record.image
        assert place.file.startswith(f"{cache}/") and place.kind == "bytes"
    assert table.names([1]) == [f"{written}/clone@train[2:4], row 1"]
    both = opened("train[:1]+test")
    assert both.texts(range(3)) == ["number 0", "number 50", "number 51"]
    assert len({place.file for place in both.places(range(3))}) == 2


def test_only_the_tables_that_save_to_disk_wrote_last_are_read(tmp_path, caplog):
    import datasets

    rows, saved = rows_of(range(NUM), "mask"), tmp_path / "saved"
    rows.save_to_disk(saved, num_shards=2)
    rows.select([4, 2]).save_to_disk(saved, num_shards=1)  # The two former tables stay.
    datasets.load_from_disk(saved).map(lambda row: {"text": row["text"] + "!"})
    assert len(list(saved.glob("*.arrow"))) == 4
    assert read("arrow", saved) == [TRAIN[4], TRAIN[2]]
    assert "has several image columns (mask, image): reading image" in caplog.text
    (saved / "state.json").unlink()
    assert len(read("arrow", saved)) == 2 + NUM + 2
    rows.remove_columns("mask").save_to_disk(saved, num_shards=3)
    (saved / "data-00001-of-00003.arrow").unlink()
    with pytest.raises(FileNotFoundError, match=r"data-00001-of-00003\.arrow is missing, one of"):
        read("arrow", saved)
    (saved / "state.json").write_text("{}")
    with pytest.raises(ValueError, match=r"state\.json is damaged: KeyError\('_data_files'\)"):
        read("arrow", saved)
    (saved / "state.json").unlink()
    with pytest.raises(ValueError, match=r"have different columns .* keep those of one data set"):
        read("arrow", saved)


def test_captions_of_a_hugging_face_data_set_can_be_prompts(written):
    assert prompts.read(f"huggingface:{written}/clone@test::text") == ["number 50", "number 51"]
    drawn = prompts.read(f"arrow:{written}/saved@train::text", 3)
    assert len(drawn) == 3 and set(drawn) < {text for _, text in TRAIN}
    with pytest.raises(ValueError, match="or a data source such as tfds:coco"):
        prompts.read(f"arrows:{written}/saved@train::text")


@pytest.mark.parametrize(
    ("source", "path", "text", "message"),
    [
        ("huggingface", "clone", "text", r"has the splits .*train.*: choose .*clone@SPLIT"),
        ("huggingface", "clone@valid", "text", r"datasets cannot open .*clone: Unknown split"),
        ("huggingface", "clone@train", "caption", "'caption', but .*clone@train has only the columns text, image: set"),
        ("huggingface", "saved", "text", r"splits of .*: test, train\): choose a split as .*@SPLIT"),
        ("arrow", "clone", "text", r"no \.arrow files in .* with the source 'huggingface'"),
    ],
)
def test_invalid_paths_splits_and_columns_are_errors(written, source, path, text, message):
    with pytest.raises(ValueError, match=message):
        sources.open_records(Data(source, str(written / path), text))


def test_parquet_with_paths_of_missing_images_is_an_error(tmp_path):
    import datasets

    Image.fromarray(pixels(1)).save(tmp_path / "a.png")
    features = datasets.Features({"text": datasets.Value("string"), "image": datasets.Image()})
    columns = {"text": ["a"], "image": [f"{tmp_path}/a.png"]}
    rows = datasets.Dataset.from_dict(columns, features=features)
    rows.to_parquet(tmp_path / "paths.parquet")  # The file holds the path, not the image.
    assert read("huggingface", tmp_path / "paths.parquet") == [(1, "a")]
    (tmp_path / "a.png").unlink()
    with pytest.raises(FileNotFoundError, match=r"stores the paths of its images, and .*a\.png does not exist"):
        sources.open_records(Data("huggingface", f"{tmp_path}/paths.parquet", "text"))


def test_missing_shards_are_named_in_a_warning(written, tmp_path, caplog):
    shutil.copytree(written / "clone", tmp_path / "clone")
    read("huggingface", tmp_path / "clone@train")
    assert not caplog.text
    (tmp_path / "clone/data/train-00000-of-00002.parquet").unlink()
    read("huggingface", tmp_path / "clone@train")
    assert f"only 1 of the 2 files {tmp_path}/clone/data/train-*-of-* exist: copy" in caplog.text


def test_the_error_for_a_folder_of_several_data_sets_names_the_folder_of_one(written, tmp_path):
    configs = "".join(f"- config_name: {n}\n  data_files: {n}/*.parquet\n" for n in ("b", "a"))
    (tmp_path / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    for name in ("a", "b"):
        shutil.copytree(written / "clone/data", tmp_path / name)
    with pytest.raises(ValueError, match=rf"holds the data sets b, a: name .*{tmp_path}/b$"):
        read("huggingface", tmp_path)
    assert read("huggingface", f"{tmp_path}/b@train") == TRAIN


def test_a_missing_local_folder_is_not_searched_on_the_hub(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no data at .*nowhere: check the path"):
        sources.open_records(Data("huggingface", f"{tmp_path}/nowhere@train", "text"))
