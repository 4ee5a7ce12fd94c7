"""Downloads from a local server: complete, with the right hash, and resumed after a kill."""

import hashlib
import http.server
import pathlib
import threading

import numpy as np
import pytest

from diffusion_jax import files
from diffusion_jax.data.prepare import __main__ as prepare
from diffusion_jax.data.prepare import fetch
from tests.diffusion_jax.data import calls

CONTENT = np.random.default_rng(0).bytes(3 * 2**20 + 17)
HALF = len(CONTENT) // 2
TAG = '"v0"'


class Handler(http.server.BaseHTTPRequestHandler):
    """Serve the content at all paths but /gone. /whole has no ranges, /breaks stops halfway once.

    Like a server that does not know If-Range, it sends ranges of any version.
    """

    def do_GET(self):
        start = int((self.headers.get("Range") or "bytes=0-")[len("bytes=") : -1])
        self.server.starts.append((self.path, start))
        if self.path == "/gone":
            return self.send_error(404)
        if "whole" in self.path:
            start = 0
        if start >= len(CONTENT):
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(CONTENT)}")
            self.send_header("Content-Length", "0")
            return self.end_headers()
        content = self.server.content
        self.send_response(206 if start else 200)
        for name, value in self.server.marks.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content) - start))
        if start:
            sent = start + self.server.shift
            self.send_header("Content-Range", f"bytes {sent}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        breaks = self.path == "/breaks" and len(self.server.starts) == 1
        self.wfile.write(content[start : len(content) // 2 if breaks else None])
        if breaks:
            self.server.after_the_break()

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.starts, server.content, server.marks, server.shift = [], CONTENT, {"ETag": TAG}, 0
        server.after_the_break = lambda: None
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        server.url = f"http://127.0.0.1:{server.server_port}"
        yield server
        server.shutdown()
        thread.join()


SHA512 = hashlib.sha512(CONTENT).hexdigest()


def write_part(folder, name, content):
    (folder / f".{name}.part").write_bytes(content)
    (folder / f".{name}.version").write_text(TAG)


def test_files_are_downloaded_completely_and_only_once(server, tmp_path):
    urls = fetch.expand([f"{server.url}/part-{{0..2}}.bin"])
    sums = dict.fromkeys(("part-0.bin", "part-1.bin"), SHA512)
    for _ in range(2):
        paths = fetch.fetch(urls, tmp_path, sums)
    assert [path.read_bytes() == CONTENT for path in paths] == [True] * 3
    assert len(server.starts) == 3
    assert sorted(tmp_path.iterdir()) == paths


@pytest.mark.parametrize("name, start", [("range.bin", 1000), ("whole.bin", 1000)])
def test_a_killed_download_is_resumed(server, tmp_path, name, start):
    write_part(tmp_path, name, CONTENT[:start])
    (path,) = fetch.fetch([f"{server.url}/{name}"], tmp_path, {name: SHA512})
    assert path.read_bytes() == CONTENT
    assert server.starts == [(f"/{name}", start)]


def test_a_complete_part_is_used_without_downloading_again(server, tmp_path):
    write_part(tmp_path, "a", CONTENT)
    (path,) = fetch.fetch([f"{server.url}/a"], tmp_path, {"a": SHA512})
    assert path.read_bytes() == CONTENT
    assert server.starts == [("/a", len(CONTENT))]


def test_a_part_longer_than_the_file_is_downloaded_again(server, tmp_path):
    files.write_whole("memory://longer/b", CONTENT)
    for name in ("a", "b"):
        write_part(tmp_path, name, b"x" * (len(CONTENT) + 1))
    for url in (f"{server.url}/a", "memory://longer/b"):
        (path,) = fetch.fetch([url], tmp_path)  # Without a hash.
        assert path.read_bytes() == CONTENT
    assert server.starts == [("/a", len(CONTENT) + 1), ("/a", 0)]


def test_a_broken_connection_is_resumed(server, tmp_path, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    (path,) = fetch.fetch([f"{server.url}/breaks"], tmp_path, {"breaks": SHA512})
    assert path.read_bytes() == CONTENT
    assert server.starts == [("/breaks", 0), ("/breaks", HALF)]


CHANGED = CONTENT[::-1]


@pytest.mark.parametrize(
    "old, new, second",
    [
        ({"ETag": TAG}, {"ETag": '"v1"'}, HALF),
        ({"Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT"}, {"Last-Modified": "Fri, 02 Jan 2026 00:00:00 GMT"}, HALF),
        ({"ETag": 'W/"v0"'}, {"ETag": 'W/"v0"'}, 0),
        ({}, {}, 0),
    ],
    ids=["ETag", "Last-Modified", "weak ETag", "no mark"],
)
def test_a_file_that_changes_during_its_download_is_downloaded_again(server, tmp_path, monkeypatch, old, new, second):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    server.marks = old
    change = lambda: (setattr(server, "content", CHANGED), setattr(server, "marks", new))
    server.after_the_break = change
    (path,) = fetch.fetch([f"{server.url}/breaks"], tmp_path)
    assert path.read_bytes() == CHANGED
    starts = [start for _, start in server.starts]
    assert starts == [0, second, *([0] if second else [])]
    assert list(tmp_path.iterdir()) == [path]


def test_a_range_with_the_wrong_start_is_not_appended(server, tmp_path):
    server.shift = 5
    write_part(tmp_path, "a", CONTENT[:1000])
    (path,) = fetch.fetch([f"{server.url}/a"], tmp_path)
    assert path.read_bytes() == CONTENT
    assert server.starts == [("/a", 1000), ("/a", 0)]


def test_a_part_of_an_older_version_in_a_bucket_is_downloaded_again(tmp_path):
    files.write_whole("memory://changed/a", CONTENT)
    write_part(tmp_path, "a", CHANGED[:1000])
    (path,) = fetch.fetch(["memory://changed/a"], tmp_path)
    assert path.read_bytes() == CONTENT


def test_a_file_with_a_wrong_hash_is_an_error_and_is_removed(server, tmp_path):
    sums = fetch.read_sums(f"{'0' * 40}  folder/a.bin\n{SHA512} *b.bin\n")
    assert sums == {"a.bin": "0" * 40, "b.bin": SHA512}
    sha1 = hashlib.sha1(CONTENT).hexdigest()
    with pytest.raises(ValueError, match=f"a.bin has the sha1 {sha1}, but should have 0000"):
        fetch.fetch([f"{server.url}/a.bin"], tmp_path, sums)
    assert list(tmp_path.iterdir()) == []


def test_verify_checks_the_hash_of_existing_files(server, tmp_path):
    urls = [f"{server.url}/b.bin"]
    (path,) = fetch.fetch(urls, tmp_path, {"b.bin": SHA512})
    path.write_bytes(CONTENT[:-1])
    fetch.fetch(urls, tmp_path, {"b.bin": SHA512})
    with pytest.raises(ValueError, match=r"b\.bin has the sha512 .* should have"):
        fetch.fetch(urls, tmp_path, {"b.bin": SHA512}, verify=True)


def test_missing_files_invalid_urls_and_invalid_sums_are_errors(server, tmp_path):
    with pytest.raises(OSError, match=r"/gone: HTTP Error 404"):
        fetch.fetch([f"{server.url}/gone"], tmp_path, {})
    with pytest.raises(ValueError, match="not the URL of a file"):
        fetch.expand(["https://host/folder/"])
    with pytest.raises(ValueError, match="several URLs end in a"):
        fetch.expand(["https://host/{1,2}/a"])
    with pytest.raises(ValueError, match="'abc  file' is not in the output format of sha1sum"):
        fetch.read_sums("abc  file\n")


def test_a_file_url_is_copied(tmp_path):
    source = tmp_path / "source.bin"
    source.write_bytes(CONTENT)
    (path,) = fetch.fetch([pathlib.Path(source).as_uri()], tmp_path / "out", {})
    assert path.read_bytes() == CONTENT


def test_the_fetch_command_downloads_and_checks_its_flags(server, tmp_path, capsys):
    def run(*arguments):
        return calls.exit_code(prepare.main, "fetch", f"--out={tmp_path}/out", *arguments), capsys.readouterr()

    (tmp_path / "sums").write_text(f"{SHA512}  b\n")
    urls = [f"--url={server.url}/{{a,b}}", f"--sums={tmp_path}/sums"]
    code, printed = run(*urls, "--dry_run")
    assert code == 0 and not (tmp_path / "out").exists()
    assert f"/a, hash unknown\nwould fetch {server.url}/b, hash {SHA512}\n" in printed.out
    assert run(*urls)[0] == 0
    assert (tmp_path / "out" / "b").read_bytes() == CONTENT
    assert run(f"--url={server.url}/c", f"--hash={'0' * 64}")[0] == 2
    code, printed = run(*urls, "--hash=0")
    assert code == 2 and "--hash is for one file, but --url names 2" in printed.err
