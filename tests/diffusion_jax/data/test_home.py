"""Homes of tables: where they live, when data are imported again, and what a kill leaves."""

import contextlib
import errno
import json
import os
import pathlib
import random
import shutil
import subprocess
import sys

import pytest

from diffusion_jax import files
from diffusion_jax.config.settings import Data
from diffusion_jax.data import fingerprints, home, sources, storage, table, tars
from diffusion_jax.data.mixture import Mixture
from diffusion_jax.data.sources.folder import open_folder
from diffusion_jax.examples.digits import rendering as digits


@pytest.fixture
def folder(tmp_path):
    return digits.write_examples(tmp_path / "data", 6, size=8)


@pytest.fixture(autouse=True)
def caches(tmp_path, monkeypatch):
    """The folders for tables that are not beside the data."""
    monkeypatch.setattr(tars, "cache_folders", lambda: [tmp_path / "cache"])
    return tmp_path / "cache"


@pytest.fixture
def imports(monkeypatch):
    """A list that gets the folder of each import."""
    written, write = [], table.write

    def counted(place, *arguments, **options):
        written.append(place)
        write(place, *arguments, **options)

    monkeypatch.setattr(table, "write", counted)
    return written


def home_of(folder):
    (place,) = (folder / storage.OWN).iterdir()
    return place


def texts(opened):
    return opened.texts(range(len(opened)))


def test_a_folder_is_imported_once(folder, imports):
    before = {path: path.read_bytes() for path in folder.iterdir()}
    first, second = open_folder(folder), open_folder(folder)
    assert imports == [home_of(folder)] and texts(first) == texts(second)
    captions = [path.read_text().strip() for path in sorted(folder.glob("*.txt"))]
    assert texts(first) == captions and second.left_out() == {}
    assert {path: path.read_bytes() for path in folder.iterdir() if path.is_file()} == before
    for uncaptioned in ("drop", "empty"):
        open_folder(folder, uncaptioned=uncaptioned)
    assert len(imports) == 1  # The rows do not depend on this setting.
    open_folder(folder, "txt:lines")
    assert len(imports) == 2 and len(list((folder / storage.OWN).iterdir())) == 2


def rewrite(folder, text="another caption"):
    (folder / "00001.txt").write_text(text)


CHANGES = {
    "a caption is edited": (rewrite, True),
    "a caption of the same size": (lambda f: rewrite(f, "x" * (f / "00001.txt").stat().st_size), True),
    "a caption is removed": (lambda f: (f / "00001.txt").unlink(), True),
    "a picture is added": (lambda f: [shutil.copy(f / f"00001.{s}", f / f"9.{s}") for s in ("png", "txt")], True),
    "a picture is renamed": (lambda f: (f / "00001.png").rename(f / "00001.PNG"), True),
    "a file is touched": (lambda f: (f / "00001.txt").touch(), False),
    "a note is added": (lambda f: (f / "note.md").write_text("x"), False),
    "a hidden file is added": (lambda f: (f / ".hidden").write_text("x"), False),
}


@pytest.mark.parametrize(("change", "other_rows"), CHANGES.values(), ids=CHANGES)
def test_data_that_changed_are_imported_again(folder, imports, change, other_rows):
    before = open_folder(folder, uncaptioned="drop")
    earlier = texts(before)
    change(folder)
    after = open_folder(folder, uncaptioned="drop")
    assert len(imports) == 2 and (after.id() != before.id()) == other_rows
    names = after.names(range(len(after)))
    assert texts(after) == [(folder / name).with_suffix(".txt").read_text().strip() for name in names]
    assert texts(before) == earlier  # A process that has opened the table keeps it.
    open_folder(folder, uncaptioned="drop")
    assert len(imports) == 2


def opened(path):
    return sources.open_pictures(Data("folder", path=str(path)), 8)


def test_copies_and_touched_files_have_equal_digests(folder, tmp_path, imports, monkeypatch):
    digest, stamp = fingerprints.digests(opened(folder)), fingerprints.stamp(opened(folder))
    kept = shutil.copytree(folder, tmp_path / "kept")  # With the times of the files.
    assert fingerprints.digests(opened(kept)) == digest and len(imports) == 1
    assert opened(kept).files()[0] == str(kept / "00000.png")
    monkeypatch.chdir(tmp_path)
    assert fingerprints.digests(opened("kept")) == digest and len(imports) == 1
    assert open_folder("kept").read([0])[0].image == (folder / "00000.png").read_bytes()
    new = shutil.copytree(folder, tmp_path / "new", copy_function=shutil.copyfile)
    assert fingerprints.digests(opened(new)) == digest and len(imports) == 2
    for path in folder.glob("*.*"):
        path.touch()
    assert fingerprints.digests(opened(folder)) == digest
    assert fingerprints.stamp(opened(folder)) != stamp  # Files were written.
    stamp = fingerprints.stamp(opened(folder))
    assert fingerprints.stamp(opened(folder)) == stamp
    rewrite(folder)
    edited = opened(folder)
    assert fingerprints.digests(edited) != digest and fingerprints.stamp(edited) != stamp
    mixed = lambda: Mixture([opened(folder), opened(kept)], (1, 1))
    before = fingerprints.digests(mixed())
    (kept / "00005.txt").write_text("x" * len((kept / "00005.txt").read_text()))
    changed = {n for n, value in fingerprints.digests(mixed()).items() if before[n] != value}
    assert changed == {"the digest of the texts and of the files' sizes"}


