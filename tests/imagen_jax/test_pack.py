"""Packed runs: size, accuracy, drawing, and errors."""

import uuid

import jax
import numpy as np
import pytest

from diffusion_jax import files, pack, runs
from diffusion_jax.files import checksums, remote
from diffusion_jax.text import vocabulary
from diffusion_jax.weights import packed, restore
from imagen_jax.settings import read_settings
from imagen_jax.weights import initial
from tests import emulators
from tests.imagen_jax import commands
from tests.imagen_jax.conftest import TINY

pytestmark = [pytest.mark.slow, pytest.mark.gate]


@pytest.fixture(scope="module")
def small(tmp_path_factory, trained):
    """A run packed by the command."""
    folder = tmp_path_factory.mktemp("packed") / "small"
    assert "wrote" in commands.succeed("diffusion_jax.pack", f"--workdir={trained}", f"--out={folder}").out
    return folder


def arrays(workdir, which="ema"):
    s = read_settings(runs.load(workdir, "imagen_jax"))
    return initial.of_run(workdir, s.unet, s.text.width, which)["params"]


def test_packed_weights_are_rounded_to_8_bits_per_channel(small, trained):
    whole, rounded = arrays(trained), arrays(small)
    for path, array in jax.tree.leaves_with_path(whole):
        packed_array = dict(jax.tree.leaves_with_path(rounded))[path]
        largest = np.abs(array).max(axis=tuple(range(array.ndim - 1)))
        assert (np.abs(packed_array - array) <= (largest / 254 + 1e-7) * (array.ndim > 1)).all(), path
    assert any((np.asarray(a) != b).any() for a, b in zip(*map(jax.tree.leaves, (whole, rounded)), strict=True))
    (file,) = small.glob("checkpoints/*/*.safetensors")
    bytes_before = sum(4 * array.size for array in jax.tree.leaves(whole))
    assert file.stat().st_size < 0.3 * bytes_before
    names = {runs.CONFIG, runs.CHECKPOINTS, vocabulary.FILE}
    assert {path.name for path in small.iterdir()} == names


def test_in_a_bucket_the_mark_of_a_whole_checkpoint_is_written_last(trained, stores, monkeypatch):
    """If it came first and packing were killed then, Orbax would take the rest for complete."""
    bucket, listed = files.path(f"gs://{emulators.BUCKET}/{uuid.uuid4().hex}"), []
    put = remote.Remote.write_bytes

    def noting(path, *arguments, **options):
        if path.name == checksums.COMMIT:
            listed.extend(path.parent.objects())
        return put(path, *arguments, **options)

    monkeypatch.setattr(remote.Remote, "write_bytes", noting)
    folder = files.path(pack.pack(trained, "ema", None, bucket)).parent
    assert listed == [f"{checksums.FOLDER}/0-of-1.json", packed.FILE]
    assert set(files.path(folder).objects()) == {*listed, checksums.COMMIT}


def test_a_packed_run_has_the_vocabulary_of_the_run_or_of_given_captions(small, trained, tmp_path):
    of_run = vocabulary.read(small)
    assert of_run == vocabulary.read(trained)
    assert of_run and {"seven", "on", "paper"} <= of_run.words
    captions = tmp_path / "captions.txt"
    captions.write_text("a fox, noto style\na cat, noto style\n")
    pack.pack(trained, "ema", None, tmp_path / "packed", str(captions))
    words = vocabulary.read(tmp_path / "packed")
    assert words and words.words == {"a", "fox", "cat", "noto", "style"}
    assert words.examples == ("a cat, noto style", "a fox, noto style")


def test_raw_weights_and_packed_runs_can_be_packed(small, trained, tmp_path):
    pack.pack(trained, "raw", None, tmp_path / "raw")
    (one,), (other,) = (f.glob("checkpoints/*/*.safetensors") for f in (small, tmp_path / "raw"))
    assert one.read_bytes() != other.read_bytes()
    again = pack.pack(small, "ema", None, tmp_path / "again")
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), arrays(small), arrays(tmp_path / "again"))
    assert again.stat().st_size == one.stat().st_size


def test_a_packed_run_can_start_another_run_but_cannot_be_resumed(small, tmp_path):
    more = [f"--config.unet.weights={small}", f"--workdir={tmp_path / 'run'}", "--config.steps=1"]
    commands.succeed("train", *TINY, *more, "--config.optimizer.lr=1e-30", before=commands.skip_rehearsal)
    started = arrays(tmp_path / "run", "raw")
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-25), arrays(small), started)
    no_averages = ["--config.optimizer.ema_decays=()", "--config.steps=100"]
    ended = commands.run("train", *TINY, *no_averages, f"--workdir={small}", devices=1)
    assert ended.code == 2
    assert "was packed without the optimizer" in ended.err and "unet.weights" in ended.err


def test_packing_errors_and_damaged_packed_runs_are_one_line_errors(small, trained, tmp_path):
    for workdir, out, why in (
        (tmp_path, tmp_path / "new", "holds no config.json"),
        (trained, small, "holds checkpoints already"),
    ):
        ended = commands.run("diffusion_jax.pack", f"--workdir={workdir}", f"--out={out}", devices=1)
        assert ended.code == 2 and why in ended.err and "Traceback" not in ended.err
    file = pack.pack(trained, "ema", None, tmp_path / "damaged")
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    with pytest.raises(restore.Damaged, match=packed.FILE):
        arrays(tmp_path / "damaged")
    with pytest.raises(ValueError, match="has another architecture"):
        restore.load_params(small / runs.CHECKPOINTS, {"params": {"x": np.zeros(3)}})
