"""Tars as lists of records: what is found, what is kept, and what is damaged."""

import functools
import http.server
import io
import os
import pathlib
import pickle
import re
import tarfile
import threading

import fsspec
import numpy as np
import pytest

from diffusion_jax.data import listing, storage, tars
from diffusion_jax.data.sources import webdataset
from diffusion_jax.data.sources.webdataset import WebDataset
from diffusion_jax.data.transforms import Unusable
from diffusion_jax.examples.digits import pictures as digits


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Keeps indices of unwritable folders out of the user's own cache."""
    monkeypatch.setattr(tars, "cache_folders", lambda: [tmp_path / "cache"])
    return tmp_path / "cache"


def write_tar(path, members, format=tarfile.PAX_FORMAT):
    path.parent.mkdir(exist_ok=True)
    with tarfile.open(path, "w", format=format) as tar:
        for name, contents in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(contents)
            tar.addfile(info, io.BytesIO(contents))
    return path


def records_of(records):
    return [(r.image, r.text) for r in records.read(range(len(records)))]


@pytest.mark.parametrize("format", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
def test_members_of_one_stem_are_a_record(tmp_path, format):
    long = "x" * (120 if format != tarfile.USTAR_FORMAT else 80)
    tar = write_tar(
        tmp_path / "a.tar",
        {
            "b/1.jpg": b"first", "b/1.json": b"{}", "b/1.txt": b"one\n",
            "c/1.png": b"second", "c/1.txt": b"two",
            f"{long}.txt": b"three", f"{long}.webp": b"third",
            "b/._1.jpg": b"a fork of macOS", "only.txt": b"no image",
        },
        format,
    )  # fmt: skip
    records = WebDataset(tar)
    assert records_of(records) == [(b"first", "one"), (b"second", "two"), (b"third", "three")]
    assert records.read([1])[0].name == f"{tar}/c/1.png"
    assert records.left_out() == {}


def test_embeddings_are_members_too(tmp_path):
    arrays = io.BytesIO()
    np.savez(arrays, **{"embeddings_t5_xxl/encodings": np.eye(3, 5, dtype=np.float16)})
    members = {"1.jpg": b"", "1.txt": b"caption", "1.npz": arrays.getvalue()}
    tar = write_tar(tmp_path / "a.tar", members)
    np.testing.assert_array_equal(WebDataset(tar, text="npz").read([0])[0].text, np.eye(3, 5))
    assert WebDataset(tar).read([0])[0].text == "caption"


def test_one_tar_a_folder_and_a_pattern_give_the_same_records(tmp_path):
    for i in range(3):
        write_tar(tmp_path / f"s/shard-{i:02}.tar", {f"{i}.jpg": b"%d" % i, f"{i}.txt": b"t"})
    whole = [(b"0", "t"), (b"1", "t"), (b"2", "t")]
    assert records_of(WebDataset(tmp_path / "s")) == whole
    assert records_of(WebDataset(f"{tmp_path}/s/shard-{{00..02}}.tar")) == whole
    assert records_of(WebDataset(f"{tmp_path}/s/shard-0{{2,0}}.tar")) == [whole[2], whole[0]]
    assert records_of(WebDataset(tmp_path / "s/shard-01.tar")) == whole[1:2]


def test_braces_expand_as_in_a_shell():
    assert tars.expand("a.tar") == ["a.tar"]
    assert tars.expand("s-{08..11}.tar") == ["s-08.tar", "s-09.tar", "s-10.tar", "s-11.tar"]
    assert tars.expand("{a,b}/{0..1}") == ["a/0", "a/1", "b/0", "b/1"]


def test_the_index_is_kept_and_used_until_the_tar_changes(tmp_path, monkeypatch):
    tar = write_tar(tmp_path / "a.tar", {"1.jpg": b"old", "1.txt": b"t"})
    assert records_of(WebDataset(tar)) == [(b"old", "t")]
    scans = []
    scan = tars.scan
    monkeypatch.setattr(tars, "scan", lambda path: scans.append(path) or scan(path))
    assert records_of(WebDataset(tar)) == [(b"old", "t")]
    assert scans == []

    write_tar(tar, {"1.txt": b"t", "1.jpg": b"new"})  # Other places, the same size.
    os.utime(tar, ns=(1, 1))
    assert records_of(WebDataset(tar)) == [(b"new", "t")]
    assert scans == [str(tar)]


def test_a_damaged_index_is_made_anew(tmp_path):
    tar = write_tar(tmp_path / "a.tar", {"1.jpg": b"x", "1.txt": b"t"})
    WebDataset(tar)
    index = tmp_path / "a.tar.index.npz"
    (listed,) = tmp_path.glob("records-*.index")
    whole = listed.read_bytes()
    for damaged in (b"", b"no zip", index.read_bytes()[:200]):
        index.write_bytes(damaged)
        listed.write_bytes(whole[: len(damaged) // 2])
        assert records_of(WebDataset(tar)) == [(b"x", "t")]
        assert len(index.read_bytes()) > 200 and listed.read_bytes() == whole


def test_the_index_of_a_read_only_folder_goes_to_the_cache(tmp_path, monkeypatch, cache):
    tar = write_tar(tmp_path / "s/a.tar", {"1.jpg": b"x", "1.txt": b"t"})
    write = storage.write_whole

    def refuse_beside_the_tar(path, content):
        if os.path.dirname(path) == str(tar.parent):
            raise PermissionError(path)
        write(path, content)

    may = listing._is_writable
    monkeypatch.setattr(storage, "write_whole", refuse_beside_the_tar)
    monkeypatch.setattr(listing, "_is_writable", lambda at: at != tar.parent and may(at))
    WebDataset(tar)
    assert os.listdir(tar.parent) == ["a.tar"]
    assert {path.suffix for path in cache.iterdir()} == {".npz", ".index"}
    monkeypatch.setattr(tars, "scan", None)  # Must not be called again,
    assert records_of(WebDataset(tar)) == [(b"x", "t")]
    next(cache.glob("*.index")).unlink()  # nor without the listing.
    assert records_of(WebDataset(tar)) == [(b"x", "t")]


def test_whole_records_of_a_truncated_tar_are_used_and_it_is_counted(tmp_path):
    members = {f"{i}.{s}": b"x" * 600 for i in range(3) for s in ("txt", "jpg")}
    tar = write_tar(tmp_path / "a.tar", members)
    tar.write_bytes(tar.read_bytes()[: 5 * 1536 + 700])  # In the last image: 512 + 600 + padding.
    records = WebDataset(tar)
    assert len(records) == 2
    assert records.left_out() == {"truncated_tar": 1}
    assert WebDataset(tar).left_out() == {"truncated_tar": 1}  # Also from the index.


def test_images_without_captions_are_named_or_dropped(tmp_path):
    tar = write_tar(
        tmp_path / "a.tar", {"1.jpg": b"x", "1.pickle": b"", "2.jpg": b"y", "2.txt": b""}
    )
    with pytest.raises(ValueError, match=r"1 of 2 images have .*a\.tar/1\.jpg.*jpg, pickle, txt"):
        WebDataset(tar)
    records = WebDataset(tar, uncaptioned="drop")
    assert records_of(records) == [(b"y", "")]
    assert records.left_out() == {"no_caption": 1}
    with pytest.raises(ValueError, match="'pickle' are pickles, which can run arbitrary code"):
        WebDataset(tar, text="pickle")


def test_what_is_no_tar_says_so(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w:gz"):
        pass
    with pytest.raises(ValueError, match=r"cannot read .*a\.tar as a tar \(.*\): decompress it if"):
        WebDataset(tmp_path / "a.tar")
    empty = write_tar(tmp_path / "e/b.tar", {"1.txt": b"no image"})
    with pytest.raises(ValueError, match=r"no images in .*b.tar: .* and found txt"):
        WebDataset(empty)
    (tmp_path / "d").mkdir()
    with pytest.raises(
        ValueError, match=r"no .tar files in .*, or read image files with data\.source=folder"
    ):
        WebDataset(tmp_path / "d")


def test_missing_tars_come_with_the_command_that_makes_one(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"s/1.tar, .*s/2.tar, .*s/3.tar and 1 more"):
        WebDataset(f"{tmp_path}/s/{{1..4}}.tar")
    with pytest.raises(FileNotFoundError) as error:
        WebDataset(tmp_path / "a.tar")
    digits.main(str(error.value).split("diffusion_jax.data.digits ")[1].split())
    assert len(WebDataset(tmp_path / "a.tar")) == 100


@pytest.fixture
def bucket(tmp_path):
    """A folder of an object store with two tars of two records each."""
    for i in range(2):
        members = {f"{i}{j}.{s}": b"%d%d %s" % (i, j, s.encode()) * 9
                   for j in range(2) for s in ("jpg", "txt")}  # fmt: skip
        tar = write_tar(tmp_path / f"local/s-{i}.tar", members)
        storage.write_whole(f"memory://bucket/s-{i}.tar", tar.read_bytes())
    yield "memory://bucket"
    fsspec.filesystem("memory").store.clear()


@pytest.mark.parametrize("path", ["", "/s-{0..1}.tar", "/s-{0,1}.tar"])
def test_tars_in_an_object_store_are_read_as_local_ones(tmp_path, bucket, path):
    assert records_of(WebDataset(bucket + path)) == records_of(WebDataset(tmp_path / "local"))


def test_a_store_is_asked_for_ranges_once_it_has_an_index(bucket, monkeypatch):
    WebDataset(bucket)
    assert storage.find(bucket, ".npz") == [
        f"memory:///bucket/s-{i}.tar.index.npz" for i in range(2)]  # fmt: skip
    system = fsspec.filesystem("memory")
    monkeypatch.setattr(tars, "scan", None)  # What reads a tar from its beginning.
    asked = []
    ranges = system.cat_ranges

    def record(paths, firsts, lasts, **kw):
        asked.append(sum(lasts) - sum(firsts))
        return ranges(paths, firsts, lasts, **kw)

    monkeypatch.setattr(system, "cat_ranges", record)
    records = WebDataset(bucket)
    assert [record.text for record in records.read([3, 0])] == ["11 txt" * 9, "00 txt" * 9]
    assert asked == [2 * (512 + 512 + 512 + 54)]  # Header, image, header, text.


class Ranges(http.server.SimpleHTTPRequestHandler):
    """A web server of files that answers "Range: bytes=first-last", as stores do."""

    def log_message(self, *_):
        pass

    def do_GET(self):
        path = pathlib.Path(self.translate_path(self.path))
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if asked is None or not path.exists():
            return super().do_GET()
        first, last = int(asked[1]), min(int(asked[2]), path.stat().st_size - 1)
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {first}-{last}/{path.stat().st_size}")
        self.send_header("Content-Length", str(last + 1 - first))
        self.end_headers()
        self.wfile.write(path.read_bytes()[first : last + 1])


def test_a_web_server_gives_ranges_too(tmp_path, bucket):
    pytest.importorskip("aiohttp")
    handler = functools.partial(Ranges, directory=tmp_path / "local")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}/s-{{0..1}}.tar"
        try:
            assert records_of(WebDataset(url)) == records_of(WebDataset(tmp_path / "local"))
        finally:
            server.shutdown()
            thread.join()


def test_distant_members_are_read_apart(tmp_path):
    members = {"1.txt": b"one", "1.bin": bytes(webdataset._GAP), "1.jpg": b"first"}
    tar = write_tar(tmp_path / "a.tar", members)
    (record,) = WebDataset(tar).read([0])
    assert record == (b"first", "one", f"{tar}/1.jpg")


def test_nemos_lists_of_tars_lie_beside_them(tmp_path, bucket):
    info = {"tar_files": ["s-1.tar", "s-0.tar"], "total_key_count": 4, "chunk_size": 2}
    listed = tmp_path / "local/wdinfo.pkl"
    listed.write_bytes(pickle.dumps(info))
    whole = records_of(WebDataset(tmp_path / "local"))
    assert records_of(WebDataset(listed)) == whole[2:] + whole[:2]
    storage.write_whole(f"{bucket}/wdinfo.pkl", listed.read_bytes())
    assert records_of(WebDataset(f"{bucket}/wdinfo.pkl")) == whole[2:] + whole[:2]
    several = f"{tmp_path}/local/{{wdinfo.pkl,s-0.tar}}"
    assert records_of(WebDataset(several)) == whole[2:] + whole[:2] + whole[:2]
    listed.write_bytes(pickle.dumps(info | {"tar_files": ["gone.tar"]}))
    with pytest.raises(FileNotFoundError, match=r"no data at .*local/gone\.tar: check"):
        WebDataset(listed)


def test_a_list_of_tars_that_would_run_code_is_refused(tmp_path):
    class Harm:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "harm"),))

    (tmp_path / "wdinfo.pkl").write_bytes(pickle.dumps({"tar_files": [Harm()]}))
    with pytest.raises(ValueError, match=r"cannot read .*wdinfo.pkl.*refers to \w+\.mkdir"):
        WebDataset(tmp_path / "wdinfo.pkl")
    assert not (tmp_path / "harm").exists()


