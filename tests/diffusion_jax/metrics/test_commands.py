"""The command diffusion_jax.metrics, with a toy extractor: numbers, files, messages."""

import json
import re

import numpy as np
import pytest
from PIL import Image

from diffusion_jax.metrics import clip_score, clip_towers, extractors, fid, mmd
from diffusion_jax.metrics.clip_towers import ClipExtractors
from tests.diffusion_jax.metrics import toy
from tests.diffusion_jax.metrics.running import run

__all__ = ["run"]  # A fixture.


def folder(path, seed, n=30):
    path.mkdir()
    images = np.random.default_rng(seed).integers(0, 256, (n, 8, 12, 3), np.uint8) // (1 + seed)
    for i, image in enumerate(images):
        Image.fromarray(image).save(path / f"{i:03}.png")
    return np.asarray(toy.apply(toy.extractor().params, toy.prepare(images)))


@pytest.fixture
def sides(tmp_path):
    """Write two folders of images and return the features of both."""
    return folder(tmp_path / "a", 0), folder(tmp_path / "b", 1)


def values(out):
    return {line.split(":")[0]: float(line.split(":")[1]) for line in out.splitlines()}


def test_fid_is_equal_for_folders_and_for_their_saved_statistics(run, tmp_path, sides):
    expected = pytest.approx(fid.frechet(*sides), rel=1e-4)
    code, out, _ = run("fid", tmp_path / "a", tmp_path / "b")
    assert (code, values(out)) == (0, {"fd_toy": expected})
    for name in "ab":
        assert run("stats", f"--images={tmp_path / name}", f"--out={tmp_path / name}.npz")[0] == 0
    code, out, _ = run("fid", tmp_path / "a.npz", tmp_path / "b.npz", "--batch_size=7")
    assert (code, values(out)) == (0, {"fd_toy": expected})


def test_fid_all_writes_every_score_and_the_card_to_json(run, tmp_path, sides):
    out = tmp_path / "scores.json"
    assert run("fid", tmp_path / "a", tmp_path / "b", "--all", "--kid_subset=20", f"--out={out}")[0] == 0
    saved = json.loads(out.read_text())
    scores, card = saved["scores"], saved["card"]
    assert scores["fd_toy_low"] < scores["fd_toy"] < scores["fd_toy_high"]
    kid, deviation, _ = mmd.kid(*sides, size=20)
    assert scores["kid_toy"] == pytest.approx(kid, rel=1e-4)
    assert scores["kid_toy_deviation"] == pytest.approx(deviation, rel=1e-4)
    assert scores.keys() >= {"fd_toy_infinity", "precision_toy", "recall_toy"}
    assert (card["n"], card["image_size"], card["reference"]) == (30, "12x8", "a, n 30")


def test_spatial_adds_sfid_and_all_adds_the_inception_score(run, tmp_path, sides, monkeypatch):
    """The toy's six features: four of Inception, one spatial, one logit."""
    monkeypatch.setattr(extractors, "load_inception", lambda *how: toy.with_spatial())
    expected = {
        "fd_inception": fid.frechet(*(rows[:, :4] for rows in sides)),
        "sfid_inception": fid.frechet(*(rows[:, 4:5] for rows in sides)),
    }
    for name in "ab":
        arguments = f"--images={tmp_path / name}", f"--out={tmp_path / name}.npz", "--spatial"
        assert run("stats", *arguments)[0] == 0
    for a, b in (("a", "b"), ("a.npz", "b"), ("a.npz", "b.npz")):
        code, out, _ = run("fid", tmp_path / a, tmp_path / b, "--spatial")
        assert (code, values(out)) == (0, pytest.approx(expected, rel=1e-4))
    out = values(run("fid", tmp_path / "a", tmp_path / "b", "--all", "--kid_subset=20")[1])
    assert out.items() >= values(run("fid", tmp_path / "a", tmp_path / "b", "--spatial")[1]).items()
    assert out["inception_score_inception"] == pytest.approx(1)  # With a single class, it is 1.
    code, _, err = run("fid", tmp_path / "a", tmp_path / "b", "--spatial", "--dims=768")
    assert code == 2 and "--spatial works only with Inception's default features: remove" in err


def test_old_statistics_without_a_card_require_the_flag_mode(run, tmp_path, sides):
    np.savez(tmp_path / "c.npz", mu=sides[0].mean(0), sigma=np.cov(sides[0].T))
    code, _, err = run("fid", tmp_path / "c.npz", tmp_path / "b")
    assert code == 2 and "c.npz has no card that names the preprocessing: set --mode to" in err
    code, out, _ = run("fid", tmp_path / "c.npz", tmp_path / "b", "--mode=tf")
    assert (code, values(out)["fd_toy"]) == (0, pytest.approx(fid.frechet(*sides), rel=1e-4))


