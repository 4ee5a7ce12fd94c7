"""Stored VAE moments: changed pictures, damaged files, and killed workers."""

import json
import logging
import os
import re
import shutil
from typing import Any

import numpy as np
import pytest
from PIL import Image

from diffusion_jax.config.settings import Data
from diffusion_jax.data import __main__ as data_command
from diffusion_jax.data import columns, engines, guess, home, table, tars
from diffusion_jax.data.captions import Captions
from diffusion_jax.data.pictures import Pictures
from diffusion_jax.data.sources import moments as read_moments
from diffusion_jax.data.sources import open_pictures, open_records
from diffusion_jax.files.safetensors_files import map_safetensors
from diffusion_jax.precache import moments
from diffusion_jax.precache.moments import MomentOptions

IDENTITY = {"image_size": 8, "vae": "abc"}
TWO = MomentOptions(2, 2)


def write_picture(folder, number, red):
    Image.new("RGB", (8, 8), (red, 0, 0)).save(folder / f"{number}.png")
    (folder / f"{number}.txt").write_text(f"caption {number}")
    (folder / f"{number}.json").write_text(json.dumps({"long": f"long caption {number}"}))


@pytest.fixture
def folder(tmp_path):
    """Five pictures whose red value is 10 times their number, each with two captions."""
    folder = tmp_path / "pictures"
    folder.mkdir()
    for i in range(5):
        write_picture(folder, i, 10 * i)
    return folder


def encode_red(images):
    """Return moments [B, 4, 4, 2]: the red value of each picture, and 0."""
    moments = np.zeros((len(images), 4, 4, 2), np.float32)
    moments[..., 0] = images.mean((1, 2))[:, :1, None]
    return moments


