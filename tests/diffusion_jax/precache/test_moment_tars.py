"""Stored VAE moments: shards, changed pictures, and killed workers."""

import json
import logging
import re
import shutil

import numpy as np
import pytest
from PIL import Image

from diffusion_jax.config.settings import Data
from diffusion_jax.data.captions import Captions
from diffusion_jax.data.pictures import Pictures
from diffusion_jax.data.sources import open_pictures
from diffusion_jax.data.sources.webdataset import open_tars
from diffusion_jax.precache import moment_tars
from diffusion_jax.precache.moment_tars import MomentOptions

NAMES = ["000000.tar", "000001.tar", "checksums", "encoded", "moments.json"]


class Four(Pictures):
    """Four pictures whose pixels are their number."""

    def __len__(self):
        return 4

    def usable(self, indices):
        images = np.zeros((len(indices), 2, 2, 3), np.uint8) + indices[:, None, None, None]
        return indices, images.astype(np.uint8), [str(index) for index in indices]

    def read(self, *_):
        raise NotImplementedError

    def texts(self, indices):
        raise NotImplementedError


def encode(images):
    return images[:, :1, :1, :2].astype(np.float32)


def test_temporary_files_of_killed_workers_are_removed_at_the_end(tmp_path):
    stale = tmp_path / ".000001.tar.0123abcd.tmp"
    other = tmp_path / ".notes.tar.0123abcd.tmp"
    stale.touch(), other.touch()
    assert moment_tars.run(Four(), encode, tmp_path, {}, MomentOptions(2, 2)) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == [other.name, *NAMES]


def test_a_damaged_shard_is_encoded_again_but_not_in_a_dry_run(tmp_path, capsys):
    assert moment_tars.run(Four(), encode, tmp_path, {}, MomentOptions(2, 2)) == 2
    whole = (tmp_path / NAMES[1]).read_bytes()
    (tmp_path / NAMES[1]).write_bytes(whole[:-1] + b"x")
    dry = MomentOptions(2, 2, verify=True, dry_run=True)
    assert moment_tars.run(Four(), encode, tmp_path, {}, dry) == 1
    assert "would encode 1 of 2 shards" in capsys.readouterr().out
    assert (tmp_path / NAMES[1]).read_bytes() == whole[:-1] + b"x"
    assert moment_tars.run(Four(), encode, tmp_path, {}, MomentOptions(2, 2, verify=True)) == 2
    assert (tmp_path / NAMES[1]).read_bytes() == whole
    (tmp_path / NAMES[1]).unlink()  # A missing shard counts once.
    assert moment_tars.run(Four(), encode, tmp_path, {}, dry) == 1


def test_a_shard_written_by_another_worker_meanwhile_is_kept(tmp_path):
    def overtaken(images):
        if not (tmp_path / NAMES[0]).exists():
            assert moment_tars.run(Four(), encode, tmp_path, {}, MomentOptions(2, 2)) == 2
        return encode(images)

    assert moment_tars.run(Four(), overtaken, tmp_path, {}, MomentOptions(2, 2)) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == NAMES


IDENTITY = {"image_size": 8, "vae": "abc"}


@pytest.fixture
def folder(tmp_path):
    """Five pictures whose red value is 10 times their number, each with two captions."""
    folder = tmp_path / "pictures"
    folder.mkdir()
    for i in range(5):
        write_picture(folder, i, 10 * i)
    return folder


def write_picture(folder, number, red):
    Image.new("RGB", (8, 8), (red, 0, 0)).save(folder / f"{number}.png")
    (folder / f"{number}.txt").write_text(f"caption {number}")
    (folder / f"{number}.json").write_text(json.dumps({"long": f"long caption {number}"}))


def encode_red(images):
    """Return moments [B, 4, 4, 2]: the red value of each picture, and 0."""
    moments = np.zeros((len(images), 4, 4, 2), np.float32)
    moments[..., 0] = images.mean((1, 2))[:, :1, None]
    return moments


TWO = MomentOptions(2, 2)


