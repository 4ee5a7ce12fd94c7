"""Download MLCommons' published sets from a local server and a store, and verify hashes."""

import hashlib
import http.server
import json
import threading

import fsspec
import numpy as np
import pytest

from sd_jax import prepare
from sd_jax.mlperf import download
from sd_jax.mlperf.download import CLIP, IMAGES, MOMENTS, VAE

RNG = np.random.default_rng(0)
TAG = '"v0"'
CHECKPOINT = RNG.bytes(3 * 2**20 + 5)
SETS = {
    MOMENTS: {"tars/00000.tar": RNG.bytes(2000), "tars/00001.tar": RNG.bytes(2**20)},
    VAE: {"512-base-ema.ckpt": CHECKPOINT},
    CLIP: {"open_clip_pytorch_model.bin": b"clip"},
}
TOKENIZER = ("open_clip_config.json", "tokenizer.json")


def published():
    """Return {path: content} of the server: two lists and a folder for each set."""
    served = {}
    for name, files in SETS.items():
        md5 = "".join(f"{hashlib.md5(c).hexdigest()}  ./{path}\n" for path, c in files.items())
        served[f"/metadata/stable-diffusion-{name}.md5"] = md5.encode()
        served[f"/metadata/stable-diffusion-{name}.uri"] = f"URL/sets/{name}\n".encode()
        served |= {f"/sets/{name}/{path}": content for path, content in files.items()}
    return served


class Handler(http.server.BaseHTTPRequestHandler):
    """Serves files, also ranges of them."""

    def do_GET(self):
        start = int((self.headers.get("Range") or "bytes=0-")[len("bytes=") : -1])
        self.server.requests.append((self.path.rpartition("/")[2], start))
        if self.path not in self.server.files:
            return self.send_error(404)
        content = self.server.files[self.path].replace(b"URL", self.server.url.encode())
        if start >= len(content) > 0:
            return self.send_error(416)
        self.send_response(206 if start else 200)
        self.send_header("ETag", TAG)
        self.send_header("Content-Length", str(len(content) - start))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        self.wfile.write(content[start:])

    def log_message(self, *_):
        pass


@pytest.fixture
def server(monkeypatch):
    """Start the server, and replace the public checkpoint's hash by that of its file."""
    sha256 = {"512-base-ema.ckpt": hashlib.sha256(CHECKPOINT).hexdigest()}
    monkeypatch.setattr(download, "SETS", {MOMENTS: {}, VAE: sha256, CLIP: {}})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.requests, server.files = [], published()
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        server.url = f"http://127.0.0.1:{server.server_port}"
        yield server
        server.shutdown()
        thread.join()


def requests_of(server):
    """Return and clear the requests, without those for lists."""
    requests = sorted(one for one in server.requests if not one[0].endswith((".uri", ".md5")))
    server.requests.clear()
    return requests


def test_one_command_downloads_all_sets_and_prints_the_flags_for_training(server, tmp_path, capsys):
    (tmp_path / CLIP).mkdir()
    for name in TOKENIZER:
        (tmp_path / CLIP / name).touch()
    command = ["mlperf", f"--out={tmp_path}", f"--source={server.url}/metadata"]
    prepare.main([*command, "--dry_run"])
    assert f"would fetch 2 of 2 files from {server.url}/sets/{MOMENTS}" in capsys.readouterr().out
    assert requests_of(server) == []
    prepare.main(command)
    for name, files in SETS.items():
        for path, content in files.items():
            assert (tmp_path / name / path).read_bytes() == content
    assert len(requests_of(server)) == 4
    printed = capsys.readouterr().out.splitlines()
    assert f"{tmp_path / MOMENTS}: 2 files, all with the right hash" in printed
    assert printed[-4:] == [
        f"--config.data.path={tmp_path / MOMENTS / 'tars'}",
        f"--config.vae.weights={tmp_path / VAE / '512-base-ema.ckpt'}",
        f"--config.text.weights={tmp_path / CLIP}",
        f"--config.evaluation.clip={tmp_path / CLIP}",
    ]
    prepare.main(command)
    assert requests_of(server) == []


def fetch(server, tmp_path, name=VAE, **how):
    return download.download(name, tmp_path, f"{server.url}/metadata", **how)


def test_a_killed_download_continues(server, tmp_path):
    (tmp_path / VAE).mkdir()
    (tmp_path / VAE / ".512-base-ema.ckpt.part").write_bytes(CHECKPOINT[:1000])
    (tmp_path / VAE / ".512-base-ema.ckpt.version").write_text(TAG)
    fetch(server, tmp_path)
    assert (tmp_path / VAE / "512-base-ema.ckpt").read_bytes() == CHECKPOINT
    assert requests_of(server) == [("512-base-ema.ckpt", 1000)]


