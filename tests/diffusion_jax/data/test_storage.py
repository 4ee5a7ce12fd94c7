"""Local paths and URLs behave equally. memory:// stands in for an object store."""

import json
import os
import tarfile

import fsspec
import pytest
from PIL import Image

from diffusion_jax import files
from diffusion_jax.config.settings import Data
from diffusion_jax.data import decoding, prompts, records, sources, storage, tars
from diffusion_jax.data.inventory import Inventory
from diffusion_jax.files import untrusted
from tests import web_server


@pytest.fixture(params=["local", "memory"])
def root(request, tmp_path):
    if request.param == "local":
        yield str(tmp_path)
        return
    yield f"memory://{tmp_path.name}"
    fsspec.filesystem("memory").store.clear()


def fill(root):
    folder = f"{root}/a" if storage.is_url(root) else root
    for name in ("2.tar", "1.tar", "note.txt"):
        files.write_whole(f"{folder}/{name}", b"0123456789" + name.encode())
    return folder


def test_files_are_listed_and_read_by_byte_ranges(root):
    folder = fill(root)
    assert storage.is_folder(folder) and files.path(f"{folder}/1.tar").exists()
    assert not files.path(f"{folder}/3.tar").exists()
    tars = storage.walk(folder, Inventory())[:2]
    assert [tar.rpartition("/")[2] for tar in tars] == ["1.tar", "2.tar"]
    assert files.path(tars[0]).read_bytes() == b"01234567891.tar"
    parts = storage.read_ranges([*tars, tars[0]], [0, 3, 12], [2, 5, 99])
    assert parts == [b"01", b"34", b"tar"]


def test_stamp_changes_if_the_content_changes(root):
    tar = f"{fill(root)}/1.tar"
    before = storage.stamp(tar)
    assert before == storage.stamp(tar) and before[0] == 15
    files.write_whole(tar, b"9" * 15)
    assert storage.stamp(tar) != before


def test_reading_ranges_of_a_missing_file_is_an_error(root, monkeypatch):
    monkeypatch.setattr(storage.time, "sleep", lambda seconds: None)
    with pytest.raises(OSError, match=r"gone\.tar"):
        storage.read_ranges([f"{root}/gone.tar"], [0], [1])


def test_a_failed_range_is_requested_again(monkeypatch):
    files.write_whole("memory://again/a", b"abc")
    system = fsspec.filesystem("memory")
    ask, requests = system.cat_ranges, []

    def fail_at_first(paths, *arguments, **kw):
        requests.append(list(paths))
        answers = ask(paths, *arguments, **kw)
        return answers if len(requests) > 1 else [OSError("reset"), *answers[1:]]

    monkeypatch.setattr(system, "cat_ranges", fail_at_first)
    assert storage.read_ranges(["memory://again/a"] * 2, [0, 1], [1, 2]) == [b"a", b"b"]
    assert [len(paths) for paths in requests] == [2, 1]


