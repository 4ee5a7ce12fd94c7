"""Prompts from text files and tables: no row is split, lost, shifted or replaced."""

import gzip
import json

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from diffusion_jax.config import picture_fields
from diffusion_jax.data import prompts


def read(folder, name, content, column=""):
    (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return prompts.read(f"{folder / name}{column}")


def test_prompts_of_a_text_file_are_its_stripped_lines(tmp_path):
    assert read(tmp_path, "p.txt", "a cat\n\n two dogs \n\n") == ["a cat", "two dogs"]


def test_only_cr_and_lf_end_a_line(tmp_path):
    inside = "a\u2028b\u2029c\x85d\x0be\x0cf\x1cg"
    assert read(tmp_path, "p.txt", f"{inside}\r\nred\rblue\n") == [inside, "red", "blue"]
    assert read(tmp_path, "p.tsv", f"id\tcaption\r\n1\t{inside}\r\n2\tx") == [inside, "x"]
    row = json.dumps({"text": inside}, ensure_ascii=False)
    assert read(tmp_path, "p.jsonl", f"{row}\n{row}\n") == [inside, inside]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_byte_order_marks_are_not_part_of_a_prompt(tmp_path, encoding):
    for name, content in (
        ("p.TXT", "é one\ntwo"),
        ("p", "é one\ntwo"),
        ("p.csv", "caption\né one\ntwo"),
        ("p.tsv", "caption\né one\ntwo"),
        ("p.jsonl", '{"caption": "é one"}\n{"caption": "two"}'),
        ("p.json", '["é one", "two"]'),
    ):
        assert read(tmp_path, name, content.encode(encoding)) == ["é one", "two"], name


def test_prompts_of_a_folder_are_its_text_files_without_hidden_ones(tmp_path):
    for name in ("b.txt", "a.TXT", "._a.txt", ".notes.txt", "c.md"):
        (tmp_path / name).write_bytes(b"\0" if name.startswith("._") else name.encode())
    assert prompts.read(tmp_path) == ["a.TXT", "b.txt"]
    assert prompts.names(tmp_path) == ["a", "b"]


def test_blank_prompts_are_skipped_and_counted(tmp_path, caplog):
    read(tmp_path, "p.txt", "a\n\n \nb\n\n\n")
    assert "p.txt: left out 2 blank prompts; the first: line 2" in caplog.text
    caplog.clear()
    assert read(tmp_path, "p.csv", 'id,caption\n1,a\n2,\n3,"b"\n') == ["a", "b"]
    assert f"left out 1 blank prompts; the first: {tmp_path}/p.csv, line 3" in caplog.text


def test_the_caption_column_of_a_table_is_found_or_named(tmp_path):
    table = 'image_id\tid\tcaption\n7\t1\tA "red" cat.\n8\t2\tdogs\n'
    assert read(tmp_path, "p.tsv", table) == ['A "red" cat.', "dogs"]
    parti = "Prompt\tCategory\nbond\tAbstract\nlife\tAbstract\n"
    assert read(tmp_path, "p.tsv", parti) == ["bond", "life"]
    assert read(tmp_path, "p.tsv", parti, "::Category") == ["Abstract", "Abstract"]
    # Excel separates cells by semicolons in some languages.
    assert read(tmp_path, "p.csv", "id;Text\n1;a, b\n2;c\n") == ["a, b", "c"]
    rows = {"prompts": ["x", "y"], "key": [1, 2]}
    pyarrow.parquet.write_table(pyarrow.table(rows), tmp_path / "p.parquet")
    assert prompts.read(tmp_path / "p.parquet") == ["x", "y"]


def test_a_quoted_cell_can_contain_separators_quotes_and_line_breaks(tmp_path):
    table = 'id,caption\n1,"a cat, ""Tom""\n\nsits, purring, on a mat"\n2,a dog\n'
    assert read(tmp_path, "p.csv", table) == ['a cat, "Tom"\n\nsits, purring, on a mat', "a dog"]


def test_an_unclosed_quote_is_text_and_does_not_join_rows(tmp_path):
    table = 'id\tcaption\n1\t"A man on a horse\n2\ta cat\n3\tthe dog said "hi"\n4\ta bird\n'
    expected = ['"A man on a horse', "a cat", 'the dog said "hi"', "a bird"]
    assert read(tmp_path, "p.tsv", table) == expected
    assert read(tmp_path, "p.csv", table.replace("\t", ",")) == expected
    assert read(tmp_path, "p.tsv", 'id\tcaption\n1\t"Hi" he said\n2\t"b\n') == ['"Hi" he said', '"b']
    # The column of ids tells that the text has two lines.
    assert read(tmp_path, "p.csv", 'id,caption\n1,"open\n2 inches, wide"\n') == ["open\n2 inches, wide"]
    # Ambiguous: two rows, or one row whose text has two lines.
    with pytest.raises(ValueError, match=r'tsv, line 2: a quote opens here .*\("1\\t\\"open"\)'):
        read(tmp_path, "p.tsv", 'id\tcaption\n1\t"open\n2\t6 inches"\n')


@pytest.mark.parametrize("rest", ["2,dog", '2,a 5" dog\n3,b'])
def test_an_unclosed_quote_after_multi_line_cells_is_an_error_with_its_line(tmp_path, rest):
    message = r'/p.csv, line 4: a quote opens here and is never closed, .* \("1,\\"cat"\): close or double the quote'
    with pytest.raises(ValueError, match=message):
        read(tmp_path, "p.csv", f'id,caption\n0,"a, b\nc"\n1,"cat\n{rest}\n')
    # The wrong row comes before the unclosed quote.
    with pytest.raises(ValueError, match="line 2 has 3 cells"):
        read(tmp_path, "p.csv", 'id,caption\n0,a, b\n1,"c\nd"\n2,"cat\n')


def test_prompts_in_json_are_strings_objects_or_coco_annotations(tmp_path):
    assert read(tmp_path, "p.json", '["a", "b"]') == ["a", "b"]
    assert read(tmp_path, "p.json", '[{"prompt": "a"}, {"prompt": "b"}]') == ["a", "b"]
    assert read(tmp_path, "p.jsonl", '"a"\n\n{"caption": "b", "text": "c"}\n') == ["a", "b"]
    annotations = [{"id": 9, "caption": "b\n"}, {"id": 2, "caption": "a"}]
    assert read(tmp_path, "p.json", json.dumps({"annotations": annotations})) == ["a", "b"]


def test_a_random_sample_of_prompts_depends_only_on_the_seed(tmp_path):
    (tmp_path / "p.txt").write_text("\n".join(map(str, range(100))))
    drawn = prompts.read(tmp_path / "p.txt", 5)
    assert drawn == prompts.read(tmp_path / "p.txt", 5)
    assert len(set(drawn)) == 5 and drawn != prompts.read(tmp_path / "p.txt", 5, seed=1)
    assert prompts.fingerprint(drawn) != prompts.fingerprint(drawn[::-1])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"caption\na cat\na\0dog", r"not UTF-8 text \(it holds NUL characters, 1 in all, the first in line 3;"),
        (gzip.compress(b"a", mtime=0), "compressed by gzip: decompress it, as with gzip -d"),
    ],
)
def test_files_with_nul_characters_and_gzip_files_are_errors(tmp_path, content, message):
    for name in ("p.csv", "p.jsonl", "p.txt"):
        with pytest.raises(ValueError, match=f"{tmp_path / name} is {message}"):
            read(tmp_path, name, content)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.txt", "\n\n", "holds no prompt"),
        ("p.doc", "one", "p.doc is not a table of prompts: use .txt"),
        ("p.txt", b"one\ncaf\xe9", r"p.txt is not UTF-8 text \(byte 0xe9 at offset 7, line 2\)"),
        ("p.txt", "one".encode("utf-16-le"), r"p.txt is not UTF-8 text \(it holds NUL characters"),
        ("p.csv", b"caption\ncaf\xe9", "p.csv, line 2: caption cannot be read: .*byte 0xe9"),
        ("p.tsv", "id\tx\n1\ta\n", "p.tsv, line 2 has no column 'caption', but id, x: .*::COLUMN"),
        ("p.csv", "text,title\na,b\n", "line 2 has no column 'caption', but text, title"),
        ("p.tsv", "id\tcaption\n1\ta\n2\n3\tb\n", r'3 has 1 cells, but .* 2 columns: \["2"\]'),
        ("p.csv", "id,caption\n1,cat, asleep\n", r'2 has 3 cells.*\["1", "cat", "asleep"\]'),
        ("p.csv", "caption,caption\na,b\n", "p.csv has several columns 'caption'"),
        ("p.csv", f"caption\n{'a' * 200_000}\n", "p.csv is no table: field larger than"),
        ("p.jsonl", '"a"\n{"caption": 7}', "p.jsonl, line 2: caption is 7, not a text"),
        ("p.jsonl", '{"caption": "a"}\n{"x": 7}', "p.jsonl, line 2 has no column 'caption', but x"),
        ("p.jsonl", '"a"\n{', "p.jsonl, line 2: invalid JSON"),
        ("p.jsonl", '"a"\n{"caption": "b", "x": 1, "caption": "c"}', "2: invalid JSON: the key 'caption' occurs twice"),
        ("p.json", '{"a.png": "a", "a.png": "b"}', "p.json: invalid JSON: the key 'a.png' occurs"),
        ("p.json", '["a", null]', "p.json, item 2: caption is null, not a text"),
        ("p.json", '{"a": 1}', 'p.json holds {"a": 1}: it needs a list'),
        ("p.json", '{"prompt": "a cat", "negative_prompt": "x"}', 'p.json holds {"prompt": "a c.*: it needs a list'),
        ("p.json", '{"annotations": [{"id": 5, "caption": null}]}', r"p.json, annotation 1 \(id 5\): caption is null"),
        ("p.json", '{"annotations": [{"id": 3, "image_id": 2}]}', r"1 \(id 3\) has no column 'caption', but id, image"),
    ],
)
def test_a_malformed_prompt_file_is_a_one_line_error_with_row_and_value(tmp_path, name, content, message):
    with pytest.raises(ValueError, match=message) as error:
        read(tmp_path, name, content)
    assert "\n" not in str(error.value)


