"""Paths into buckets, against moto's S3 server and an emulator of Google's storage."""

import contextlib
import json
import os
import pathlib

import fsspec
import numpy as np
import pytest

from diffusion_jax import files
from diffusion_jax.data import records
from diffusion_jax.exits import Busy
from diffusion_jax.files import checksums, remote
from diffusion_jax.files.folder_lock import FolderLock
from diffusion_jax.logs.run_log import MetricWriter, read_metrics
from diffusion_jax.train import checkpoint
from diffusion_jax.weights import buckets, restore
from tests import emulators

pytestmark = pytest.mark.xdist_group("stores")


@pytest.fixture(params=["s3", "gs"])
def folder(request, stores):
    return files.path(f"{request.param}://{emulators.BUCKET}/{request.node.originalname}")


def test_paths_in_buckets_behave_like_local_paths(folder):
    assert str(folder).startswith(("s3://bkt/", "gs://bkt/"))
    assert files.path(str(folder)) == files.path(pathlib.Path(str(folder))) == folder
    assert not folder.exists() and not folder.is_dir() and list(folder.iterdir()) == []
    one, two = folder / "a" / "one.txt", folder / "two.json"
    files.write_whole(one, "first\nline")
    files.write_whole(one, "Grüße\n")
    files.write_new(two, b"[1]")
    files.write_new(two, b"[2]")
    assert one.read_text() == "Grüße\n" and json.loads(two.read_bytes()) == [1]
    assert one.stat().st_size == len("Grüße\n".encode())
    assert (folder.is_dir(), folder.is_file(), one.is_file(), one.is_dir()) == (1, 0, 1, 0)
    assert sorted(folder.iterdir()) == [folder / "a", two]
    assert list(folder.glob("*/*.txt")) == list(folder.rglob("*.txt")) == [one]
    assert list(folder.glob("*.json")) == [two] and list(folder.glob("*.txt")) == []
    with files.whole(folder / "array.npy") as temporary, temporary.open("wb") as file:
        np.save(file, np.arange(3))
        assert not (folder / "array.npy").exists()
    with (folder / "array.npy").open("rb") as file:
        assert np.load(file).tolist() == [0, 1, 2]
    with pytest.raises(RuntimeError), files.whole(two) as temporary:
        temporary.write_bytes(b"half")
        raise RuntimeError
    assert two.read_bytes() == b"[1]"
    two.unlink()
    two.unlink(missing_ok=True)
    files.remove_tree(folder)
    assert not folder.exists()
    with pytest.raises(FileNotFoundError):
        one.read_bytes()
    with pytest.raises(TypeError, match="is not a local file"):
        one.touch()


def test_a_missing_bucket_is_a_one_line_error(folder):
    lost = str(folder).replace(emulators.BUCKET, "nobody", 1)
    with pytest.raises(ValueError, match=f"--out={lost} cannot be written to: does the bucket"):
        files.check_writable(lost, "--out")
    files.check_writable(folder, "--out")
    assert not folder.exists()


def test_denied_access_to_s3_is_an_error_about_credentials(stores, monkeypatch):
    path, new = files.path("s3://bkt/locked/file"), iter("abcd")
    path.write_bytes(b"1")
    folder = lambda: f"s3://bkt/locked/{next(new)}"
    closed = "check that the credentials on this machine give access"
    with emulators.locked(os.environ["AWS_ENDPOINT_URL"]) as reader:
        for names in (reader, dict.fromkeys(reader, "wrong"), {}):
            for name in reader:
                monkeypatch.delenv(name)
                if names:
                    monkeypatch.setenv(name, names[name])
            fsspec.get_filesystem_class("s3").clear_instance_cache()
            with pytest.raises(ValueError, match=rf"--out=s3://\S+ cannot be .*: .+: {closed}"):
                files.check_writable(folder(), "--out")
            if names == reader:
                assert path.read_bytes() == b"1" and path.is_file()
                continue
            for look in (path.read_bytes, path.is_file, path.is_dir, path.exists):
                with pytest.raises(OSError, match=rf"s3://bkt/locked/file: .+: {closed}"):
                    look()
    fsspec.get_filesystem_class("s3").clear_instance_cache()


def test_denied_access_to_gs_is_an_error_about_credentials(stores):
    path = files.path("gs://locked/file")
    as_data = lambda: records.check_exists([str(path)], "webdataset")
    for look in (path.read_bytes, path.is_file, path.exists, as_data):
        with pytest.raises(OSError, match=r"gs://locked/file: .*check that the credentials"):
            look()
    with pytest.raises(ValueError, match=r"--out=gs://locked/file cannot be .*credentials"):
        files.check_writable(path, "--out")