def test_a_damaged_file_of_a_table_is_written_again(folder, imports):
    expected = texts(open_folder(folder))
    for path in sorted(home_of(folder).glob("*.*")):
        content = path.read_bytes()
        for damage in (b"", os.urandom(len(content)), content[:-1], content[:-9] + b"\0" + content[-8:]):
            path.write_bytes(damage)
            assert texts(open_folder(folder)) == expected
        path.unlink()
        assert texts(open_folder(folder)) == expected
    for card in (b"[]", b"{}", b"[" * 9999, b'{"version": 2, "parts": 3}', b"\xff"):
        (home_of(folder) / table.CARD).write_bytes(card)
        assert texts(open_folder(folder)) == expected
    num = len(imports)
    assert texts(open_folder(folder)) == expected and len(imports) == num


def test_only_files_of_tables_are_deleted(folder):
    open_folder(folder)
    others = [home_of(folder) / name for name in ("data-00000.arrow", "x.tmp", "note.txt")]
    for path in others:
        path.touch()
    for number in range(5):
        (folder / "00001.txt").write_text(f"text {number}")
        open_folder(folder)
    assert all(path.exists() for path in others)
    assert len([*home_of(folder).glob("card-*.json")]) == 3


def test_the_newest_table_is_kept_if_the_clock_was_set_back(folder, imports):
    for number in range(4):
        (folder / "00001.txt").write_text(f"text {number}")
        open_folder(folder)
        for card in home_of(folder).glob("card-*.json"):
            os.utime(card, (2**32, 2**32))
    assert texts(open_folder(folder))[1] == "text 3" and len(imports) == 4


def refuse_to_write(monkeypatch, *closed):
    """Raise an error for each folder or file that is made in one of the folders `closed`."""
    is_closed = lambda path: any(str(path).startswith(f"{folder}/") for folder in closed)
    mkdir, temporary = pathlib.Path.mkdir, home.tempfile.TemporaryFile

    def refused(path, *arguments, **options):
        if is_closed(path):
            raise PermissionError(13, "Permission denied", str(path))
        mkdir(path, *arguments, **options)

    def no_file(dir):
        if is_closed(dir):
            raise OSError(30, "Read-only file system", str(dir))
        return temporary(dir=dir)

    monkeypatch.setattr(pathlib.Path, "mkdir", refused)
    monkeypatch.setattr(home.tempfile, "TemporaryFile", no_file)


def test_the_table_of_a_read_only_folder_lives_in_the_cache(folder, tmp_path, caches, imports, monkeypatch):
    expected = [path.read_text().strip() for path in sorted(folder.glob("*.txt"))]
    refuse_to_write(monkeypatch, folder)
    assert texts(open_folder(folder)) == texts(open_folder(folder)) == expected
    (place,) = caches.iterdir()
    assert imports == [place] and not (folder / storage.OWN).exists()
    assert place.stat().st_mode & 0o777 == caches.stat().st_mode & 0o777 == 0o700
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(folder)
    assert texts(open_folder("data")) == texts(open_folder("link")) == expected
    assert imports == [place]  # These are names of the same folder.
    rewrite(folder)
    assert texts(open_folder(folder))[1] == "another caption"


def test_without_any_writable_folder_the_table_stays_in_memory(folder, caches, monkeypatch):
    expected = [path.read_text().strip() for path in sorted(folder.glob("*.txt"))]
    refuse_to_write(monkeypatch, folder, caches.parent)
    opened = open_folder(folder)
    assert texts(opened) == expected and not caches.exists()
    assert not (folder / storage.OWN).exists() and opened.files()[0] == str(folder / "00000.png")