def test_a_sample_larger_than_the_prompt_file_is_an_error(tmp_path):
    (tmp_path / "p.txt").write_text("one\n")
    with pytest.raises(ValueError, match="holds 1 prompts, fewer than the requested 2"):
        prompts.read(tmp_path / "p.txt", 2)


def test_columns_of_fields_are_numbers_of_the_prompts(tmp_path):
    named = picture_fields.read(("aesthetic=0..10", "year=1900..2030", "share"))
    path = tmp_path / "prompts.csv"
    path.write_text("text,aesthetic,share\na,7,0.5\n,1,1\nb,,0.25\n")
    assert prompts.read(path) == ["a", "b"]
    found = prompts.numbers(f"{path}::text", named)
    assert found.keys() == {"field_aesthetic", "field_share"}
    np.testing.assert_array_equal(found["field_aesthetic"], [7, np.nan])
    np.testing.assert_array_equal(found["field_share"], [0.5, 0.25])
    path.write_text("text,aesthetic\na,7\nb,70\n")
    with pytest.raises(ValueError, match=r"prompts\.csv, line 3: the field aesthetic is '70'"):
        prompts.numbers(path, named)
    (tmp_path / "prompts.txt").write_text("a\nb")
    assert prompts.numbers(tmp_path / "prompts.txt", named) == {}
    prompts.refuse_numbers(tmp_path / "prompts.txt", named)


def test_numbers_that_only_sample_reads_and_equal_columns_of_parquet_are_errors(tmp_path):
    path = tmp_path / "prompts.csv"
    path.write_text("text,year,share\na,2000,0.5\n")
    prompts.refuse_numbers(path, picture_fields.read(("aesthetic=0..10",)))
    named = picture_fields.read(("share", "aesthetic=0..10", "year=1900..2030"))
    with pytest.raises(ValueError, match=r"prompts\.csv have numbers of data.fields \(share, year\)"):
        prompts.refuse_numbers(path, named)
    twice = pyarrow.Table.from_arrays([pyarrow.array(["a"]), pyarrow.array(["b"])], names=["text", "text"])
    pyarrow.parquet.write_table(twice, tmp_path / "p.parquet")
    with pytest.raises(ValueError, match=r"p\.parquet has several columns 'text': keep one"):
        prompts.read(tmp_path / "p.parquet")
