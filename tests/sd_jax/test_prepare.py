"""Prepare the benchmark's data from small files with the format of the public ones."""

import io
import json
import zipfile

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet
import pytest
from PIL import Image

from sd_jax import prepare
from sd_jax.mlperf import coco, laion

WORDS = ["a", "cat", '"sits"', "on\tthe", "mat,", "naïve", "猫", "it's"]


def annotations(path, images=400):
    """Write captions in random order, 4 to 6 per image, some with characters to be quoted."""
    rng = np.random.default_rng(0)
    of = np.repeat(np.arange(images) * 7 + 3, rng.integers(4, 7, images))
    rng.shuffle(of)
    rows = [
        {
            "image_id": int(image),
            "id": int(i),
            "caption": " \n".join(rng.choice(WORDS, 4)) + rng.choice(["", "\n", " "]),
        }
        for image, i in zip(of, rng.permutation(len(of)) + 10, strict=True)
    ]
    path.write_text(json.dumps({"info": {}, "annotations": rows}))
    return rows


def test_the_captions_file_equals_that_of_pandas_byte_for_byte(tmp_path):
    frame = pd.DataFrame(annotations(tmp_path / "captions.json"))
    frame["caption"] = frame["caption"].map(lambda text: text.replace("\n", "").strip())
    frame = frame.sample(frac=1, random_state=2023).drop_duplicates("image_id")[:300]
    frame.sort_values("id").to_csv(tmp_path / "theirs.tsv", sep="\t", index=False)
    out = tmp_path / "ours.tsv"
    arguments = ["captions", f"--annotations={tmp_path}/captions.json", f"--out={out}"]
    prepare.main([*arguments, "--num=300", "--dry_run"])
    assert not out.exists()
    prepare.main([*arguments, "--num=300"])
    assert out.read_bytes() == (tmp_path / "theirs.tsv").read_bytes()
    rows = coco.read_tsv(out)
    assert len(rows) == 300 and any('"' in row.caption for row in rows)
    assert rows == coco.choose(coco.read_annotations(tmp_path / "captions.json"), 300)


def test_the_shuffle_matches_pandas_for_as_many_captions_as_in_coco():
    n = 202_654
    theirs = pd.Series(np.arange(n)).sample(frac=1, random_state=2023).to_numpy()
    np.testing.assert_array_equal(np.random.RandomState(2023).permutation(n), theirs)


def photo(size, mode="RGB"):
    rng = np.random.default_rng(size[0])
    image = Image.fromarray(rng.integers(0, 256, (*size, 3), np.uint8)).convert(mode)
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=95)
    return buffer.getvalue()


def test_images_are_resized_to_squares_like_in_pillow(tmp_path):
    captions = [coco.Caption(7, 1, "a"), coco.Caption(42, 2, "b")]
    (tmp_path / "c.tsv").write_text(coco.to_tsv(captions))
    with zipfile.ZipFile(tmp_path / "val2014.zip", "w") as archive:
        for row, mode in zip(captions, ("RGB", "L"), strict=True):
            contents = photo((row.image_id + 20, 60), mode)
            archive.writestr(f"val2014/{coco.image_name(row.image_id)}", contents)
    out = tmp_path / "out"
    arguments = ["images", f"--captions={tmp_path}/c.tsv", f"--images={tmp_path}/val2014.zip", f"--out={out}"]
    prepare.main([*arguments, "--dry_run"])
    assert not out.exists()
    prepare.main(arguments)
    name = "COCO_val2014_000000000042.jpg"
    assert sorted(p.name for p in out.iterdir()) == ["COCO_val2014_000000000007.jpg", name]
    with Image.open(io.BytesIO(photo((62, 60), "L"))) as image:
        image.resize((512, 512), Image.Resampling.BICUBIC).save(tmp_path / "theirs.jpg")
    assert (out / name).read_bytes() == (tmp_path / "theirs.jpg").read_bytes()
    before = (out / name).stat().st_mtime_ns
    (out / "COCO_val2014_000000000007.jpg").unlink()
    prepare.main(arguments)
    assert (out / name).stat().st_mtime_ns == before and len(list(out.iterdir())) == 2


