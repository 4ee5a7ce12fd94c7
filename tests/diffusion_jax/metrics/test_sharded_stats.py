"""Statistics computed shard by shard: the same file for any number of workers."""

import functools
import itertools

import numpy as np
import pytest
from PIL import Image

from diffusion_jax.data import engines
from diffusion_jax.metrics import features, sharded_stats, stats_files
from tests.diffusion_jax.metrics import toy
from tests.diffusion_jax.metrics.running import run

__all__ = ["run"]  # A fixture.


@pytest.fixture
def pictures(tmp_path):
    """A folder of 30 images, of which the 8th is broken."""
    (folder := tmp_path / "pictures").mkdir()
    drawn = np.random.default_rng(0).integers(0, 256, (30, 8, 12, 3), np.uint8)
    for i, image in enumerate(drawn):
        Image.fromarray(image).save(folder / f"{i:03}.png")
    (folder / "007.png").write_bytes(b"no image")
    return folder


def take(pictures, out, engine=engines.ALONE, extractor=toy.extractor, **work):
    opened = sharded_stats.open_images(str(pictures), extractor)
    work = sharded_stats.StatsOptions(**{"shard": 7, "batch": 4} | work)
    sharded_stats.take(opened, out, work, engine)
    assert not list(out.parent.glob(".*"))
    return out.read_bytes()


def test_moments_over_shards_match_all_features_at_once(pictures, tmp_path):
    take(pictures, tmp_path / "kept.npz", keep=True)
    saved = stats_files.read(tmp_path / "kept.npz")
    images = [np.asarray(Image.open(path)) for path in sorted(pictures.iterdir())[:7]]
    expected = toy.apply(toy.extractor().params, toy.prepare(np.stack(images)))
    np.testing.assert_allclose(saved.features[:7], expected, atol=1e-6)
    once = features.gaussian(saved.features)
    assert saved.gaussian.n == 29 and saved.card["skipped"] == {"broken_image": 1}
    np.testing.assert_allclose(saved.gaussian.cov, once.cov, rtol=1e-12)
    take(pictures, tmp_path / "one.npz", shard=30)
    take(pictures, tmp_path / "moments.npz")
    one, moments = (stats_files.read(tmp_path / name) for name in ("one.npz", "moments.npz"))
    assert moments.features is None
    for moments_of, exact in ((one.gaussian, once), (moments.gaussian, saved.gaussian)):
        np.testing.assert_array_equal(moments_of.mean, exact.mean)
        np.testing.assert_array_equal(moments_of.cov, exact.cov)


def test_merged_sums_match_all_rows_at_once():
    rows = (100 + np.random.default_rng(1).normal(size=(5000, 3))).astype(np.float32)
    ends = [0, 0, 1, 1700, 5000]  # One part is empty, and one has a single row.
    parts = [features.Stream(3, keep=False) for _ in ends[1:]]
    for part, (first, end) in zip(parts, itertools.pairwise(ends), strict=True):
        part.add(rows[first:end])
    sums = functools.reduce(features.merged, [p.sums() for p in parts], features.no_sums(3))
    np.testing.assert_allclose(sums.gaussian().cov, np.cov(rows.T.astype(float)), atol=1e-12)
    np.testing.assert_allclose(sums.mean, rows.mean(0, dtype=float), rtol=1e-14)


def test_killed_late_and_restarted_workers_write_the_same_file(pictures, tmp_path, monkeypatch):
    expected = take(pictures, tmp_path / "alone.npz")
    out, write = tmp_path / "shared.npz", sharded_stats.Shards.write
    work = sharded_stats.StatsOptions(7, 4)
    done = []

    def killed(self, shard):
        if done:
            raise KeyboardInterrupt
        done.append(shard)
        write(self, shard)

    opened = sharded_stats.open_images(str(pictures), toy.extractor)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(sharded_stats.Shards, "write", killed)
        sharded_stats.take(opened, out, work, engines.Worker(1, 2))
    assert done == [2] and not out.exists()

    def overtaken(self, shard):
        """Let another worker finish everything first."""
        monkeypatch.setattr(sharded_stats.Shards, "write", write)
        assert take(pictures, out) == expected
        write(self, shard)

    monkeypatch.setattr(sharded_stats.Shards, "write", overtaken)
    sharded_stats.take(opened, out, work, engines.Worker(0, 2))
    assert out.read_bytes() == expected
    before = out.stat().st_mtime_ns
    take(pictures, out, engines.Worker(1, 2))
    assert out.stat().st_mtime_ns == before
    # A changed image, so the statistics change.
    Image.new("RGB", (12, 8)).save(pictures / "002.png")
    assert take(pictures, out, engines.Worker(1, 2)) != expected


def test_the_stats_command_shares_its_work_between_workers(run, pictures, tmp_path):
    out = tmp_path / "real.npz"
    arguments = "stats", f"--images={pictures}", f"--out={out}", "--shard_images=7"
    assert run(*arguments, "--dry_run")[1] == "30 images in 5 shards; finished shards: 0\n"
    assert run(*arguments, "--worker=1", "--workers=2")[0] == 0
    assert stats_files.read(out).gaussian.n == 29
    assert "--worker=2 of --workers=2: the index must be from 0 to 1" in run(*arguments, "--worker=2", "--workers=2")[2]
    code, _, err = run("fid", out, out, "--workers=2")
    assert code == 2 and "`fid` does not read --workers: remove the flag" in err
