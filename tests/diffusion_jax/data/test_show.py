"""The commands import and show: what they print of a messy folder, and what they doubt."""

import functools
import json
import re

import numpy as np
import pytest
from PIL import Image

from diffusion_jax.config import picture_fields
from diffusion_jax.config.settings import Data
from diffusion_jax.data import __main__ as data_command
from diffusion_jax.data import guess, show, sources, tars
from diffusion_jax.data.sources.folder import open_folder
from diffusion_jax.files.untrusted import POINTER
from tests.diffusion_jax.data import calls
from tests.imagen_jax import commands

LFS = POINTER + b"v1\noid sha256:0\nsize 3\n"


def draw(path, colour="red"):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (20, 16), colour).save(path)


@pytest.fixture
def messy(tmp_path):
    """A folder in which each kind of file that users have occurs once or twice."""
    root = tmp_path / "photos"
    for name in ("a.png", "b.png", "cats/c.png", "cats/d.png", "cats/old/e.png", "cats/old/f.png"):
        draw(root / name)
    (root / "a.txt").write_text("a red square")
    (root / "b.txt").write_bytes("a müde square".encode("utf-16"))
    (root / "cats/c.txt").write_bytes("a müde square".encode("latin-1"))
    (root / "cats/d.txt").write_text("a red square")
    (root / "cats/lfs.jpg").write_bytes(LFS)
    (root / "cats/lfs.txt").write_text("a blue square")
    (root / "note.md").write_text("taken in May")
    (root / "cats/alone.txt").write_text("a square that is lost")
    (root / "cats/old/g.svg").write_text("<svg/>")
    for hidden in (".DS_Store", ".git/x.png", "cats/Thumbs.db"):
        (root / hidden).parent.mkdir(exist_ok=True)
        (root / hidden).write_text("")
    return root


run = functools.partial(calls.exit_code, data_command.main)


def test_each_file_of_a_messy_folder_has_an_origin_or_a_reason(messy, capsys):
    assert run("show", messy) == 0
    lines = capsys.readouterr().out.splitlines()
    table = next((messy / ".diffusion_jax").iterdir())
    error = "broken_text: the text is not UTF-8 text (byte 0xfc at offset 3, line 1): save it in "
    assert lines == [
        "files          5 pictures, 5 texts, 1 companions",
        "left out       3 hidden: .DS_Store, .git, cats/Thumbs.db",
        "left out       1 format: cats/old/g.svg",
        "left out       1 no_picture: cats/alone.txt",
        "left out       2 no_caption: cats/old/e.png, cats/old/f.png",
        "companions     note.md",
        'captions       4, 3 of them different; the most frequent: 2 x "a red square", 1 x "a müde '
        'square", 1 x "a blue square"',
        "origin         5 NAME.txt, such as that of a.png",
        f"unreadable     1, such as that of cats/c.png: {error}UTF-8",
        f"table          {table}",
    ]
    assert run("show", messy, "--left_out") == 0
    assert sorted(capsys.readouterr().out.splitlines()) == [
        "format\tcats/old/g.svg",
        "hidden\t.DS_Store",
        "hidden\t.git",
        "hidden\tcats/Thumbs.db",
        "no_caption\tcats/old/e.png",
        "no_caption\tcats/old/f.png",
        "no_picture\tcats/alone.txt",
    ]
    assert run("show", messy, "--by=origin") == 0
    assert capsys.readouterr().out.splitlines() == lines[7:9]
    assert run("show", messy, "--by=reason") == 0
    assert capsys.readouterr().out.splitlines() == lines[1:5]


