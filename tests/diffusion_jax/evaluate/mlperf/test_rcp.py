"""MLPerf's reference convergence points, as a band of FID over CLIP score."""

from diffusion_jax.evaluate.mlperf import rcp


def test_the_reference_band_spans_the_fids_at_each_clip_score(tmp_path):
    lines = "config,clip,fid\na,0.101,200\na,0.104,180\nb,0.151,90.5\n"
    (tmp_path / "rcp.csv").write_text(lines)
    band = rcp.read_band(tmp_path / "rcp.csv")
    assert (band.x, band.low, band.high) == ([0.1, 0.15], [180, 90.5], [200, 90.5])


def test_the_packaged_reference_points_reach_mlperfs_target():
    """All runs pass FID 90, MLPerf's target, between CLIP scores 0.15 and 0.18."""
    assert len(rcp.PATH.read_text().splitlines()) == 1 + 439
    band = rcp.read_band()
    assert band.low[band.x.index(0.15)] > 90 > band.high[band.x.index(0.18)]