def metadata(path, rows=5000, **more):
    rng = np.random.default_rng(rows)
    licences = [str(one) for one in rng.choice(["?", "CC-BY 2.0", "x"], rows, p=[0.9, 0.06, 0.04])]
    table = {
        "SAMPLE_ID": rng.random(rows),
        "URL": [f"http://h/{i}.jpg" for i in range(rows)],
        "TEXT": [f"text {i}" for i in range(rows)],
        "HEIGHT": rng.integers(1, 999, rows),
        "WIDTH": rng.integers(1, 999, rows),
        "LICENSE": [None, *licences[1:]],
        "NSFW": ["UNLIKELY"] * rows,
        "similarity": rng.random(rows),
    }
    table = pa.table({name: values for name, values in (table | more).items() if values is not None})
    path.parent.mkdir(exist_ok=True)
    pyarrow.parquet.write_table(table, path, row_group_size=700)


def test_rows_with_a_licence_match_those_selected_by_pandas(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(laion, "_BATCH", 300)
    names = [f"part-{i:05}.snappy.parquet" for i in range(2)]
    for rows, name in zip((5000, 100), names, strict=True):
        metadata(tmp_path / "in" / name, rows)
    arguments = ["laion", f"--metadata={tmp_path}/in", f"--out={tmp_path}/out"]
    prepare.main([*arguments, "--dry_run"])
    assert "would filter 2 of 2 tables" in capsys.readouterr().out
    prepare.main(arguments)
    num_rows = 0
    for name in names:
        ours = pyarrow.parquet.read_table(tmp_path / "out" / name).to_pandas()
        theirs = pd.read_parquet(tmp_path / "in" / name)
        theirs = theirs[theirs["LICENSE"] != "?"].reset_index(drop=True)
        pd.testing.assert_frame_equal(ours, theirs)
        num_rows += len(theirs)
    assert (
        num_rows > 400
        and f"kept {num_rows} of 5,100 rows, those whose LICENSE is not '?'; 2 tables" in capsys.readouterr().out
    )
    (tmp_path / "out" / names[1]).unlink()
    before = (tmp_path / "out" / names[0]).stat().st_mtime_ns
    prepare.main(arguments)
    assert (tmp_path / "out" / names[0]).stat().st_mtime_ns == before
    assert {path.name for path in (tmp_path / "out").iterdir()} == set(names)


@pytest.mark.parametrize(
    ("command", "flags"),
    [
        ("mlperf", "--out"),
        ("laion", "--metadata, --out"),
        ("captions", "--annotations, --out"),
        ("images", "--captions, --images, --out"),
        ("miniature", "--out"),
    ],
)
def test_a_command_without_its_paths_is_an_error_that_lists_them(command, flags, capsys):
    with pytest.raises(SystemExit):
        prepare.main([command])
    assert capsys.readouterr().err.endswith(f"arguments are required: {flags}\n")


def test_malformed_inputs_of_prepare_are_errors(tmp_path, capsys):
    def error(*arguments):
        with pytest.raises(SystemExit) as ended:
            prepare.main([*arguments, f"--out={tmp_path}/out"])
        assert ended.value.code == 2
        return capsys.readouterr().err

    assert "name the folder of LAION-400M's metadata" in error("laion", f"--metadata={tmp_path}")
    metadata(tmp_path / "in" / "a.parquet", 5, LICENSE=None)
    assert "a.parquet has no column LICENSE" in error("laion", f"--metadata={tmp_path}/in")
    (tmp_path / "in" / "a.parquet").write_bytes(b"PAR")
    assert "a.parquet is not a parquet file, or" in error("laion", f"--metadata={tmp_path}/in")
    assert not list(tmp_path.glob("out/*"))
    (tmp_path / "x.json").write_text('{"images": []}')
    assert "does not have the format of COCO's" in error("captions", f"--annotations={tmp_path}/x.json")
    annotations(tmp_path / "y.json", 20)
    few = error("captions", f"--annotations={tmp_path}/y.json")
    assert "30000 captions of different images are needed, but --annotations describes only" in few
    (tmp_path / "c.tsv").write_text("id\tcaption\n1\ta\n")
    images = ("images", f"--captions={tmp_path}/c.tsv", f"--images={tmp_path}/in")
    assert "c.tsv, line 2 has no column image_id" in error(*images)
    (tmp_path / "c.tsv").write_text("image_id\tid\tcaption\n1\tx\ta\n")
    assert "c.tsv, line 2 is malformed" in error(*images)
    (tmp_path / "c.tsv").write_text("image_id\tid\tcaption\n1\t2\t\n")
    assert "c.tsv, line 2 has an empty caption" in error(*images)
