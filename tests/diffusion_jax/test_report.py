"""Where the page about several runs is written."""

import pathlib

from diffusion_jax import report


def test_a_page_about_several_runs_is_not_the_first_runs_own():
    own = pathlib.Path("runs/a/report.html")
    assert report._default_out(["runs/a"]) == own
    assert report._default_out(["runs/a", "runs/b.c", "d"]) == own.with_name(
        "report_with_b.c_d.html"
    )