def run(folder, out, encode=encode_red, work=TWO, identity=IDENTITY, source="folder", **fields):
    """Encode a folder, and return the red values of the encoded pictures, divided by 10."""
    encoded = []

    def noting(images):
        encoded.extend((images[:, 0, 0, 0] // 10).tolist())
        return encode(images)

    pictures = open_pictures(Data(source, path=str(folder), **fields), 8)
    moments.run(pictures, noting, out, identity, work)
    return sorted(set(encoded))


def opened(out, **fields):
    return open_pictures(Data("moments", path=str(out), **fields), 8, moments=(4, 4, 2))


def stored(out, **fields):
    """Return the captions and red values in a folder of moments."""
    pictures = opened(out, **fields)
    values, texts = pictures.read(np.arange(len(pictures)))
    return list(zip(texts, values[:, 0, 0, 0].tolist(), strict=True))


def chunks(out):
    return sorted(out.glob("*[0-9a-f].safetensors"))


def contents(out):
    """Return the contents of all files, none of which may be temporary."""
    assert not list(out.rglob("*.tmp"))
    return {path.relative_to(out): path.read_bytes() for path in out.rglob("*.*")}


def test_changed_pictures_are_encoded_again_and_changed_captions_are_not(folder, tmp_path):
    out = tmp_path / "out"
    assert run(folder, out) == [0, 1, 2, 3, 4]
    assert run(folder, out) == []
    before = opened(out)
    (folder / "1.txt").write_text("a caption")
    write_picture(folder, 4, 90)
    write_picture(folder, 5, 50)
    assert run(folder, out) == [5, 9]
    expected = [("caption 0", 0), ("a caption", 10), ("caption 2", 20), ("caption 3", 30)]
    assert stored(out) == [*expected, ("caption 4", 90), ("caption 5", 50)]
    # A run that has begun reads what it began with.
    assert before.read(np.arange(5))[0][:, 0, 0, 0].tolist() == [0, 10, 20, 30, 40]


def test_one_picture_added_to_a_tar_is_the_only_one_that_is_encoded(folder, tmp_path):
    record = lambda n: {tars.KEY: b"%d" % n, "png": (folder / f"{n}.png").read_bytes(), "txt": b"caption %d" % n}
    (tmp_path / "tars").mkdir()
    for number in range(2):
        tars.write(tmp_path / f"tars/{number}.tar", map(record, (2 * number, 2 * number + 1)))
    out = tmp_path / "out"
    assert run(tmp_path / "tars", out, source="webdataset") == [0, 1, 2, 3]
    tars.write(tmp_path / "tars/0.tar", map(record, (0, 4, 1)))
    assert run(tmp_path / "tars", out, source="webdataset") == [4]
    assert [text for text, _ in stored(out)] == [f"caption {n}" for n in (0, 4, 1, 2, 3)]


def test_removed_and_unreadable_pictures_have_no_row(folder, tmp_path, caplog):
    out = tmp_path / "out"
    (folder / "2.png").write_bytes(b"no picture")
    (folder / "3.txt").write_bytes(b"\xff")
    assert run(folder, out, max_broken=1.0) == [0, 1, 4]
    assert stored(out) == [("caption 0", 0), ("caption 1", 10), ("caption 4", 40)]
    caplog.clear()
    assert run(folder, out, max_broken=1.0) == []
    assert "no moments of 1 image, which cannot be used, such as 2.png" in caplog.text
    assert ("left out", "1 without_moments: 2.png") in opened(out).inventory().rows()
    (folder / "1.png").unlink()
    (folder / "3.txt").write_text("caption 3")
    assert run(folder, out, max_broken=1.0, uncaptioned="drop") == [3]
    assert stored(out) == [("caption 0", 0), ("caption 3", 30), ("caption 4", 40)]


def test_held_out_moments_are_those_of_the_held_out_pictures(folder, tmp_path):
    run(folder, tmp_path / "out")
    rows = np.arange(5)
    images = open_pictures(Data("folder", path=str(folder)), 8)
    np.testing.assert_array_equal(opened(tmp_path / "out").keys(rows), images.keys(rows))
    assert opened(tmp_path / "out").names(rows) == images.names(rows)


@pytest.mark.parametrize("touched", [False, True])
def test_a_copy_of_the_pictures_or_of_the_moments_is_not_encoded_again(folder, tmp_path, touched):
    out = tmp_path / "out"
    run(folder, out)
    if touched:
        for path in folder.iterdir():
            os.utime(path, (1, 1))
        assert run(folder, out) == []
    copy = shutil.copytree(folder, tmp_path / "copy", copy_function=shutil.copy)
    moved = out.rename(tmp_path / "moved")
    assert run(copy, moved) == []
    assert stored(moved) == [(f"caption {n}", 10 * n) for n in range(5)]


def test_equal_pictures_are_encoded_once(folder, tmp_path):
    shutil.copy(folder / "3.png", folder / "6.png")
    (folder / "6.txt").write_text("the same")
    run(folder, tmp_path / "out")
    assert sum(len(map_safetensors(file)["keys"]) for file in chunks(tmp_path / "out")) == 5
    assert stored(tmp_path / "out")[3:] == [("caption 3", 30), ("caption 4", 40), ("the same", 30)]


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"min_size": 4}, "min_size: 0 stored, 4 requested"),
        ({"resize": 16}, "resize: 0 stored, 16 requested"),
        ({"identity": IDENTITY | {"vae": "def"}}, "vae: 'abc' stored, 'def' requested"),
    ],
    ids=str,
)
def test_other_settings_are_an_error(folder, tmp_path, fields, message):
    out = tmp_path / "out"
    run(folder, out)
    with pytest.raises(ValueError, match=re.escape(f"{out} were made with other settings ({message}): set the")):
        run(folder, out, **fields)


def test_moments_of_another_text_setting_need_a_new_table_only(folder, tmp_path):
    out, text = tmp_path / "out", "txt,json:long*0.5"
    run(folder, out)
    with pytest.raises(ValueError, match=r"text: 'txt' stored, 'txt,json:long\*0.5' requested"):
        opened(out, text=text)
    assert run(folder, out, text=text) == []
    assert stored(out, text=text)[3][0] == Captions(("caption 3", "long caption 3"), (2 / 3, 1 / 3))


def test_damaged_files_are_found_with_verify_and_encoded_again(folder, tmp_path):
    out = tmp_path / "out"
    run(folder, out)
    whole = [file.read_bytes() for file in chunks(out)]
    flipped = bytearray(chunks(out)[1].read_bytes())
    flipped[flipped.index(b"NUMPY") + 300] ^= 1
    chunks(out)[1].write_bytes(flipped)
    chunks(out)[0].unlink()
    run(folder, out)
    assert [file.read_bytes() for file in chunks(out)] != whole
    assert run(folder, out, work=TWO._replace(verify=True)) != []
    assert [file.read_bytes() for file in chunks(out)] == whole
    assert stored(out) == [(f"caption {n}", 10 * n) for n in range(5)]


def test_a_dry_run_encodes_one_batch_and_writes_nothing(folder, tmp_path, capsys):
    out = tmp_path / "out"
    assert run(folder, out, work=TWO._replace(dry_run=True)) == [0, 1]
    assert f"would encode at most 5 images into {out}" in capsys.readouterr().out and not out.exists()