def test_a_mirror_uploads_a_large_file_again_after_it_grew_by_a_tenth(folder, monkeypatch):
    monkeypatch.setattr(remote, "_SMALL", 100)
    monkeypatch.setattr(remote, "_PAUSE", 1000)
    mirror = remote.Mirror(folder)
    sizes = []
    for size in (99, 101, 110, 112, 122, 124, 130):
        (mirror.local / "log").write_bytes(b"x" * size)
        mirror.send(sparing=True)
        sizes.append((folder / "log").stat().st_size)
    assert sizes == [99, 101, 101, 112, 112, 124, 124]
    mirror.close()
    assert (folder / "log").stat().st_size == 130


def test_checksums_in_buckets_are_read_from_the_store(folder, monkeypatch):
    monkeypatch.setattr(checksums, "_digest", None)  # No file is read to compute them.
    files.write_whole(folder / "d" / "x", b"12")
    files.write_whole(folder / "y", b"345")
    checksums.write(folder)
    checksums.read_back(folder)
    assert checksums.damage(folder) is None
    files.write_whole(folder / "y", b"346")
    assert checksums.damage(folder) == "y: its bytes differ from those written"
    files.write_whole(folder / "y", b"34")
    assert checksums.damage(folder) == "y: 2 bytes, but 3 were written"
    (folder / "d" / "x").unlink()
    assert dict(checksums.damaged(folder))["d/x"] == "cannot be read (No such object)"


def test_a_folder_in_a_bucket_has_one_writer(folder):
    with FolderLock(folder, beat=0.1):
        with pytest.raises(Busy, match="is being written by process"):
            other = FolderLock(folder, beat=0.1)
            other._identity |= {"nonce": "other", "machine": "another"}
            other._stale = 1.0
            other.__enter__()
        assert len(list(folder.glob("writer-*.json"))) == 1
    assert list(folder.iterdir()) == []


def test_metrics_in_buckets_are_complete_after_flush_close_and_resume(folder):
    writer = MetricWriter(folder, {})
    writer.write_scalars(1, {"loss": 2.0})
    writer.flush()
    assert read_metrics(folder / "metrics.jsonl") == [{"step": 1, "loss": 2.0}]
    writer.write_scalars(2, {"loss": 1.0})
    writer.close()
    assert len(read_metrics(folder / "metrics.jsonl")) == 2
    again = MetricWriter(folder, {}, resumed_from=1)
    again.write_scalars(2, {"loss": 0.5})
    again.close()
    assert [line["loss"] for line in read_metrics(folder / "metrics.jsonl")] == [2.0, 0.5]
    assert len(list((folder / "tensorboard").glob("events.out.tfevents.*"))) == 2


def test_a_missing_package_for_s3_is_an_error_that_names_it(monkeypatch):
    def absent(scheme):
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr("fsspec.filesystem", absent)
    with pytest.raises(ValueError, match=r"no reader for s3:// .*: install s3fs"):
        files.check_writable("s3://bucket/run", "--workdir")


def test_an_unsupported_orbax_version_is_an_error(monkeypatch):
    monkeypatch.delattr("orbax.checkpoint._src.serialization.tensorstore_utils._use_gcs_driver")
    message = r'cannot write to buckets \(it lacks _use_gcs_driver\): pip install -e "\.\['
    with pytest.raises(ValueError, match=message):
        buckets._prepare.__wrapped__()


def test_local_copies_a_folder_once_and_again_after_a_change(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    files.write_whole(folder / "model" / "config.json", "{}")
    files.write_whole(folder / "model" / "a" / "weights", b"1")
    place = files.local(folder / "model")
    assert place.name == "model" and (place / "a" / "weights").read_bytes() == b"1"
    with monkeypatch.context() as patch:
        patch.setattr(remote.Remote, "_get_all", None)  # Copying would raise.
        assert files.local(folder / "model") == place
    files.write_whole(folder / "model" / "a" / "weights", b"22")
    (folder / "model" / "config.json").unlink()
    files.local(folder / "model")
    assert (place / "a" / "weights").read_bytes() == b"22"
    assert not (place / "config.json").exists()
    one = files.local(folder / "model" / "a" / "weights")
    assert one.is_file() and one.read_bytes() == b"22"
    with pytest.raises(FileNotFoundError):
        files.local(folder / "no_such")
    assert files.local(tmp_path) == tmp_path


@pytest.mark.slow
def test_a_damaged_checkpoint_is_moved_aside_and_the_previous_one_used(folder):
    tree = lambda step: {"params": {"a": np.full(3, float(step), np.float32)}}
    with contextlib.closing(checkpoint.Checkpointer(folder, keep_last=None)) as checkpoints:
        for step in (10, 20):
            checkpoints.save_trees(step, tree(step))
    item = folder / "20" / "params" / "_METADATA"
    files.write_whole(item, item.read_bytes() + b" ")
    before = (folder / "20").objects()
    for latest in (10, 20):  # The first start moves it to damaged/.
        with contextlib.closing(checkpoint.Checkpointer(folder, keep_last=None)) as checkpoints:
            assert checkpoints.latest_step() == latest
            checkpoints.save_trees(20, tree(20))
    assert (folder / "damaged" / "20").objects() == before
    assert restore.newest_sound(restore.absolute(folder)) == 20
