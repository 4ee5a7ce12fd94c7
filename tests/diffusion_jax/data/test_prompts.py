"""Prompts from files of three kinds, and draws that never change."""

import json

import pytest

from diffusion_jax.data import prompts


def test_a_text_file_has_one_a_line(tmp_path):
    (tmp_path / "p.txt").write_text("a cat\n\n two dogs \n")
    assert prompts.read(tmp_path / "p.txt") == ["a cat", " two dogs "]


def test_a_table_has_a_column_of_captions(tmp_path):
    (tmp_path / "p.tsv").write_text('image_id\tid\tcaption\n7\t1\tA "red" cat.\n8\t2\tdogs\n')
    assert prompts.read(tmp_path / "p.tsv") == ['A "red" cat.', "dogs"]


def test_cocos_annotations_come_in_the_order_of_their_ids(tmp_path):
    annotations = [{"id": 9, "caption": "b\n"}, {"id": 2, "caption": "a"}]
    (tmp_path / "p.json").write_text(json.dumps({"annotations": annotations}))
    assert prompts.read(tmp_path / "p.json") == ["a", "b"]


def test_some_are_drawn_by_the_seed_alone(tmp_path):
    (tmp_path / "p.txt").write_text("\n".join(map(str, range(100))))
    drawn = prompts.read(tmp_path / "p.txt", 5)
    assert drawn == prompts.read(tmp_path / "p.txt", 5)
    assert len(set(drawn)) == 5 and drawn != prompts.read(tmp_path / "p.txt", 5, seed=1)
    assert prompts.fingerprint(drawn) != prompts.fingerprint(drawn[::-1])


@pytest.mark.parametrize(
    ("name", "content", "number", "message"),
    [
        ("p.txt", "\n\n", None, "holds no prompt"),
        ("p.txt", "one\n", 2, "holds 1 prompts, fewer than the requested 2"),
        ("p.csv", "one", None, "is not a file of prompts: use .txt"),
        ("p.tsv", "id\ttext\n1\ta\n", None, "has no column 'caption', but id, text: rename"),
        ("p.json", "[1]", None, "has no annotations"),
    ],
)
def test_a_file_that_cannot_do_is_refused(tmp_path, name, content, number, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        prompts.read(tmp_path / name, number)
