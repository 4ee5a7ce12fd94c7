"""What a run reads when its data set has changed since the run began."""

import json
import os
import pathlib
import shutil

import pytest

from diffusion_jax import files
from diffusion_jax.data import home
from diffusion_jax.data.sources.folder import open_folder
from diffusion_jax.data.table import files_of


def write(folder: pathlib.Path, name: str, caption: str) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.png").write_bytes(name.encode())
    (folder / f"{name}.txt").write_text(caption)


@pytest.fixture
def folder(tmp_path):
    for name in ("b", "d", "e"):
        write(tmp_path / "data", name, f"text of {name}")
    return tmp_path / "data"


def names_of_run(folder: pathlib.Path, begun: bool = True) -> list[str]:
    """Open the data as a run in RUN does, and return the names of its pictures."""
    workdir = folder.parent / "run"
    workdir.mkdir(exist_ok=True)
    with home.tables_of(workdir, begun) as tables:
        table = open_folder(folder, uncaptioned="drop")
    tables.write()
    return table.names(range(len(table)))


def test_a_run_goes_on_with_its_own_pictures_when_others_come_and_says_how_many(folder, caplog):
    caplog.set_level("INFO")
    assert names_of_run(folder, begun=False) == ["b.png", "d.png", "e.png"]
    for name in "acfgh":
        write(folder, name, "new")
        assert names_of_run(folder) == ["b.png", "d.png", "e.png"]
    assert "5 pictures came to" in caplog.text and "goes on with its 3" in caplog.text
    assert len(open_folder(folder)) == 8


def test_a_run_goes_on_with_its_own_pictures_when_others_get_captions(folder, caplog):
    caplog.set_level("INFO")
    (folder / "d.txt").unlink()
    assert names_of_run(folder, begun=False) == ["b.png", "e.png"]
    write(folder, "d", "new")
    assert names_of_run(folder) == ["b.png", "e.png"] and "1 picture came to" in caplog.text
    assert len(open_folder(folder)) == 3


def test_a_run_that_has_not_begun_reads_all_pictures(folder):
    names_of_run(folder, begun=False)
    write(folder, "a", "new")
    assert names_of_run(folder, begun=False) == ["a.png", "b.png", "d.png", "e.png"]
    assert names_of_run(folder) == ["a.png", "b.png", "d.png", "e.png"]


def test_a_missing_picture_of_a_run_is_an_error_with_its_name(folder):
    names_of_run(folder, begun=False)
    write(folder, "a", "new")
    (folder / "d.png").unlink()
    with pytest.raises(ValueError, match=r"3 pictures .* of which 1 no .* as .*/d\.png\. Rest"):
        names_of_run(folder)


def test_an_edited_caption_is_read_anew(folder):
    names_of_run(folder, begun=False)
    (folder / "b.txt").write_text("another text")
    assert names_of_run(folder) == ["b.png", "d.png", "e.png"]
    with home.tables_of(folder.parent / "run"):
        assert open_folder(folder).texts([0]) == ["another text"]


def test_touched_files_and_later_notes_change_nothing(folder):
    names_of_run(folder, begun=False)
    before = (folder.parent / "run" / home.RUN).read_text()
    os.utime(folder / "b.png", (1, 1))
    (folder / "note.md").write_text("a note")
    assert names_of_run(folder) == ["b.png", "d.png", "e.png"]
    os.remove(folder / "note.md")
    assert names_of_run(folder) and (folder.parent / "run" / home.RUN).read_text() == before


def test_the_parts_of_a_mixture_have_tables_of_their_own(folder):
    other = folder.parent / "other"
    write(other, "x", "text of x")
    workdir = folder.parent / "run"
    workdir.mkdir()
    with home.tables_of(workdir, begun=False) as tables:
        first = [open_folder(folder).id(), open_folder(other).id()]
    tables.write()
    write(other, "y", "new")
    with home.tables_of(workdir):
        assert [open_folder(folder).id(), open_folder(other).id()] == first


def test_the_table_of_a_run_is_kept_as_long_as_its_workdir(folder):
    names_of_run(folder, begun=False)
    for number in range(5):
        write(folder, f"f{number}", "new")
        home_of_data = files.path(open_folder(folder).home)
    assert names_of_run(folder) == ["b.png", "d.png", "e.png"]
    assert len(list(home_of_data.glob("card-*.json"))) == 4
    (folder.parent / "run").rename(folder.parent / "moved")
    for turn in range(2):
        with home.tables_of(folder.parent / "moved") as tables:
            assert len(open_folder(folder)) == 3
        tables.write()
        for number in range(4):
            write(folder, f"f{number}", f"edited, {turn}")
            open_folder(folder)
    assert len(list(home_of_data.glob("run-*"))) == 1
    shutil.rmtree(folder.parent / "moved")
    write(folder, "g", "new")
    open_folder(folder)
    assert len(list(home_of_data.glob("card-*.json"))) == 3 and not list(home_of_data.glob("run-*"))


def test_a_file_that_is_no_run_s_keeps_no_table(folder):
    table, other = open_folder(folder), folder.parent / "other.json"
    other.write_text(json.dumps({"x": [table.id()]}))
    (files.path(table.home) / "run-0.json").write_text(json.dumps([str(other), table.id()]))
    for number in range(3):
        write(folder, f"f{number}", "new")
        open_folder(folder)
    assert len(list(files.path(table.home).glob("card-*.json"))) == 3 and other.exists()


def test_only_the_last_tables_are_kept_with_their_files(folder):
    for number in range(5):
        write(folder, f"f{number}", "new")
        table = open_folder(folder)
    place = files.path(table.home)
    assert len(list(place.glob("card-*.json"))) == 3
    cards = [json.loads(path.read_text()) for path in place.glob("card-*.json")]
    kept = {name for card in cards for name in files_of(card)}
    assert {path.name for path in place.glob("*.arrow")} == kept
    assert table.read([3])[0].text == "new"