def test_an_unfinished_folder_and_one_of_an_earlier_version_are_errors(folder, tmp_path):
    def killed(images):
        if (images[:, 0, 0, 0] == 20).any():
            raise KeyboardInterrupt
        return encode_red(images)

    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        run(folder, out, killed)
    assert len(chunks(out)) == 1
    with pytest.raises(ValueError, match=f"{out} is unfinished: continue with\n  python -m sd_jax.precache"):
        opened(out)
    assert run(folder, out) == [2, 3, 4]
    (tmp_path / "old").mkdir()
    (tmp_path / "old/moments.json").write_text("{}")
    (tmp_path / "old/000000.tar").touch()
    message = "an earlier version wrote the moments in .*: encode the images again with\n .* --out=NEW_FOLDER"
    for path in ("old", "old/000000.tar"):
        with pytest.raises(ValueError, match=message):
            opened(tmp_path / path)
    with pytest.raises(ValueError, match=message):
        run(folder, tmp_path / "old")


def test_a_worker_whose_work_another_has_finished_ends_with_the_same_files(folder, tmp_path):
    out, over = tmp_path / "out", []

    def overtaken(images):
        if not over:
            over.append(run(folder, out))
        return encode_red(images)

    run(folder, out, overtaken)
    run(folder, tmp_path / "alone")
    assert contents(out) == contents(tmp_path / "alone")


def test_work_that_is_pickled_for_other_processes_writes_the_same_files(folder, tmp_path):
    class Pickling(engines.Worker):
        def fill(self, items, path, write, *, read=None, **how):
            write, read = engines.unpickled(engines.pickled((write, read)))
            return super().fill(items, path, write, read=read, **how)

    pictures = open_pictures(Data("folder", path=str(folder)), 8)
    moments.run(pictures, encode_red, tmp_path / "pickled", IDENTITY, TWO._replace(engine=Pickling()))
    run(folder, tmp_path / "alone")
    assert contents(tmp_path / "pickled") == contents(tmp_path / "alone")


def test_moments_that_are_not_finite_are_an_error(folder, tmp_path):
    def broken(images):
        encoded = encode_red(images)
        encoded[images[:, 0, 0, 0] == 30, 0, 0, 1] = np.nan
        return encoded

    with pytest.raises(ValueError, match=r"the latents of 3\.png are not finite: check vae"):
        run(folder, tmp_path / "out", broken)
    assert len(chunks(tmp_path / "out")) == 1


@pytest.mark.parametrize(("name", "reason"), [("png", "broken_image"), ("txt", "broken_text")])
def test_images_of_which_none_is_usable_are_an_error(folder, tmp_path, name, reason):
    for path in folder.glob(f"*.{name}"):
        path.write_bytes(b"\xff" + path.name.encode())
    again = "as an earlier run found" if reason == "broken_image" else f"{{'{reason}': 5}}"
    for why in (f"{{'{reason}': 5}}", again):
        with pytest.raises(ValueError, match=re.escape(f"no image can be encoded ({why}): check the files that")):
            run(folder, tmp_path / "out", max_broken=1.0)
    assert not (tmp_path / "out" / table.CARD).exists()


def test_training_warns_about_pictures_changed_since_encoding(folder, tmp_path, caplog):
    out = tmp_path / "out"
    run(folder, out)
    shutil.copytree(folder, tmp_path / "copy")
    shutil.rmtree(folder)
    caplog.clear()
    moments.check_originals(out)  # The originals are missing.
    shutil.copytree(tmp_path / "copy", folder, copy_function=shutil.copy)
    moments.check_originals(out)  # The originals are copies.
    assert caplog.text == ""
    (folder / "4.txt").write_text("another")
    (folder / "0.png").unlink()
    with caplog.at_level(logging.WARNING):
        moments.check_originals(out)
    assert (
        f"the images of the moments in {out} have changed (the number of pictures, the digest of the pictures' "
        "names, the digest of the texts and of the files' sizes): encode the changes with"
    ) in caplog.text