def test_fid_all_is_an_error_if_statistics_hold_no_features(run, tmp_path, sides):
    stats = ("stats", f"--images={tmp_path / 'a'}", f"--out={tmp_path / 'a.npz'}")
    arguments = ("fid", tmp_path / "a.npz", tmp_path / "b", "--all", "--kid_subset=20")
    run(*stats)
    code, _, err = run(*arguments)
    assert code == 2 and "--all needs the features of both sets" in err
    run(*stats, "--keep_features")
    assert run(*arguments)[0] == 0


def test_compare_rejects_unlike_cards_unless_allowed(run, tmp_path, sides):
    folder(tmp_path / "c", 2, n=25)
    saved = []
    for name in "bc":
        saved.append(tmp_path / f"{name}.json")
        run("fid", tmp_path / "a", tmp_path / name, f"--out={saved[-1]}")
    code, _, err = run("compare", *saved)
    assert code == 2
    assert re.search(r"their n differs \(.*b.json: 30, .*c.json: 25\).*--allow=n", err)
    code, out, _ = run("compare", *saved, "--allow=n")
    header, b, c = (line.split() for line in out.splitlines())
    assert (code, header) == (0, ["name", "n", "fd_toy"])
    assert (b[1], c[1]) == ("30", "25") and float(b[2]) < float(c[2])
    (tmp_path / "x.json").write_text("{}")
    code, _, err = run("compare", saved[0], tmp_path / "x.json")
    assert code == 2 and "x.json holds no scores with a card" in err


@pytest.fixture
def prompts(tmp_path, monkeypatch):
    """Let the toy stand in for CLIP, and write 30 prompts of 1 to 30 letters."""
    tokens = lambda texts: np.array([[len(text)] * 12 for text in texts], np.int32)
    model = ClipExtractors(toy.extractor(name="clip_tiny"), toy.extractor(prepare=lambda ids: ids / 10), tokens)
    monkeypatch.setattr(clip_towers, "load", lambda *_, **__: model)
    (tmp_path / "prompts.txt").write_text("".join(f"{'a' * i}\n" for i in range(1, 31)))
    return tmp_path / "prompts.txt"


def test_clip_pairs_each_image_with_a_line_of_the_prompts(run, tmp_path, sides, prompts):
    arguments = ("clip", tmp_path / "a", f"--prompts={prompts}", "--clip=tiny")
    code, out, _ = run(*arguments, f"--reference={tmp_path / 'b'}")
    lengths = np.repeat(np.arange(1.0, 31)[:, None] / 10, 12, 1)
    texts = np.asarray(toy.apply(toy.extractor().params, lengths))
    score, cmmd = clip_score.cosines(sides[0], texts).mean(), values(out)["cmmd_clip_tiny"]
    assert code == 0 and values(out)["clip_score_tiny"] == pytest.approx(score, rel=1e-4)
    both = map(clip_score.normalised, (sides[1], sides[0]))
    assert cmmd == pytest.approx(mmd.cmmd(*both), rel=1e-3)
    prompts.write_text("one\n")
    code, _, err = run(*arguments)
    assert code == 2 and "30 usable images" in err and "prompts.txt has 1 prompts" in err
    prompts.write_text("\n")
    assert "holds no prompt" in run(*arguments)[2]


def test_clip_sorts_images_by_the_numbers_in_their_names(run, tmp_path, sides, prompts):
    (tmp_path / "n").mkdir()
    for number, path in enumerate(sorted((tmp_path / "a").iterdir())):
        (tmp_path / "n" / f"seed_{number}.png").write_bytes(path.read_bytes())
    score = lambda folder: run("clip", folder, f"--prompts={prompts}", "--clip=tiny")
    assert score(tmp_path / "n")[1] == score(tmp_path / "a")[1] != ""
    (tmp_path / "n" / "seed_7.png").write_bytes(b"broken")
    prompts.write_text("a\n" * 29)
    code, _, err = score(tmp_path / "n")
    assert code == 2 and "has 29 usable images and 1 others, but" in err
    (tmp_path / "n" / "seed_07.png").write_bytes(b"")
    code, _, err = score(tmp_path / "n")
    assert code == 2 and "the order of seed_07.png and seed_7.png in" in err


def test_fid_reports_skipped_images_and_bad_arguments_in_one_line(run, tmp_path, sides, caplog):
    (tmp_path / "b" / "x.png").write_bytes(b"no image")
    code, _, _ = run("fid", tmp_path / "a", tmp_path / "b")
    assert code == 0 and "of the 31 images in" in caplog.text and "'broken_image': 1" in caplog.text
    for path in sorted((tmp_path / "b").iterdir())[1:]:
        path.unlink()
    code, _, err = run("fid", tmp_path / "a", tmp_path / "b")
    assert code == 2 and err.startswith("error: a covariance needs at least 2 images, but there are 1")
    code, _, err = run("fid", tmp_path / "a", tmp_path / "nothing")
    assert (code, err) == (2, f"error: no folder {tmp_path}/nothing\n")
    assert "Score image sets" in run("fid", tmp_path / "a")[2]
    assert "the name must end in .npz" in run("stats", f"--images={tmp_path}", "--out=a.txt")[2]