def test_a_row_shows_all_that_is_known_of_a_picture(tmp_path, capsys):
    for name in ("a.png", "in/a.png", "in/b.png"):
        draw(tmp_path / name)
    rows = [{"file_name": "in/b.png", "text": [["a cat", 3], ["a kit\x1bten", 1]], "age": "old"}]
    rows += [{"file_name": name, "text": "a dog"} for name in ("a.png", "in/a.png")]
    (tmp_path / "m.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    assert run("show", tmp_path, "--row=b.png") == 0
    shown = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert shown.pop("key").isdigit() and shown.pop("picture").startswith("20 x 16 pixels, PNG, ")
    assert shown == {
        "name": "in/b.png",
        "place": f"{tmp_path}/in/b.png",
        "caption": "a kit\\x1bten (weight 0.25, m.jsonl: text, exact path)",
    }
    for name, message in {
        "in/c.png": "no picture has this name, and no file of this name was left out: did you mean",
        "zzz": "no picture has this name, and no file of this name was left out\n",
    }.items():
        assert run("show", tmp_path, f"--row={name}") == 2
        assert f"--row={name}: {message}" in capsys.readouterr().err
    assert run("show", tmp_path, "--row=a.png") == 0  # An exact name comes first.
    assert f"{tmp_path}/a.png\n" in capsys.readouterr().out
    draw(tmp_path / "on/b.png")
    sheet = tmp_path / "sheets/1.png"
    assert run("show", tmp_path, "--row=on/b.png", "--left_out", f"--sheet={sheet}") == 0
    shown = capsys.readouterr().out
    assert shown.startswith("no_caption\ton/b.png\nname           on/b.png\n") and sheet.exists()
    assert shown.endswith("\nleft out       no_caption\n")
    assert run("show", tmp_path, "--row=b.png") == 2
    assert "--row=b.png names 2 pictures: write in/b.png\n" in capsys.readouterr().err


def test_a_row_shows_numbers_masks_damage_and_why_a_file_was_left_out(messy):
    for name, number in (("a", 7), ("b", "x"), ("cats/c", 2), ("cats/d", 2), ("cats/lfs", 1)):
        (messy / f"{name}.json").write_text(json.dumps({"age": number}))
        draw(messy / f"{name}.mask.png")
    table = open_folder(messy, "txt", "drop", picture_fields.read(["age=0..9"]), "mask.png")
    mask = ("mask", f"{messy}/a.mask.png")
    assert show.about(table, "a.png")[-2:] == [("number", "age: 7.0"), mask]
    assert "'x'" in dict(show.about(table, "b.png"))["number"]
    assert dict(show.about(table, "cats/lfs.jpg"))["picture"].startswith("broken_image: ")
    assert dict(show.about(table, "e.png"))["left out"] == "no_caption"
    assert show.about(table, "cats/Thumbs.db")[1:] == [("left out", "hidden")]


def test_the_sheet_has_a_cell_with_its_caption_for_each_usable_picture(messy, tmp_path):
    assert run("show", messy, f"--sheet={tmp_path}/sheet.png") == 0
    sheet = np.asarray(Image.open(tmp_path / "sheet.png").convert("RGB"))
    # c.txt is not UTF-8, lfs.jpg is no picture: a, b and d remain, with captions of one line.
    assert sheet.shape == (4 + 192 + 14 + 6, 4 + 3 * 196, 3)
    for x in (4, 200, 396):
        assert (sheet[4:196, x : x + 192] == [255, 0, 0]).all()
        assert (sheet[197:211, x : x + 192] < 128).any()


def several(texts, **more):
    """Return files: pictures 0.png, 1.png, ... with these captions beside them, and more files."""
    files = {f"{i}.png": None for i in range(len(texts))}
    beside = {f"{i}.txt": text for i, text in enumerate(texts) if text is not None}
    return files | beside | {name.replace("_", "."): of for name, of in more.items()}


UNREAD = "files that may hold captions, but are not read: 1, such as "
FINE = ["a cat", "a dog", "a fox", "a cat"]
NAMED = "file_name,text\n" + "".join(f"{i}.png,a cat {i}\n" for i in range(4))
BLANK = "file_name,caption\n0.png,a cat\n0.png,\n1.png,a dog\n1.png,\n"
NULL = '{"file_name": "0.png", "text": "a cat"}\n{"file_name": "1.png", "text": []}\n'
DEEP = {"x/in/0.png": None, "x/in/1.png": None, "m.csv": "image,text\nin/0.png,a cat\nin/1.png,a dog\n"}
AWAY = {"in/0.png": None, "in/1.png": None, "m.csv": NAMED.replace("2.png", "out/2.png")}


def write(folder, files):
    """Write texts and bytes; None stands for a picture."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if content is None:
            draw(folder / name)
        else:
            (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def check_doubts(path, lines):
    """Compare the doubts about the data with patterns, one for each."""
    found = show.doubts(sources.open_records(guess.guess(path)))
    assert len(found) == len(lines), found
    assert [line for line, begin in zip(found, lines, strict=True) if not re.search(begin, line[:99])] == []


@pytest.mark.parametrize(
    ("files", "lines"),
    [
        (several(FINE), []),
        (several(["a cat"]), []),
        (several(["a cat"] * 3), ['all 3 captions are "a cat": a model learns nothing from its']),
        (several(["cat", "dog", "a fox"]), ['2 of 3 captions have one word, such as "cat": ']),
        (several(["cat", "a dog", "a fox", "ox"]), []),
        (several(["cat,grey", "dog,old"]), []),
        (several(["猫が好き", "犬が好き"]), []),
        (several(["0a1f", "b2.c", "a fox"]), ["2 of 3 captions look like ids, paths or URLs, "]),
        (several(["http://x/a", "x/b.jpg", "img_1"]), ["3 of 3 captions look like ids, paths or"]),
        (several(["a cat", None]), ["1 of 2 pictures have no caption, such as 1.png: add capt"]),
        (several(["a cat", "a dog", None]), []),
        (several(["a cat", ""]), ["1 of 2 pictures have no caption, such as 1.png: add capt"]),
        (several([None, None], a_txt="b"), ["2 of 2 .* 0.png; texts without a picture: a.txt: add"]),
        (several([*FINE, LFS]), ["pointers of Git LFS: 1 in texts, such as that of 4.png: run"]),
        ({**several(FINE), "0.png": LFS}, ["pointers of Git LFS: 1 of 4 picture files looked into"]),
        (several(["0 0.5 0.5", "1 0.2 0.5", "2 0.2 0.1"]), ["3 of 3 captions look like ids, paths or URLs, "]),
        (
            several(['["a cat", "an ox"]', "['a dog']", "{'en': 'a fox'}"]),
            ["3 of 3 captions look like lists or objects"],
        ),
        (
            several(["a cat\nit sits", "a dog\nit runs", "an ox"]),
            ["2 of 3 captions have several lines .txt:lines reads"],
        ),
        (several(["a cat\n\nIt sits.", "a dog\n\nIt runs."]), []),
        ({**several(FINE), "0.jpg": None}, ["texts of several pictures: 1, such as 0.txt of 0.jpg, 0.png: give each"]),
        (
            several(FINE, b_zip="", c_tar=""),
            ["files that may hold more pictures, but are not read: 2, such as b.zip: "],
        ),
        (several(FINE, m_csv=NAMED), [f"{UNREAD}m.csv"]),
        ({**several([None] * 4, m_csv=NAMED), "n.txt": NAMED}, [f"{UNREAD}n.txt: give it the"]),
        ({**several([None] * 4, m_csv=NAMED), "n.csv": "image,by\n0.png,J B\n1.png,B J\n"}, [f"{UNREAD}n.csv: give"]),
        ({**several([None] * 4, m_csv=NAMED), "n.csv": "image,class\n0.png,3\n1.png,7\n"}, []),
        (several(FINE, m_txt=NAMED), [f"{UNREAD}m.txt"]),
        (several(FINE, m_csv="name,price\ncar,3\n", info_json="{}"), []),
        (several(FINE, m_csv="id,label\n0,cat\n1,dog\n"), []),
        (several(FINE, m_csv="key,caption,status\n0,a,ok\n1,a,ok\n"), []),
        (several([None] * 12, m_csv="id,name\n10,a shirt\n11,a skirt\n"), ["12 of 12 pictures", UNREAD]),
        ({**several([None] * 4, m_csv=NAMED), "n.csv": "text\na cat\n"}, [f"{UNREAD}n.csv: give it the"]),
        ({**several([None] * 2), "m.csv": BLANK}, []),
        ({**several([None] * 2), "m.jsonl": NULL}, ["1 of 2 pictures have no caption, such as 1"]),
        ({**several([None] * 3, m_csv=NAMED), "3.jpg": None}, ["suffix: 1, such as that of 3.jpg in m.csv"]),
        ({"0.jpg": None, "1.jpg": None, "m.csv": NAMED}, []),
        (AWAY, ["captions found by the file name alone: 2, such as that of in/0.png in m"]),
        (DEEP, ["captions found by the last 2 parts of the path: 2, such as that of x/in/0.png"]),
    ],
)
def test_doubts_name_what_looks_wrong(tmp_path, files, lines):
    write(tmp_path, files)
    check_doubts(str(tmp_path), lines)


BY_KEY = "key,caption\n000,a dog\n001,an ox\n"


@pytest.mark.parametrize(
    ("changes", "beside", "lines"),
    [
        ({}, {"README.md": "of 2026", "stats.json": '{"count": 4}'}, []),
        ({}, {"00.parquet": "", "00_stats.json": '{"key": "000", "caption": "a dog"}'}, []),
        ({"001.png": LFS}, {}, ["pointers of Git LFS: 1 of 4 picture files looked into, such as that of "]),
        ({"002.txt": LFS, "003.txt": LFS}, {}, ["pointers of Git LFS: 2 in texts, such as that of "]),
        ({"000.bmp": b"x"}, {}, ["the last picture of each record gets its text, not others such as "]),
        ({}, {"train.csv": BY_KEY}, [UNREAD]),
        ({}, {"a.json": '{"000": "a dog", "001": "an ox"}'}, [UNREAD]),
        ({}, {"train.csv": "name,price\ncar,3\n", "a.png": None}, []),
        ({"README.txt": b"000.png 001.png"}, {}, []),
    ],
)
def test_doubts_about_tars_name_pointers_and_tables_beside_them(tmp_path, changes, beside, lines):
    draw(tmp_path / "a.png")
    (tmp_path / "set").mkdir()
    write(tmp_path / "set", beside)
    pairs = {f"{i:03}": {"png": (tmp_path / "a.png").read_bytes(), "txt": text.encode()} for i, text in enumerate(FINE)}
    for name, content in changes.items():
        key, _, suffix = name.partition(".")
        pairs.setdefault(key, {})[suffix] = content
    tars.write(tmp_path / "set/00.tar", [{tars.KEY: key.encode(), **files} for key, files in pairs.items()])
    check_doubts(f"webdataset:{tmp_path}/set", lines)


def test_doubts_are_warnings_or_with_strict_an_error(tmp_path):
    """Run as a process, because the command configures how warnings are shown."""
    for name in "ab":
        draw(tmp_path / "set" / f"{name}.png")
        (tmp_path / "set" / f"{name}.txt").write_text("a cat")
    for command in ("import", "show"):
        for strict in ((), ("--strict",)):
            ended = commands.run("diffusion_jax.data", command, f"{tmp_path}/set", *strict, devices=1)
            assert ended.code == (2 if strict else 0)
            assert ' warning: all 2 captions are "a cat": ' in ended.err
            assert f"error: --strict: the warnings name what looks wrong in {tmp_path}/set: " in ended.err or not strict
            assert "2 pictures, 2 texts" in ended.out


def test_names_of_several_lines_are_shown_in_one(tmp_path, capsys):
    draw(tmp_path / "a\nb.png")
    (tmp_path / "a\nb.txt").write_text("a cat\nof old age")
    (tmp_path / "c\nd.svg").touch()
    assert run("show", tmp_path) == run("show", tmp_path, "--left_out") == 0
    shown = capsys.readouterr().out
    assert r"NAME.txt, such as that of a\nb.png" in shown and "format\tc\\nd.svg\n" in shown
    assert run("show", tmp_path, "--row=a\nb.png") == 0
    assert r"a cat\nof old age (weight 1, NAME.txt)" in capsys.readouterr().out


def test_half_a_character_in_the_name_of_a_row_is_escaped(tmp_path, capsys):
    draw(tmp_path / "a.png")
    rows = [{"file_name": name, "text": "a cat"} for name in ("a.png", "\ud800.png")]
    (tmp_path / "m.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert run("show", tmp_path, "--left_out") == 0
    assert capsys.readouterr().out == "row_without_image\tm.jsonl, line 2: \\ud800.png\n"


def test_a_table_is_not_written_among_other_files(messy, tmp_path, capsys):
    for out in (messy, messy / "table", tmp_path):
        assert run("import", messy, f"--out={out}") == 2
        assert "is in the data set or holds other files: name a new" in capsys.readouterr().err
    for _ in range(2):
        assert run("import", messy, f"--out={tmp_path}/table") == 0


def test_a_table_written_elsewhere_is_opened_without_looking_at_changes(messy, tmp_path, capsys):
    out = tmp_path / "tables" / "photos"
    assert run("import", messy, f"--out={out}") == 0
    shown = capsys.readouterr().out
    assert f"\ntable          {out}\n" in shown
    assert f"--config.data.source=folder --config.data.path={out} --config.data.text=txt" in shown
    (messy / "g.png").write_bytes((messy / "a.png").read_bytes())
    (messy / "g.txt").write_text("later")
    data = guess.guess(str(out))
    assert data == Data("folder", str(out), "txt", uncaptioned="drop")
    kept, new = sources.open_records(data), sources.open_records(guess.guess(str(messy)))
    assert (len(kept), len(new)) == (5, 6)
    assert kept.read([0]) == new.read([0]) and kept.left_out() == new.left_out()
    assert run("show", out, "--by=origin") == 0
    assert capsys.readouterr().out.startswith("origin         5 NAME.txt, such as that of a.png\n")


def test_a_table_is_opened_with_the_settings_of_its_import_and_if_its_pictures_exist(tmp_path):
    photos, out = tmp_path / "photos", tmp_path / "out"
    draw(photos / "a.png")
    (photos / "a.json").write_text('{"text": "a cat", "age": 3}')
    open_folder(photos, "json:text", fields=picture_fields.read(["age=0..9"])).copy(out)
    guessed = guess.guess(str(out))
    assert (guessed.text, guessed.fields) == ("json:text", ("age=0.0..9.0",))
    assert sources.open_records(guessed).read([0])[0].numbers == {"age": 3}
    for changes, message in (
        ({"text": "txt"}, "out was imported with text 'json:text', but this run has 'txt': set "),
        ({"fields": ()}, r"out was imported with ranges \['age=0.0..9.0'\], but this run has \[\]"),
        ({"loss_mask": "file"}, "out was imported with mask '', but this run has 'mask.png'"),
    ):
        with pytest.raises(ValueError, match=message):
            sources.open_records(guessed._replace(**changes))
    (out / "card.json").chmod(0o666)
    with pytest.raises(ValueError, match="import the data yourself"):
        sources.open_records(guessed)
    (out / "card.json").chmod(0o644)
    for remove in ((photos / "a.png").unlink, lambda: photos.rename(tmp_path / "moved")):
        remove()
        with pytest.raises(FileNotFoundError, match=r"out is a table of .*photos, but .*a\.png is miss"):
            sources.open_records(guessed)


@pytest.mark.parametrize(
    "content", [b"", b"\xff", b"[" * 10**5, b"[]", b"{}", b'{"version": 2}', b'"a"', b'["version"]']
)
def test_a_damaged_card_of_a_table_is_an_error_and_a_card_of_a_picture_is_none(tmp_path, content):
    draw(tmp_path / "set/card.jpg")
    (tmp_path / "set/card.txt").write_text("a red card")
    open_folder(tmp_path / "set").copy(tmp_path / "out")
    for name in ("set", "out"):
        (tmp_path / name / "card.json").write_bytes(content)
    assert guess.guess(str(tmp_path / "set")) == Data("folder", str(tmp_path / "set"), "txt", uncaptioned="drop")
    with pytest.raises(ValueError, match=r"out/card\.json is damaged: import the data again"):
        guess.guess(str(tmp_path / "out"))


def test_a_table_of_tars_written_elsewhere_is_opened_and_shown(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    draw(tmp_path / "a.png")
    members = {"png": (tmp_path / "a.png").read_bytes(), "txt": b"a cat"}
    (tmp_path / "tars").mkdir()
    tars.write(tmp_path / "tars/0.tar", [{tars.KEY: name, **members} for name in (b"0", b"1")])
    assert run("import", "tars", "--out=out") == 0
    assert "--config.data.source=webdataset --config.data.path=out " in capsys.readouterr().out
    monkeypatch.chdir("/")
    assert run("show", tmp_path / "out", "--row=0.tar/1.png") == 0
    shown = capsys.readouterr().out
    assert f"place          {tmp_path}/tars/0.tar, bytes " in shown
    assert "picture        20 x 16 pixels, PNG, " in shown and "caption        a cat (wei" in shown
