"""Merging NeMo's tars of embeddings with the tars of images."""

import io
import json
import os
import pickle
import resource
import tarfile

import numpy as np
import pytest

from diffusion_jax import exits
from diffusion_jax.data import tars as tar_files
from diffusion_jax.data.prepare import merge
from diffusion_jax.data.sources.webdataset import open_tars
from diffusion_jax.files import folder_lock


def as_nemo(array, protocol=4):
    return pickle.dumps({"embeddings_t5_xxl": {"encodings": array}}, protocol=protocol)


@pytest.fixture
def tars(tmp_path):
    """Two tars of images with equal keys, and a tar of embeddings in another order."""
    for name in ("images", "embeddings"):
        (tmp_path / name).mkdir()
    for shard in range(2):
        records = [{"__key__": b"%04d" % i, "jpg": b"%d%d" % (shard, i), "txt": b"t"}
                   for i in range(3)]  # fmt: skip
        tar_files.write(tmp_path / f"images/{shard:05}.tar", records)
    stored = [(1, 2), (0, 0), (0, 1), (1, 0), (1, 1)]  # (0, 2) has no embedding.
    records = [{"__key__": b"%05d.tar/%04d" % place,
                "pickle": as_nemo(np.full((2, 4), 10 * place[0] + place[1], np.float16))}
               for place in stored]  # fmt: skip
    tar_files.write(tmp_path / "embeddings/t0_r0_0.tar", records)
    return tmp_path


def test_each_image_gets_its_own_embedding(tars):
    counts = merge.merge(str(tars / "images"), str(tars / "embeddings"), tars / "out")
    assert counts == {"merged": 5, "no_embedding": 1}
    records = open_tars(tars / "out", "npy").read(range(5))
    assert [record.image for record in records] == [b"00", b"01", b"10", b"11", b"12"]
    for record in records:
        np.testing.assert_array_equal(record.text, np.full((2, 4), int(record.image)))
    assert open_tars(tars / "out").texts([4]) == ["t"]
    assert merge.merge(str(tars / "images"), str(tars / "embeddings"), tars / "out") == {}


def test_merge_skips_records_with_damaged_headers_and_repeated_keys(tars):
    image = tars / "images/00000.tar"
    whole = bytearray(image.read_bytes())
    whole[3 * 1024 + 5] ^= 1  # The header of 0001.txt.
    image.write_bytes(whole)
    end = 6 * 1024  # The members of three records end here.
    second = tars / "images/00001.tar"
    # Now 0000 occurs twice.
    second.write_bytes(second.read_bytes()[: end // 3] + second.read_bytes())
    counts = merge.merge(str(tars / "images"), str(tars / "embeddings"), tars / "out")
    assert counts == {"merged": 4, "no_embedding": 1, "duplicate_key": 1}
    assert open_tars(tars / "out/00000.tar", "npy").read([1])[0].image == b"01"


def test_merge_drops_and_counts_records_whose_checksum_is_wrong(tars):
    for tar, place in (("images/00000.tar", 512), ("embeddings/t0_r0_0.tar", 512 + 200)):
        path = tars / tar
        with tarfile.open(path) as stored:
            files = [(m.name.partition(".j")[0], stored.extractfile(m).read()) for m in stored]
        if tar.startswith("images"):
            records = [{"__key__": b"0000", "jpg": b"00"}, {"__key__": b"0001", "jpg": b"01"}]
        else:
            records = [{"__key__": name.removesuffix(".pickle").encode(), "pickle": contents}
                       for name, contents in files]  # fmt: skip
        tar_files.write(path, records, checksums=True)
        damaged = bytearray(path.read_bytes())
        damaged[place] ^= 1
        path.write_bytes(damaged)
    counts = merge.merge(str(tars / "images"), str(tars / "embeddings"), tars / "out")
    # 0000 of the first tar has a damaged picture, 0002 of the second a damaged embedding.
    assert counts == {"merged": 3, "wrong_checksum": 2}


def test_merge_joins_files_of_a_record_that_are_not_adjacent(tars):
    """For example, a tar of all images, then all texts. Hidden files of macOS are ignored."""
    with tarfile.open(tars / "00000.tar", "w") as opened:
        for name in ("._0000.jpg", "0000.jpg", "0001.jpg", "0000.txt", "0001.txt"):
            (member := tarfile.TarInfo(name)).size = len(name)
            opened.addfile(member, io.BytesIO(name.encode()))
    counts = merge.merge(str(tars / "00000.tar"), str(tars / "embeddings"), tars / "out")
    assert counts == {"merged": 2}
    with tarfile.open(tars / "out/00000.tar") as opened:
        assert opened.getnames() == [f"000{i}.{s}" for i in range(2) for s in ("jpg", "npy", "txt")]
    records = open_tars(tars / "out").read(range(2))
    assert [(r.image, r.text) for r in records] == [
        (b"0000.jpg", "0000.txt"),
        (b"0001.jpg", "0001.txt"),
    ]


def test_temporary_files_of_a_killed_merge_are_removed(tars):
    (tars / "out").mkdir()
    (tars / "out" / ".00000.tar.0123abcd.tmp").touch()
    merge.merge(str(tars / "images"), str(tars / "embeddings"), tars / "out")
    assert sorted(path.name for path in (tars / "out").iterdir()) == ["00000.tar", "00001.tar"]


def test_merge_of_many_records_does_not_run_out_of_open_files(tars):
    count = len(os.listdir("/proc/self/fd")) + 200
    records = [{"__key__": b"%05d" % i, "jpg": b"x"} for i in range(count)]
    tar_files.write(tars / "many.tar", records)
    stored = [{"__key__": b"many.tar/%05d" % i, "npy": b"y"} for i in range(count)]
    tar_files.write(tars / "embeddings" / "many.tar", stored)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, limits[1]))
    try:
        counts = merge.merge(str(tars / "many.tar"), str(tars / "embeddings"), tars / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert counts == {"merged": count}


def test_embeddings_that_match_no_image_are_an_error_that_names_some(tars):
    tar_files.write(tars / "other.tar", [{"__key__": b"x/9999", "npy": b""}])
    with pytest.raises(ValueError, match=r"no embedding in .* the first embeddings are x/9999"):
        merge.merge(str(tars / "images"), str(tars / "other.tar"), tars / "out")


@pytest.mark.parametrize("protocol", range(2, 6))
def test_arrays_are_read_from_pickles_of_every_protocol(protocol):
    array = np.arange(6, dtype=np.float16).reshape(2, 3)
    np.testing.assert_array_equal(merge.read_pickle(as_nemo(array, protocol)), array, strict=True)
    several = pickle.dumps({"a": {"x": array}, "b": array * 2}, protocol)
    np.testing.assert_array_equal(merge.read_pickle(several, "a/x"), array)
    with pytest.raises(ValueError, match="the pickle holds a/x, b: choose one array with --key"):
        merge.read_pickle(several)


def test_a_pickle_that_would_execute_code_is_an_error(tmp_path):
    class Harm:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "harm"),))

    with pytest.raises(
        ValueError, match=r"the pickle refers to \w+\.mkdir, but may hold only arrays"
    ):
        merge.read_pickle(pickle.dumps({"encodings": Harm()}))
    assert not (tmp_path / "harm").exists()
    with pytest.raises(ValueError, match="cannot read embeddings from a pickle"):
        merge.read_pickle(b"\x80\x04 no pickle")


