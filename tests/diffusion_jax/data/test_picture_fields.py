"""Numbers of records reach the batch together with their pictures, from every kind of source.

The red value of picture n is 20 n, and its score is n / 2, so that they can be compared.
"""

import io
import json

import datasets
import numpy as np
import pytest
from PIL import Image

from diffusion_jax.config import picture_fields
from diffusion_jax.config.settings import Data, Run
from diffusion_jax.data import pipeline, tars
from diffusion_jax.data.prepare import reshard, validate
from diffusion_jax.data.sources import arrayrecord, open_pictures, open_records
from diffusion_jax.devices import sharding
from diffusion_jax.precache import moments

NUM, SIZE = 6, 8
FIELD = "field_score"
TOKENIZE = lambda texts: {"text": np.array(texts)}


def png(n, shape=(SIZE, SIZE)):
    file = io.BytesIO()
    Image.new("RGB", shape, (20 * n, 0, 0)).save(file, "PNG")
    return file.getvalue()


@pytest.fixture(scope="module")
def forms(tmp_path_factory):
    """Write six pictures with scores in every format."""
    root = tmp_path_factory.mktemp("fields")
    for form in ("csv", "jsonl", "json", "beside"):
        (root / form).mkdir()
        for n in range(NUM):
            (root / form / f"{n}.png").write_bytes(png(n))
            (root / form / f"{n}.txt").write_text(f"picture {n}")
    rows = [{"file_name": f"{n}.png", "text": f"picture {n}", "score": n / 2} for n in range(NUM)]
    table = ["file_name,text,score", *(",".join(map(str, row.values())) for row in rows)]
    (root / "csv" / "metadata.csv").write_text("\n".join(table))
    (root / "beside" / "scores.csv").write_text("\n".join(table))
    (root / "jsonl" / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for n, row in enumerate(rows):
        (root / "json" / f"{n}.json").write_text(json.dumps(row))
    about = [json.dumps(row).encode() for row in rows]
    members = [{tars.KEY: b"%d" % n, "png": png(n), "txt": b"picture %d" % n, "json": about[n]} for n in range(NUM)]
    tars.write(root / "shard.tar", members)
    arrayrecord.write(root / "json.array_record", members)
    features = datasets.Features(image=datasets.Image(), text=datasets.Value("string"), score=datasets.Value("float32"))
    columns = {"image": [{"bytes": png(n), "path": None} for n in range(NUM)]}
    columns |= {name: [row[name] for row in rows] for name in ("text", "score")}
    datasets.Dataset.from_dict(columns, features=features).save_to_disk(root / "arrow")
    return root


def batches_of(data, batch_size=NUM, **options):
    run = Run(steps=1, batch_size=batch_size)
    mesh = sharding.make_mesh(1, 1, 1)
    return pipeline.training_batches(open_pictures(data, SIZE, **options), TOKENIZE, run, data, mesh)


def check(batch, name="image"):
    reds = batch[name][:, 0, 0, 0] if name == "image" else batch[name][:, 0, 0, 0] * 255
    assert batch[FIELD].dtype == np.float32 and batch[FIELD].shape == (len(reds),)
    np.testing.assert_allclose(batch[FIELD], reds / 40, atol=1e-5)


SOURCES = {
    "csv": ("folder", "csv", "csv:text", "score=0..10"),
    "jsonl": ("folder", "jsonl", "jsonl:text", "score=0..10"),
    "json beside the image": ("folder", "json", "txt", "score=0..10"),
    "a table besides captions": ("folder", "beside", "txt", "csv:score=0..10"),
    "webdataset": ("webdataset", "shard.tar", "txt", "score=0..10"),
    "webdataset with captions in json": ("webdataset", "shard.tar", "json:text", "json:score=0..3"),
    "arrayrecord": ("arrayrecord", "json.array_record", "txt", "json:score=0..10"),
    "arrow": ("arrow", "arrow", "text", "score=0..10"),
}


@pytest.mark.parametrize("name", SOURCES)
def test_the_number_of_each_record_reaches_the_batch(forms, name):
    source, path, text, field = SOURCES[name]
    data = Data(source, str(forms / path), text, fields=(field,), heldout=0.4)
    with batches_of(data) as batches:
        check(batches.example())
        for _ in range(3):
            check(next(batches))
        assert batches.apart is not None
        keys, apart = batches.apart.read(10)
        assert 0 < len(keys) < NUM
        check(apart)


def test_a_mixture_reads_the_number_from_the_source_of_each_picture(forms):
    parts = tuple((1.0, s, str(forms / p), t) for s, p, t, _ in map(SOURCES.get, ("csv", "arrow")))
    with batches_of(Data("mixture", mixture=parts, fields=("score=0..10",))) as batches:
        for _ in range(3):
            check(next(batches))


def test_pictures_of_the_prior_have_unknown_numbers(forms):
    data = Data("folder", str(forms / "csv"), "csv:text", fields=("score=0..10",))
    with batches_of(data._replace(prior=str(forms / "jsonl"))) as batches:
        batch = next(batches)
        np.testing.assert_array_equal(np.isnan(batch[FIELD]), [False, True] * (NUM // 2))


def test_aspect_buckets_keep_the_numbers_with_their_pictures(tmp_path):
    rows = ["file_name,text,score"]
    for n in range(NUM):
        shape = (2 * SIZE, SIZE) if n % 2 else (SIZE, 2 * SIZE)
        (tmp_path / f"{n}.png").write_bytes(png(n, shape))
        rows.append(f"{n}.png,picture {n},{n / 2}")
    (tmp_path / "a.csv").write_text("\n".join(rows))
    data = Data("folder", str(tmp_path), "csv:text", fields=("score=0..10",))
    with batches_of(data._replace(aspect_buckets=((16, 8), (8, 16))), 3) as batches:
        for _ in range(4):
            check(next(batches))


@pytest.mark.parametrize("format", ["webdataset", "arrayrecord"])
def test_reshard_writes_the_numbers(forms, tmp_path, format):
    data = Data("folder", str(forms / "csv"), "csv:text", fields=("score=0..10",))
    named = picture_fields.read(data.fields)
    written = reshard.reshard(open_records(data), tmp_path, num=4, format=format, identity={}, fields=named)
    assert written == {"written": NUM}
    with batches_of(data._replace(source=format, path=str(tmp_path), text="txt")) as batches:
        check(next(batches))


def test_stored_moments_have_the_numbers_of_their_images(forms, tmp_path):
    data = Data("folder", str(forms / "csv"), "csv:text", fields=("score=0..10",))
    encode = lambda images: np.repeat(images[:, :4, :4, :1] / np.float32(255), 2, axis=3)
    options, identity = moments.MomentOptions(4, 2), {"image_size": SIZE}
    assert moments.run(open_pictures(data, SIZE), encode, tmp_path, identity, options) == NUM
    data = data._replace(source="moments", path=str(tmp_path))
    run, mesh = Run(steps=1, batch_size=NUM), sharding.make_mesh(1, 1, 1)
    pictures = open_pictures(data, SIZE, moments=(4, 4, 2))
    with pipeline.training_batches(pictures, TOKENIZE, run, data, mesh, "moments") as batches:
        check(next(batches), "moments")


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        ("n/a", r"a\.csv, line 3: the field score is 'n/a': it must be a number from 0 to 10"),
        ("", r"a\.csv, line 3: the field score is '': it must be a number from 0 to 10"),
        ("nan", r"a\.csv, line 3: the field score is 'nan'"),
        ("-1", r"a\.csv, line 3: the field score is '-1': it must be a number from 0 to 10"),
    ],
)
def test_a_table_cell_without_a_number_is_an_error_that_names_its_place(tmp_path, cell, message):
    for n in range(2):
        (tmp_path / f"{n}.png").write_bytes(png(n))
    (tmp_path / "a.csv").write_text(f"file_name,text,score\n0.png,a,1\n1.png,b,{cell}")
    with pytest.raises(ValueError, match=message):
        open_pictures(Data("folder", str(tmp_path), "csv:text", fields=("score=0..10",)), SIZE)


def test_images_without_a_number_are_an_error_before_training(forms, tmp_path):
    for n in range(2):
        (tmp_path / f"{n}.png").write_bytes(png(n))
        (tmp_path / f"{n}.txt").write_text("a")
    (tmp_path / "0.json").write_text('{"score": 1}')
    with pytest.raises(ValueError, match=r"1 of 2 images in .* have no number for 'score' .*1\.png"):
        open_pictures(Data("folder", str(tmp_path), fields=("score=0..10",)), SIZE)


@pytest.mark.parametrize("name", ["csv", "arrow"])
def test_a_field_missing_in_the_data_is_an_error_when_it_is_opened(forms, name):
    source, path, text, _ = SOURCES[name]
    with pytest.raises(ValueError, match=r"'taste'.*columns.* score"):
        open_pictures(Data(source, str(forms / path), text, fields=("taste",)), SIZE)


@pytest.mark.parametrize("name", ["webdataset", "arrayrecord"])
def test_a_field_missing_in_all_records_is_an_error_at_the_first_batch(forms, name):
    source, path, text, _ = SOURCES[name]
    data = Data(source, str(forms / path), text, fields=("taste",))
    with batches_of(data) as batches, pytest.raises(ValueError, match="the field taste is missing"):
        batches.example()


def test_a_record_with_a_damaged_number_is_counted_and_replaced(forms, tmp_path):
    about = lambda n: json.dumps({"score": None if n == 3 else n / 2}).encode()
    member = lambda n: {tars.KEY: b"%d" % n, "png": png(n), "txt": b"t", "json": about(n)}
    tars.write(tmp_path / "a.tar", map(member, range(NUM)))
    data = Data("webdataset", str(tmp_path), fields=("score=0..10",), max_broken=0.5)
    with batches_of(data) as batches:
        for _ in range(2):
            check(next(batches))
        assert batches.skipped() == {"broken_number": 1}
    report = validate.validate(open_records(data), fields=picture_fields.read(data.fields))
    assert report["unusable"] == {"broken_number": 1}
    assert "3.png: broken_number: the field score is missing" in report["unusable_first"][0]


def test_fields_are_an_error_for_sources_without_numbers():
    with pytest.raises(ValueError, match="the data source 'synthetic' gives no numbers"):
        open_pictures(Data("synthetic", fields=("score",)), SIZE)


def test_rows_of_one_image_must_agree_in_their_number(tmp_path):
    (tmp_path / "0.png").write_bytes(png(0))
    table = "file_name,text,score\n0.png,a,1\n0.png,b,{}"
    data = Data("folder", str(tmp_path), "csv:text", fields=("score=0..10",))
    (tmp_path / "a.csv").write_text(table.format(1))
    assert open_records(data).read([0])[0].numbers == {"score": 1.0}
    (tmp_path / "a.csv").write_text(table.format(2))
    with pytest.raises(ValueError, match=r"a\.csv has several numbers in the column score for 0"):
        open_records(data)


def test_the_text_of_a_field_gives_its_name_place_and_range():
    read = picture_fields.read(("aesthetic=0..10", "csv:meta/year=-50..2030.5", "share"))
    assert read == (("", "aesthetic", 0, 10), ("csv", "meta/year", -50, 2030.5), ("", "share", 0, 1))
    assert [field.key for field in read] == ["field_aesthetic", "field_meta_year", "field_share"]


@pytest.mark.parametrize("text", ["", "a=", "a=1", "a=1..1", "a=2..1", "a=x..1", "a=0..inf", "=0..1", "a:b:c"])
def test_a_malformed_field_is_an_error(text):
    with pytest.raises(ValueError, match=r"data\.fields holds .*: write NAME=LOW\.\.HIGH"):
        picture_fields.read((text,))


def test_two_fields_with_one_name_are_an_error():
    with pytest.raises(ValueError, match="several fields 'a b': give each its own name"):
        picture_fields.read(("a b", "a_b"))