def run(folder, out, encode=encode_red, work=TWO, identity=IDENTITY, **fields):
    """Encode a folder, and return the numbers of the pictures that were encoded."""
    encoded = []

    def noting(images):
        encoded.extend((images[:, 0, 0, 0] // 10).tolist())
        return encode(images)

    pictures = open_pictures(Data("folder", path=str(folder), **fields), 8)
    moment_tars.run(pictures, noting, out, identity, work)
    return sorted(set(encoded))


def stored(out, **fields):
    """Return the captions and red values in a folder of moments."""
    pictures = open_pictures(Data("moments", path=str(out), **fields), 8, moments=(4, 4, 2))
    values, texts = pictures.read(np.arange(len(pictures)))
    return list(zip(texts, values[:, 0, 0, 0].tolist(), strict=True))


def test_changed_pictures_and_captions_are_encoded_again(folder, tmp_path, caplog):
    out = tmp_path / "out"
    assert run(folder, out) == [0, 1, 2, 3, 4]
    assert run(folder, out) == []
    (folder / "1.txt").write_text("a caption")  # A different caption of the same length.
    write_picture(folder, 4, 90)
    write_picture(folder, 5, 50)
    assert run(folder, out) == [0, 1, 5, 9]
    expected = f"changed since {out} was encoded: 1.png, 4.png, 5.png; encoding 2 tars again"
    assert expected in caplog.text
    expected = [("caption 0", 0), ("a caption", 10), ("caption 2", 20), ("caption 3", 30)]
    assert stored(out) == [*expected, ("caption 4", 90), ("caption 5", 50)]
    assert run(folder, out, work=MomentOptions(2, 2, verify=True)) == []


def test_moments_of_removed_pictures_are_removed(folder, tmp_path):
    out = tmp_path / "out"
    run(folder, out)
    for number in (3, 4):
        (folder / f"{number}.png").unlink()
    assert run(folder, out) == [2]
    assert [red for _, red in stored(out)] == [0, 10, 20]
    assert not (out / "000002.tar").exists() and not (out / "encoded/000002.json").exists()


def test_a_copy_of_the_pictures_is_not_encoded_again(folder, tmp_path):
    out = tmp_path / "out"
    run(folder, out)
    copy = shutil.copytree(folder, tmp_path / "copy", copy_function=shutil.copy)
    assert run(copy, out) == []
    write_picture(folder, 0, 70)  # Different pictures in another folder are another data set.
    with pytest.raises(ValueError, match=r"data\.path: '.*copy' stored, '.*pictures' requested"):
        run(folder, out)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"text": "json:long"}, "data.text: 'txt' stored, 'json:long' requested"),
        ({"min_size": 4}, "data.min_size: 0 stored, 4 requested"),
        ({"resize": 16}, "data.resize: 0 stored, 16 requested"),
        ({"identity": IDENTITY | {"vae": "def"}}, "vae: 'abc' stored, 'def' requested"),
        ({"work": MomentOptions(3, 2)}, "shard: 2 stored, 3 requested"),
    ],
    ids=str,
)
def test_other_settings_are_an_error_unless_overwrite_is_set(folder, tmp_path, fields, message):
    out = tmp_path / "out"
    run(folder, out)
    with pytest.raises(ValueError, match=re.escape(f"{out} was started with other settings (")):
        run(folder, out, **fields)
    with pytest.raises(ValueError, match=re.escape(message)):
        run(folder, out, **fields)
    fields["work"] = fields.get("work", MomentOptions(2, 2))._replace(overwrite=True)
    assert run(folder, out, **fields) == [0, 1, 2, 3, 4]
    assert run(folder, out, **fields) == []
    assert [red for _, red in stored(out)] == [0, 10, 20, 30, 40]


def test_moments_of_an_earlier_version_can_be_completed(folder, tmp_path):
    out = tmp_path / "out"
    run(folder, out)
    manifest = json.loads((out / "moments.json").read_text())
    old = {name: manifest[name] for name in manifest if name not in ("data", "files")}
    (out / "moments.json").write_text(json.dumps(old | {"finished": False}))
    shutil.rmtree(out / "encoded")
    (out / "000001.tar").unlink()
    assert run(folder, out) == [2, 3]
    moment_tars.check_originals(out)


def test_moments_that_are_not_finite_are_an_error(folder, tmp_path):
    def broken(images):
        encoded = encode_red(images)
        encoded[images[:, 0, 0, 0] == 30, 0, 0, 1] = np.nan
        return encoded

    with pytest.raises(ValueError, match=r"the latents of 3\.png are not finite: check vae"):
        run(folder, tmp_path / "out", broken)
    assert [path.name for path in (tmp_path / "out").glob("*.tar")] == ["000000.tar"]


def test_training_warns_about_pictures_changed_since_encoding(folder, tmp_path, caplog):
    out = tmp_path / "out"
    run(folder, out)
    shutil.copytree(folder, tmp_path / "copy")
    shutil.rmtree(folder)
    caplog.clear()
    moment_tars.check_originals(out)  # The originals are missing.
    shutil.copytree(tmp_path / "copy", folder, copy_function=shutil.copy)
    moment_tars.check_originals(out)  # The originals are copies.
    assert caplog.text == ""
    (folder / "4.txt").write_text("another")
    (folder / "0.png").unlink()
    with caplog.at_level(logging.WARNING):
        moment_tars.check_originals(out)
    assert (
        f"the images of the moments in {out} have changed: 5 are encoded, 4 are in {folder}, and "
        "0.png, 4.png differ; encode the changes with the same sd_jax.precache command"
    ) in caplog.text


@pytest.mark.parametrize("fields", [{"flip": True}, {"crop": "random"}, {"resize": 16}, {"max_aspect": 2.0}], ids=str)
def test_data_fields_that_stored_moments_ignore_are_errors(folder, tmp_path, fields):
    run(folder, tmp_path / "out", resize=8)
    stored(tmp_path / "out", resize=8)  # The value used for encoding is accepted.
    ((name, value),) = fields.items()
    with pytest.raises(ValueError) as error:
        stored(tmp_path / "out", **fields)
    assert str(error.value) == (
        f"data.{name}={value!r} cannot change moments that are stored: leave it out, or train on "
        "the images themselves; resize, min_size and max_aspect also work in sd_jax.precache"
    )


def test_moments_are_stored_with_all_captions_and_their_weights(tmp_path):
    class Several(Four):
        def usable(self, indices):
            texts = [Captions((f"{i} a", f"{i} b"), (0.75, 0.25)) if i else "0" for i in indices]
            return *super().usable(indices)[:2], texts

    moment_tars.run(Several(), encode, tmp_path, {}, MomentOptions(2, 2))
    texts = open_tars(tmp_path, "txt,json:captions", images=("npy",)).texts(range(4))
    assert texts[::3] == ["0", Captions(("3 a", "3 b"), (0.75, 0.25))]
