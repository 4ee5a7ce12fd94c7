"""The file name of a page about several runs."""

import pathlib

from diffusion_jax import report


def test_a_page_about_several_runs_has_their_names_in_its_file_name():
    own = pathlib.Path("runs/a/report.html")
    assert report._default_out(["runs/a"]) == own
    assert report._default_out(["runs/a", "runs/b.c", "d"]) == own.with_name(
        "report_with_b.c_d.html"
    )