@pytest.fixture
def site(tmp_path, monkeypatch):
    """Return (the folder, the URL) of a web server."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (folder := tmp_path / "site").mkdir()
    with web_server.serving(folder) as host:
        yield folder, f"http://{host}"


def replace(path, content, time):
    path.write_text(content)
    os.utime(path, (time, time))


def test_a_web_server_that_ignores_ranges_is_an_error_and_not_the_start_of_the_file(site, monkeypatch):
    folder, url = site
    replace(folder / "a.tar", "0123456789", 10**9)
    assert storage.read_ranges([f"{url}/a.tar"], [3], [5]) == [b"34"]
    assert files.path(f"{url}/a.tar").read_range(3, 5) == b"34"
    monkeypatch.setattr(web_server.Files, "ranges", False)
    message = r"a\.tar cannot be read in parts, because its server always sends the whole file"
    with pytest.raises(OSError, match=message):
        storage.read_ranges([f"{url}/a.tar"], [3], [5])
    with pytest.raises(OSError, match=message):
        files.path(f"{url}/a.tar").read_range(3, 5)
    assert storage.read_ranges([f"{url}/a.tar"], [0], [10]) == [b"0123456789"]


def test_a_file_on_a_web_server_is_read_again_after_a_change(site):
    folder, url = site
    for name in ("a.tar", "b.tar"):
        replace(folder / name, "old", 10**9)
    before = storage.stamp(f"{url}/a.tar"), storage.stamps([f"{url}/a.tar", f"{url}/b.tar"])
    replace(folder / "prompts.txt", "a cat\n", 10**9)
    assert prompts.read(f"{url}/prompts.txt") == ["a cat"]
    replace(folder / "a.tar", "new", 2 * 10**9)
    replace(folder / "prompts.txt", "a dog\n", 2 * 10**9)
    after = storage.stamp(f"{url}/a.tar"), storage.stamps([f"{url}/a.tar", f"{url}/b.tar"])
    assert before[0] != after[0] and before[1][0] != after[1][0] and before[1][1] == after[1][1]
    assert prompts.read(f"{url}/prompts.txt") == ["a dog"]
    with pytest.raises(FileNotFoundError, match=r"none\.txt"):
        prompts.read(f"{url}/none.txt")


def test_missing_shards_of_a_folder_are_counted(caplog):
    names = [f"a/train-0000{i}-of-00004.tar" for i in (0, 1, 2, 3)]
    other = [f"a/val.array_record-00{i}-of-3" for i in (1, 2, 3)]
    storage.warn_of_missing_shards([*names, *other, "a/1-of-5.tar", "a/plain.tar"])
    assert not caplog.text
    storage.warn_of_missing_shards([*names[:3], *other[1:]])
    assert "only 3 of the 4 files a/train-*-of-* exist" in caplog.text
    assert "only 2 of the 3 files a/val.array_record-*-of-* exist" in caplog.text


def test_an_unknown_url_scheme_is_an_error():
    with pytest.raises(ValueError, match="no reader for nope://"):
        files.path("nope://bucket/a.tar").exists()


@pytest.mark.parametrize("name", ["$RECYCLE.BIN", "$Recycle.Bin", "lost+found", "System Volume Information"])
def test_system_folders_of_windows_and_linux_are_skipped_as_hidden(tmp_path, name):
    for path in (f"data/{name}/1.png", f"data/sub/{name}/1.png", f"data/sub/my {name}/1.png"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(b"")
    inventory = Inventory()
    visible = f"sub/my {name}/1.png"
    assert storage.walk(str(tmp_path / "data"), inventory) == [str(tmp_path / "data" / visible)]
    assert inventory.first == {"hidden": [name, f"sub/{name}"]}
    url = f"memory://{tmp_path.name}/.hidden/data"  # Only paths below the given folder can be hidden.
    for path in (f"{name}/1.png", f"sub/{name}/1.png", visible):
        files.write_whole(f"{url}/{path}", b"")
    inventory = Inventory()
    assert [path.partition("/data/")[2] for path in storage.walk(url, inventory)] == [visible]
    assert inventory.counts == {"hidden": 2}
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        tar.add(tmp_path / "data", "")
    inventory = Inventory()
    assert [m.name for m in tars.members(str(tmp_path / "a.tar"), inventory)] == [visible]
    assert sorted(inventory.first["hidden"]) == sorted([f"{name}/1.png", f"sub/{name}/1.png"])


def test_a_folder_to_which_access_is_denied_is_an_error_and_not_a_file(monkeypatch):
    def denied(path):
        raise PermissionError("403 Forbidden")

    monkeypatch.setattr(fsspec.filesystem("memory"), "info", denied)
    with pytest.raises(OSError, match="memory://bucket/data: 403 Forbidden: check that the creden"):
        storage.is_folder("memory://bucket/data")


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("webdataset", "a.tar"),
        ("arrayrecord", "a.array_record"),
        ("huggingface", "a.parquet"),
        ("arrow", "a.arrow"),
        ("folder", "a.csv"),
    ],
)
def test_a_pointer_of_git_lfs_is_an_error_that_names_the_command(tmp_path, source, name):
    (tmp_path / name).write_bytes(untrusted.POINTER + b"v1\noid sha256:0\nsize 5\n")
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))
    Image.new("RGB", (8, 8)).save(tmp_path / "1.png")
    path = str(tmp_path if source in ("arrow", "folder") else tmp_path / name)
    with pytest.raises(ValueError, match=f"{name} is a pointer of Git LFS, not .*: run git lfs pull"):
        sources.open_records(Data(source, path, "csv:text" if source == "folder" else "txt"))


def test_pointers_of_git_lfs_are_unusable_as_pictures_and_texts():
    pointer = untrusted.POINTER + b"v1\n"
    with pytest.raises(decoding.Unusable, match=r"broken_image: it is a pointer .*: run git lfs pull"):
        decoding.crop(pointer, (8, 8))
    for text in ("txt", "json:x", "npy"):
        error = records.read_text(pointer, text)
        assert error.reason == "broken_text" and "run git lfs pull" in str(error)