def test_captions_in_json_members(tmp_path):
    members = {"1.webp": b"x", "1.json": b'{"caption": "one", "width": 3}', "2.jpg": b"y",
               "2.json": b'{"caption": null}', "3.jpg": b"z", "3.json": b"{"}  # fmt: skip
    records = WebDataset(write_tar(tmp_path / "a.tar", members), text="json:caption")
    texts = records.texts([0, 1, 2])
    assert texts[0] == "one"
    assert [t.reason for t in texts if isinstance(t, Unusable)] == ["no_caption", "broken_text"]


def test_tars_that_cannot_be_read_are_left_out_up_to_a_share(tmp_path):
    for i in range(4):
        write_tar(tmp_path / f"s/{i}.tar", {f"{i}.jpg": b"%d" % i, f"{i}.txt": b"t"})
    (tmp_path / "s/2.tar").write_bytes(b"no tar" * 999)
    with pytest.raises(
        ValueError, match=r"1 of 4 tars cannot be read, .* 0\.2: .* cannot read .*2\.tar as a tar"
    ):
        WebDataset(tmp_path / "s", max_broken=0.2)
    records = WebDataset(tmp_path / "s", max_broken=0.25)
    assert records_of(records) == [(b"0", "t"), (b"1", "t"), (b"3", "t")]
    assert records.left_out() == {"broken_tar": 1}


def test_damaged_embeddings_are_unusable_and_the_rest_is_read(tmp_path):
    array = io.BytesIO()
    np.save(array, np.eye(2))
    members = {"1.jpg": b"", "1.npy": array.getvalue(), "2.jpg": b"", "2.npy": b"damaged"}
    texts = WebDataset(write_tar(tmp_path / "a.tar", members), text="npy").texts([0, 1])
    np.testing.assert_array_equal(texts[0], np.eye(2))
    assert isinstance(texts[1], Unusable) and texts[1].reason == "broken_text"