def test_a_full_disk_is_left_for_the_cache_and_then_for_the_memory(folder, caches, imports, monkeypatch, caplog):
    (folder / "00001.json").write_text('{"long": "x"}')
    (folder / ".hidden").touch()
    write, full = files.write_whole, [folder]

    def refused(path, content):
        if any(path.is_relative_to(place) for place in full) and "card" in path.name:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        write(path, content)

    monkeypatch.setattr(files, "write_whole", refused)
    for number in (1, 2):
        opened = open_folder(folder, "txt,json:long")
        assert opened.left_out() == {"hidden": 1} and len(opened.texts([1])[0].texts) == 2
        assert caplog.text.count("pictures have no json:long") == number
        if number == 1:
            assert opened.home == imports[1] and imports[1].is_relative_to(caches)
            shutil.rmtree(caches)
            full.append(caches)
    assert opened.home is None and len(imports) == 5 and imports[4].keys() >= {table.CARD}


@pytest.mark.parametrize("foreign", ["owner", "writable by all"])
def test_the_table_of_another_user_is_not_used(folder, imports, monkeypatch, foreign):
    open_folder(folder)
    place = home_of(folder)
    forged = "a forged caption"
    written = digits.write_examples(folder.parent / "forged", 6, size=8)
    for path in written.glob("*.txt"):
        path.write_text(forged)
    opened = open_folder(written)
    card = json.loads((home_of(written) / table.CARD).read_bytes())
    seen = json.loads((place / table.CARD).read_bytes())["seen"]
    card |= {"seen": seen}
    del card["check"]
    shutil.copytree(home_of(written), place, dirs_exist_ok=True)
    (place / table.CARD).write_text(json.dumps(card | {"check": table._check(card)}))
    assert texts(open_folder(folder)) == texts(opened) == [forged] * 6  # It is valid.
    if foreign == "owner":
        if os.geteuid():
            pytest.skip("only root can give files away")
        os.chown(place / table.CARD, 4321, 4321)
    else:
        (place / table.CARD).chmod(0o666)
    assert forged not in texts(open_folder(folder))


def test_a_warning_about_missing_texts_is_logged_at_every_opening(folder, caplog):
    (folder / "00001.json").write_text('{"long": "x"}')
    for number in (1, 2):
        open_folder(folder, "txt,json:long")
        message = "5 of 6 pictures have no json:long, only other texts; the first: 00000.png"
        assert caplog.text.count(message) == number


START = """
import os, signal, sys, time
from diffusion_jax.data import table
from diffusion_jax.data.sources.folder import open_folder
table.PART = 5
print("ready", flush=True)
"""
IMPORT = f"""{START}
sys.stdin.readline()
opened = open_folder(sys.argv[1])
print(opened.id(), opened.texts(range(len(opened)))[-1])
"""
KILL = f"""{START}
begin = time.monotonic()
open_folder(sys.argv[1])
whole = time.monotonic() - begin
print("imported", flush=True)
for share in map(float, sys.stdin):
    child = os.fork()
    if not child:
        open_folder(sys.argv[1])
        os._exit(0)
    time.sleep(share * whole)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    print("killed", flush=True)
"""


@contextlib.contextmanager
def started(script, folder):
    """Start a process that waits for lines; yield a function that sends one, and the process."""
    command = [sys.executable, "-c", script, str(folder)]
    with subprocess.Popen(command, 0, stdin=-1, stdout=-1) as process:

        def send(line):
            assert process.stdin is not None
            process.stdin.write(f"{line}\n".encode())

        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        yield send, process.stdout


@pytest.mark.slow
def test_two_processes_import_a_folder_at_once(folder):
    with started(IMPORT, folder) as (send, one), started(IMPORT, folder) as (send_other, other):
        send("")
        send_other("")
        printed, also = one.read(), other.read()
    assert printed == also and b" on " in printed
    assert len(list(home_of(folder).glob("*.rows.arrow"))) == 2


@pytest.mark.slow
@pytest.mark.gate
def test_a_killed_import_leaves_the_old_or_the_new_table(tmp_path, monkeypatch):
    monkeypatch.setattr(table, "PART", 5)
    folder = digits.write_examples(tmp_path / "data", 40, size=8)
    captions = sorted(folder.glob("*.txt"))
    new = [path.read_text().strip() for path in captions]
    rng, outcomes = random.Random(0), []
    with started(KILL, folder) as (send, output):
        assert output.readline() == b"imported\n"
        for number in range(40):
            old, new = new, [f"{path.stem} in round {number}" for path in captions]
            for path, text in zip(captions, new, strict=True):
                path.write_text(text)
            send(rng.uniform(0, 0.6))  # A part of the time of a whole import.
            assert output.readline() == b"killed\n"
            left = table.Table(home_of(folder), str(folder))
            assert texts(left) in (old, new)
            outcomes.append(texts(left) == new)
            assert texts(open_folder(folder)) == new  # The next import finishes.
            assert not [*home_of(folder).glob(".*.arrow.*.tmp")]
    assert not all(outcomes)
