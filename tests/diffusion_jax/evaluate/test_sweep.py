"""Sweeps over guidance: the text of tables, and features that survive a kill."""

import jax
import numpy as np
import pytest

from diffusion_jax.evaluate import drawn_features, sweep

ROWS = [
    {"guidance": 1.5, "seen": 0.25, "held_out": 0.125, "ema": "0.999"},
    {"guidance": 1.0, "seen": 0.75, "held_out": 0.5, "ema": "a, b"},
]


def test_write_table_quotes_cells_with_commas(tmp_path):
    sweep.write_table(tmp_path / "sweep.csv", ROWS)
    assert (tmp_path / "sweep.csv").read_bytes() == (
        b'guidance,seen,held_out,ema\n1.5,0.25,0.125,0.999\n1.0,0.75,0.5,"a, b"\n'
    )


def test_write_table_appends_columns_of_later_rows(tmp_path):
    sweep.write_table(tmp_path / "sweep.csv", [{"a": 1}, {"a": 2, "b": 3}])
    assert (tmp_path / "sweep.csv").read_text() == "a,b\n1,\n2,3\n"


def test_nemos_tables_are_written_only_for_available_scores(tmp_path):
    sweep.write_scores(tmp_path, [{"guidance": 2.0, "fid": 7.5}, {"guidance": 3.0, "fid": 8.0}])
    assert (tmp_path / "fid_scores.csv").read_text() == "cfg,fid\n2.0,7.5\n3.0,8.0\n"
    assert [path.name for path in tmp_path.iterdir()] == ["fid_scores.csv"]


class Killed(Exception):
    """Raised while a batch is computed."""


def numbers(calls, kill_at=None):
    """Return a function that computes toy features. `calls` records the requested images."""

    def compute(rows):
        calls.append(rows.tolist())
        if kill_at is not None and len(calls) == kill_at:
            raise Killed
        fine = np.ones(len(rows), bool)
        return {"double": 2.0 * rows[:, None], "shown": rows[rows == 3], "fine": fine}

    return compute


def test_a_killed_collection_of_features_resumes_at_its_batch(tmp_path):
    calls = []
    with pytest.raises(Killed):
        drawn_features.collect(10, 4, numbers(calls, kill_at=2), "point", tmp_path)
    features = drawn_features.collect(10, 4, numbers(calls), "point", tmp_path)
    assert calls == [[0, 1, 2, 3], [4, 5, 6, 7], [4, 5, 6, 7], [8, 9]]
    np.testing.assert_array_equal(features["double"][:, 0], 2 * np.arange(10))
    np.testing.assert_array_equal(features["shown"], [3])
    again = drawn_features.collect(10, 4, numbers(calls), "point", tmp_path)
    assert len(calls) == 4
    np.testing.assert_array_equal(again["double"], features["double"])


def test_features_can_be_completed_with_another_batch_size(tmp_path):
    calls = []
    with pytest.raises(Killed):
        drawn_features.collect(12, 3, numbers(calls, kill_at=3), "point", tmp_path)
    (tmp_path / "images_000000_000002.npz").unlink()
    features = drawn_features.collect(12, 5, numbers(calls), "point", tmp_path)
    assert calls[3:] == [[0, 1, 2], [6, 7, 8, 9, 10], [11]]
    np.testing.assert_array_equal(features["double"][:, 0], 2 * np.arange(12))


def test_features_written_by_two_evaluations_count_each_image_once(tmp_path):
    def compute(rows):
        if not list(tmp_path.glob("*.npz")):  # Meanwhile, another evaluation begins and ends.
            drawn_features.collect(20, 3, numbers([]), "point", tmp_path)
        return numbers([])(rows)

    features = drawn_features.collect(20, 4, compute, "point", tmp_path)
    np.testing.assert_array_equal(features["double"][:, 0], 2 * np.arange(20))
    calls = []
    again = drawn_features.collect(20, 5, numbers(calls), "point", tmp_path)
    np.testing.assert_array_equal(again["double"], features["double"])
    assert calls == []


def test_of_overlapping_files_of_features_those_that_cover_the_most_images_are_used(tmp_path):
    for first, last in [(0, 3), (2, 8), (4, 6), (9, 9)]:
        rows = np.arange(first, last + 1)
        drawn_features._write_shard(tmp_path, rows, numbers([])(rows))
    calls = []
    features = drawn_features.collect(10, 4, numbers(calls), "point", tmp_path)
    assert calls == [[7, 8]]
    np.testing.assert_array_equal(features["double"][:, 0], 2 * np.arange(10))


def test_features_deleted_meanwhile_are_an_error(tmp_path, capsys):
    def compute(rows):
        (tmp_path / "images_000000_000003.npz").unlink(missing_ok=True)
        return numbers([])(rows)

    with pytest.raises(SystemExit) as ended:
        drawn_features.collect(8, 4, compute, "point", tmp_path)
    assert ended.value.code == 2
    assert f"{tmp_path} holds the features of 4 of 8 images" in capsys.readouterr().err


@pytest.mark.parametrize("harm", ["flip", "cut", "empty"])
def test_a_damaged_file_of_features_is_computed_again(tmp_path, harm, caplog):
    calls = []
    expected = drawn_features.collect(10, 4, numbers(calls), "point", tmp_path)
    path = tmp_path / "images_000004_000007.npz"
    content = bytearray(path.read_bytes())
    content[content.index(np.float64(8).tobytes())] ^= 1  # The feature of image 4.
    path.write_bytes({"flip": content, "cut": content[:200], "empty": b""}[harm])
    again = drawn_features.collect(10, 4, numbers(calls), "point", tmp_path)
    assert calls[3:] == [[4, 5, 6, 7]]
    np.testing.assert_array_equal(again["double"], expected["double"])
    assert f"{path} is damaged, so its images are drawn again" in caplog.text


def test_features_with_other_settings_are_an_error_that_names_them(tmp_path):
    card = {"seed": 0, "step": 3, "versions": {"jax": "1"}}
    assert drawn_features.claim(tmp_path / "f", {"toy": card}) == {"toy": card}
    newer = card | {"versions": {"jax": "2"}}
    assert drawn_features.claim(tmp_path / "f", {"toy": newer}) == {"toy": card}
    with pytest.raises(ValueError, match=r"other settings .toy.seed: 0 stored, 1 requested.: use the"):
        drawn_features.claim(tmp_path / "f", {"toy": card | {"seed": 1}})
    with pytest.raises(ValueError, match=r"clip\.seed: None stored, 0 requested"):
        drawn_features.claim(tmp_path / "f", {"toy": card, "clip": card})


def test_describe_lists_each_score_with_its_interval():
    row = {"guidance": "1.5", "fid": "12.25", "fid_low": "11", "fid_high": "13", "clip_score": 0.25}
    assert sweep.describe(row) == "guidance 1.5\nFID 12.25 (11 to 13)\nCLIP score 0.25"
    share = {"guidance": 2, "r1_judge": 1.0, "r1_judge_low": 0.965, "r1_judge_high": 1.0}
    expected = "guidance 2\nown caption the nearest (judge) 100 % (96.5 to 100 %)"
    assert sweep.describe(share) == expected


def test_with_two_processes_process_0_sends_the_missing_images_to_both(tmp_path, monkeypatch):
    sent = []
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(drawn_features.multihost_utils, "broadcast_one_to_all", lambda mask: sent.append(mask) or mask)
    drawn_features._missing(tmp_path, 3)
    np.testing.assert_array_equal(sent, [[True, True, True]])