def test_a_run_goes_on_with_its_own_moments_when_others_come(folder, tmp_path, caplog):
    out = tmp_path / "out"

    def of_run(begun):
        """Return what a run in `tmp_path` reads, and what is logged when it opens the moments."""
        caplog.clear()
        with caplog.at_level(logging.INFO), home.tables_of(tmp_path, begun) as tables:
            moments.check_originals(out)
            values, _ = (pictures := opened(out)).read(np.arange(len(pictures)))
        tables.write()
        return values[:, 0, 0, 0].tolist(), caplog.messages

    run(folder, out)
    assert of_run(begun=False) == ([0, 10, 20, 30, 40], [])
    write_picture(folder, 25, 90)  # In the middle of the order of names.
    run(folder, out)
    came = f"1 picture came to {out} after this run began, which goes on with its 5; a new run with --continue_from"
    values, messages = of_run(begun=True)
    assert values == [0, 10, 20, 30, 40] and [text[: len(came)] for text in messages] == [came]
    assert of_run(begun=False) == ([0, 10, 20, 90, 30, 40], [])


def test_show_reads_the_table_of_moments_and_other_commands_need_pictures(folder, tmp_path, capsys):
    run(folder, tmp_path / "out")
    data_command.main(["show", str(tmp_path / "out")])
    printed = capsys.readouterr().out
    assert "5 pictures" in printed and "NAME.txt" in printed
    data_command.main(["show", str(tmp_path / "out"), "--row=3.png"])
    assert "moments, 256 bytes" in capsys.readouterr().out
    with pytest.raises(ValueError, match="the data source 'moments' has no image files"):
        open_records(guess.guess(str(tmp_path / "out")))


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"flip": True}, "flip: False stored, True requested"),
        ({"crop": "random"}, "crop: 'center' stored, 'random' requested"),
        ({"resize": 16}, "resize: 8 stored, 16 requested"),
        ({"max_aspect": 2.0}, "max_aspect: 0.0 stored, 2.0 requested"),
        ({"fields": ("score=0..1",)}, "fields: [] stored, ['score'] requested; ranges: [] stored, ['score=0.0"),
    ],
    ids=str,
)
def test_data_fields_other_than_those_of_stored_moments_are_errors(folder, tmp_path, fields, message):
    out = tmp_path / "out"
    run(folder, out, resize=8)
    stored(out, resize=8)
    with pytest.raises(ValueError, match=re.escape(f"{out} were made with other settings ({message}")):
        stored(out, **{"resize": 8, **fields})


def test_tars_of_another_program_allow_no_changes_of_images(tmp_path):
    record = {tars.KEY: b"1", "npy": read_moments.write(np.zeros((4, 4, 2))), "txt": b"a"}
    tars.write(tmp_path / "1.tar", [record])
    assert stored(tmp_path) == [("a", 0)]
    with pytest.raises(ValueError, match=r"made with other settings \(flip: False stored, True requested\)"):
        stored(tmp_path, flip=True)


class Four(Pictures):
    """Four pictures whose pixels are ten times their number, one with two captions."""

    data = Data("mine")

    def __len__(self):
        return 4

    def read(self, indices, places=None):
        images = np.zeros((len(indices), 8, 8, 3), np.uint8) + 10 * indices[:, None, None, None].astype(np.uint8)
        return images, [Captions((f"{i} a", f"{i} b"), (0.75, 0.25)) if i else "0" for i in indices]


def test_pictures_of_a_source_of_ones_own_are_stored_with_all_captions(tmp_path):
    assert moments.run(Four(), encode_red, tmp_path, IDENTITY, TWO) == 4
    found = stored(tmp_path)
    assert [red for _, red in found] == [0, 10, 20, 30]
    assert [text for text, _ in found][::3] == ["0", Captions(("3 a", "3 b"), (0.75, 0.25))]
    assert not (tmp_path / moments.IMAGES).exists()


def test_texts_that_are_no_captions_are_an_error(tmp_path):
    class Embedded(Four):
        def read(self, indices, places=None):
            texts: Any = [np.zeros((1, 2))] * len(indices)
            return super().read(indices)[0], texts

    with pytest.raises(ValueError, match=r"the caption of picture 0 is ndarray, not text: set data\.text"):
        moments.run(Embedded(), encode_red, tmp_path, IDENTITY, TWO)


def test_a_chunk_with_a_value_too_few_is_not_written(tmp_path):
    keys = np.arange(6, dtype=np.uint64).view(columns.KEY)
    values = columns.Computed(np.ones(2, np.int64), {"npy": np.zeros(2, np.uint8)})
    with pytest.raises(ValueError, match=f"the data changed while {tmp_path} was filled: run the command again"):
        columns.write_chunk(tmp_path, keys, values)
    assert not list(tmp_path.iterdir())
