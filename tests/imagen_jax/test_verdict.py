"""`verdict` compares held-out with training pictures, and drawn pictures with the nearest ones."""

import json
import pathlib
import re
import shutil
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from diffusion_jax import heldout, runs, verdict
from diffusion_jax.metrics.judges import judge as judges
from tests.imagen_jax import commands


@pytest.fixture(scope="module")
def holding_out(trained, tmp_path_factory):
    """A copy of a run, whose config holds pictures out."""
    folder = shutil.copytree(trained, tmp_path_factory.mktemp("of_verdict") / "run")
    config = json.loads((folder / runs.CONFIG).read_text())
    config["data"]["heldout"], config["heldout"]["records"] = 0.05, 12
    (folder / runs.CONFIG).write_text(json.dumps(config))
    return folder


def digits_and_captions(workdir):
    """Eight training pictures of a run, and their different captions."""
    pictures = heldout.open_run(pathlib.Path(workdir)).inputs.batches.pictures
    images, captions = pictures.read(np.arange(40))
    rows = [captions.index(text) for text in sorted(set(captions))[:8]]
    return images[rows], [captions[row] for row in rows]


def test_the_held_out_loss_is_beside_the_loss_on_training_pictures(holding_out, tmp_path):
    rows = dict(verdict.verdict([holding_out], "", tmp_path / "sheet.png"))
    (measured,) = heldout.measure_run(pathlib.Path(holding_out), weights=["ema"])
    new, old = re.findall(r"[\d.]+(?= on 12)", rows["loss"].replace(" against", ""))
    assert float(new) == pytest.approx(measured["loss"], rel=1e-2)  # Three digits are shown.
    assert 0.5 < float(old) / float(new) < 2  # Three steps memorise nothing.
    assert "the 16 of 32 drawn pictures that are nearest to training pictures" in rows["sheet"]
    with Image.open(tmp_path / "sheet.png") as sheet:  # Two rows of pairs.
        assert sheet.width == 4 + 8 * 132 and sheet.height > 4 * 128


def test_drawn_copies_of_training_pictures_have_distance_0(holding_out, tmp_path, monkeypatch):
    def copied(stages):
        images, _ = verdict._spread(stages[0].inputs.batches.pictures).read(np.arange(8))
        return images, ["a"] * 8

    monkeypatch.setattr(verdict, "_drawn", copied)
    rows = dict(verdict.verdict([holding_out], "", tmp_path / "sheet.png"))
    number = r"(\S+) from the nearest training picture, and held-out pictures (\S+): it copies"
    found = re.search(number, rows["distance"])
    assert found and float(found[1]) < 0.05 < float(found[2])  # Differences of float32 squares.
    with Image.open(tmp_path / "sheet.png") as sheet:
        pixels = np.asarray(sheet)
    step = pixels.shape[0] // 2  # The pictures of both rows are equal, but not their captions.
    drawn, nearest = (pixels[top : top + 128, 4:-4] for top in (4, 2 + step))
    np.testing.assert_array_equal(drawn, nearest)


def test_a_judge_counts_the_drawn_pictures_that_fit_their_captions(holding_out, tmp_path, monkeypatch):
    params = {
        "image": judges.IMAGE.init(jax.random.key(0), jnp.zeros((1, 32, 32, 3)))["params"],
        "text": judges.TEXT.init(jax.random.key(1), jnp.zeros((1, 8), jnp.uint32))["params"],
    }
    images, captions = digits_and_captions(holding_out)
    real = {"r1_judge": 0.972, "r1_judge_low": 0.961, "r1_judge_high": 0.982}
    card = {"size": 32, "max_tokens": 8, "scores": {"real": real}}
    pairs = (judges.Pair(images, captions),) * 2
    judges.save(judges.of_params(params, 32, 8, captions, pairs, card), tmp_path / "judge")
    read = judges.reader(judges.load(tmp_path / "judge"), captions)
    # Exchange captions until the judge, which knows nothing, finds some of them right.
    right = np.stack([read(images, [text] * len(images))[1][:, 0] for text in captions])
    nearest = [captions[row] for row in right.argmax(0)]
    shown = [*nearest[:6], *(next(t for t in captions if t != n) for n in nearest[6:])]
    monkeypatch.setattr(verdict, "_drawn", lambda *_: (images, shown))
    rows = dict(verdict.verdict([holding_out], str(tmp_path / "judge"), tmp_path / "sheet.png"))
    assert rows["captions"].startswith("6 of 8 drawn pictures fit theirs")
    assert rows["judge"] == ("right about 97.2 (96.1 to 98.2) % of the real pictures that it was not trained on")


@pytest.mark.parametrize(
    ("new", "old", "words"),
    [
        (0.031, 0.012, "0.031 on 2 held-out pictures, against 0.012 on 2 training pictures: it mem"),
        (0.012, 0.01, "it begins to memorise them"),
        (0.01, 0.01, "it does not memorise them"),
        (0.01, 0.02, "it does not memorise them"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_the_ratio_of_the_losses_becomes_words(monkeypatch, new, old, words):
    losses, keys = iter([new, old]), np.arange(2, dtype=np.uint64)
    held = heldout.HeldOutRecords(1, {}, keys.astype(np.uint32), np.ones(1))
    monkeypatch.setattr(heldout, "open_records", lambda *_: held)
    monkeypatch.setattr(verdict, "Apart", lambda *_: types.SimpleNamespace(read=lambda n: (keys, {})))
    batches = types.SimpleNamespace(pictures=None, apart=(None, None, ()))
    inputs = types.SimpleNamespace(batches=batches, task=types.SimpleNamespace(measure=None))
    scorer = lambda records: lambda params: {"loss": next(losses)}
    opened = types.SimpleNamespace(settings=None, inputs=inputs, scorer=scorer)
    assert words in verdict._compared_losses(opened, None)


@pytest.mark.slow
def test_the_command_prints_a_sentence_for_each_subject(trained, tmp_path):
    out = f"--out={tmp_path / 'sheet.png'}"
    ended = commands.succeed("diffusion_jax.verdict", f"--workdir={trained}", out)
    subjects = [line.split()[0] for line in ended.out.splitlines()]
    assert subjects == ["model", "loss", "sheet", "distance"]
    assert "unknown, because no pictures were held out" in ended.out