def test_merge_copies_embeddings_in_npy_format_unchanged(tars):
    array = io.BytesIO()
    np.save(array, np.eye(2, 4))
    records = [{"__key__": b"0001", "t5.npy": array.getvalue()}]
    tar_files.write(tars / "e.tar", records)
    counts = merge.merge(str(tars / "images/00000.tar"), str(tars / "e.tar"), tars / "out")
    assert counts == {"merged": 1, "no_embedding": 2}
    np.testing.assert_array_equal(open_tars(tars / "out", "t5.npy").texts([0])[0], np.eye(2, 4))


def test_merge_accepts_names_that_are_not_utf_8_and_rejects_long_suffixes(tars):
    name = b"caf\xe9".decode(errors="surrogateescape")
    for tar, suffix in (("images/0.tar", "jpg"), ("e.tar", "\xe9.npy")):
        with tarfile.open(tars / tar, "w") as opened:
            (member := tarfile.TarInfo(f"{name}.{suffix}")).size = 3
            opened.addfile(member, io.BytesIO(b"abc"))
    merge.merge(str(tars / "images/0.tar"), str(tars / "e.tar"), tars / "out")
    with tarfile.open(tars / "out/0.tar") as opened:
        assert opened.getnames() == [f"{name}.jpg", f"{name}.\xe9.npy"]
    tar_files.write(tars / "e.tar", [{"__key__": b"0001", f"{'x' * 29}.npy": b""}])
    with pytest.raises(ValueError, match=r"e.tar holds 0001.x+.npy, whose .* 32 bytes: give"):
        merge.merge(str(tars / "images/0.tar"), str(tars / "e.tar"), tars / "out")


def test_a_second_merge_into_the_same_folder_is_an_error(tars):
    (tars / "out").mkdir()
    other = {"pid": os.getppid(), "started": folder_lock._started(os.getppid()),
             "machine": folder_lock._machine()}  # fmt: skip
    (tars / "out" / "writer-1.json").write_text(json.dumps(other))
    with pytest.raises(exits.Busy, match=f"out is being written by process {os.getppid()}"):
        merge.merge(str(tars / "images"), str(tars / "embeddings"), tars / "out")