def test_an_incomplete_file_is_an_error_and_a_whole_one_is_hashed_once(server, tmp_path, monkeypatch):
    (tmp_path / VAE).mkdir()
    path = tmp_path / VAE / "512-base-ema.ckpt"
    path.write_bytes(CHECKPOINT[:1000])
    with pytest.raises(
        ValueError, match=r"512-base-ema.ckpt has the wrong hash, .* remove it, and run the command again"
    ):
        fetch(server, tmp_path)
    path.write_bytes(CHECKPOINT)
    assert fetch(server, tmp_path) == 1 and requests_of(server) == []
    record = json.loads((tmp_path / VAE / download.VERIFIED).read_text())
    sha256 = hashlib.sha256(CHECKPOINT).hexdigest()
    assert record == {"512-base-ema.ckpt": [sha256, len(CHECKPOINT)]}
    changed = CHECKPOINT[:-1] + bytes([CHECKPOINT[-1] ^ 1])
    path.write_bytes(changed)
    fetch(server, tmp_path)  # Its hash is recorded, and its size did not change.
    with pytest.raises(ValueError, match=r"512-base-ema\.ckpt has the wrong hash"):
        fetch(server, tmp_path, verify=True)
    path.write_bytes(CHECKPOINT[:-1])
    with pytest.raises(ValueError, match="so it is damaged or another file"):
        fetch(server, tmp_path)


def test_a_downloaded_file_with_another_hash_is_an_error(server, tmp_path):
    """The hash in the code takes precedence over the server's list."""
    other = b"another checkpoint"
    server.files[f"/sets/{VAE}/512-base-ema.ckpt"] = other
    md5 = f"{hashlib.md5(other).hexdigest()}  512-base-ema.ckpt\n"
    server.files[f"/metadata/stable-diffusion-{VAE}.md5"] = md5.encode()
    with pytest.raises(ValueError, match=r"512-base-ema\.ckpt has the sha256"):
        fetch(server, tmp_path)
    assert not (tmp_path / VAE / "512-base-ema.ckpt").exists()


@pytest.mark.parametrize(
    ("suffix", "content", "message"),
    [
        ("md5", b"<html>", "'<html>' is not in the output format of md5sum"),
        ("md5", f"{'0' * 32}  ../../a\n".encode(), "or its path leads out of the set's"),
        ("md5", f"{'0' * 32}  a.ckpt\n".encode(), "lists 1 files, but not 512-base-ema.ckpt"),
        ("uri", b"<html>", "must hold the URL of a folder, but holds '<html>'"),
    ],
)
def test_malformed_lists_of_files_are_errors_that_name_them(server, tmp_path, suffix, content, message):
    server.files[f"/metadata/stable-diffusion-{VAE}.{suffix}"] = content
    with pytest.raises(ValueError, match=message):
        fetch(server, tmp_path)
    del server.files[f"/metadata/stable-diffusion-{VAE}.{suffix}"]
    with pytest.raises(OSError, match="404"):
        fetch(server, tmp_path)


def test_sets_can_be_downloaded_from_an_fsspec_store(tmp_path):
    store = fsspec.filesystem("memory")
    for path, content in published().items():
        store.pipe_file(f"/mirror{path}", content.replace(b"URL", b"memory://mirror"))
    (tmp_path / MOMENTS / "tars").mkdir(parents=True)
    part = tmp_path / MOMENTS / "tars" / ".00001.tar.part"
    part.write_bytes(SETS[MOMENTS]["tars/00001.tar"][:77])
    assert download.download(MOMENTS, tmp_path, "memory://mirror/metadata") == 2
    for path, content in SETS[MOMENTS].items():
        assert (tmp_path / MOMENTS / path).read_bytes() == content


def test_raw_images_are_downloaded_only_on_request(server, tmp_path, monkeypatch):
    monkeypatch.setattr(download, "SETS", {MOMENTS: {}, IMAGES: {}})
    command = ["mlperf", f"--out={tmp_path}", f"--source={server.url}/metadata"]
    prepare.main(command)
    assert (tmp_path / MOMENTS).exists() and not (tmp_path / IMAGES).exists()
    sums = f"{hashlib.md5(b'tar').hexdigest()}  a.tar\n"
    server.files |= {
        f"/metadata/stable-diffusion-{IMAGES}.md5": sums.encode(),
        f"/metadata/stable-diffusion-{IMAGES}.uri": b"URL/images",
        "/images/a.tar": b"tar",
    }
    prepare.main([*command, "--sets", IMAGES])
    assert (tmp_path / "laion-400m-filtered-images-dataset" / "a.tar").read_bytes() == b"tar"


def test_the_tokenizer_is_downloaded_from_the_hugging_face_hub(tmp_path, monkeypatch):
    import huggingface_hub

    def snapshot(name, allow_patterns, local_dir):
        assert name == download.CLIP_ON_HUB and not any("*" in p for p in allow_patterns)
        for pattern in allow_patterns:
            (local_dir / pattern).touch()

    (tmp_path / CLIP).mkdir()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    download.fetch_tokenizer(tmp_path)
    assert (tmp_path / CLIP / "tokenizer.json").is_file()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", None)
    download.fetch_tokenizer(tmp_path)  # All files exist.
    (tmp_path / CLIP / "tokenizer.json").unlink()
    with pytest.raises(OSError, match=r"could not be downloaded \(TypeError\): copy the files config.json, "):
        download.fetch_tokenizer(tmp_path)
