"""The lines of long jobs."""

import logging

from diffusion_jax.machine import progress


def test_the_line_has_rate_and_time_left():
    expected = "30 of 1,000 shards | 1.5 a second | 0:10:47 left"
    assert progress.line(30, 1000, "shards", 20.0) == expected


def test_items_pass_and_the_last_is_reported(caplog):
    with caplog.at_level(logging.INFO):
        assert list(progress.reported("abc", 3, "letters")) == ["a", "b", "c"]
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("3 of 3 letters | ") and line.endswith(" a second | 0:00:00 left")
    caplog.clear()
    with caplog.at_level(logging.INFO):
        list(progress.reported("abc", 3, "letters", every=0.0))
    assert len(caplog.records) == 3
