"""Files that were made to hurt cost bounded memory and one line, run nothing and write nowhere."""

import gzip
import io
import json
import os
import pathlib
import pickle
import resource
import struct
import sys
import tarfile
import tracemalloc
import zipfile
import zlib

import numpy as np
import pytest
from PIL import Image

from diffusion_jax import cli, runs
from diffusion_jax.config.settings import Data
from diffusion_jax.data import embeddings, records, tars, transforms
from diffusion_jax.data.prepare import merge
from diffusion_jax.data.sources import open_pictures
from diffusion_jax.files import untrusted
from diffusion_jax.metrics import stats_files
from diffusion_jax.web import frozen
from diffusion_jax.weights import pretrained, safetensors_files, torch_files, torch_weights
from sd_jax.weights import ldm_config
from tests.diffusion_jax.weights import torch_writer
from tests.imagen_jax import commands

MEGABYTE = 2**20


@pytest.fixture
def bounded():
    """bounded(megabytes, exception, function, *arguments): the error's text, one short line."""

    def call(megabytes, exception, function, *arguments):
        tracemalloc.start()
        try:
            with pytest.raises(exception) as error:
                function(*arguments)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < megabytes * MEGABYTE
        assert len(str(error.value)) < 1000
        return str(error.value)

    return call


class Harm:
    """Makes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (os.mkdir, (str(self.path),))


def png(size=8):
    file = io.BytesIO()
    Image.new("RGB", (size, size), "red").save(file, "PNG")
    return file.getvalue()


def giant_png(width, height):
    """The header of a PNG, and no pixels."""
    chunk = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    end = struct.pack(">I", zlib.crc32(chunk))
    head = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", len(chunk) - 4) + chunk + end
    return head + struct.pack(">I", 1000) + b"IDAT"


def write_tar(path, members):
    """Members by name: bytes, or a type of tarfile's that points at /etc/passwd."""
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            if isinstance(content, bytes) and len(content) > 1:
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
                continue
            info.type, info.linkname = content, "/etc/passwd"
            tar.addfile(info)


def sparse(path, size):
    """A tar of one file that says it has `size` bytes, all of them a hole."""
    header = bytearray(tarfile.TarInfo("a.png").tobuf(tarfile.GNU_FORMAT))
    header[156:157] = tarfile.GNUTYPE_SPARSE
    header[386:410] = b"%011o\0%011o\0" % (size, 0)
    header[482:495] = b"\0" + b"%011o\0" % size
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    path.write_bytes(bytes(header) + bytes(1024))


def test_links_devices_and_names_that_lead_out_of_a_tar_are_never_followed(tmp_path):
    folder = tmp_path / "tars"
    folder.mkdir()
    kinds = {
        "link": tarfile.SYMTYPE, "hard": tarfile.LNKTYPE, "char": tarfile.CHRTYPE,
        "block": tarfile.BLKTYPE, "fifo": tarfile.FIFOTYPE, "dir": tarfile.DIRTYPE,
    }  # fmt: skip
    members = [(f"{name}.png", kind) for name, kind in kinds.items()]
    members += [(f"{name}.txt", b"no picture") for name in kinds]
    members += [("/etc/absolute.png", png()), ("/etc/absolute.txt", b"absolute"),
                ("../../dotted.png", png()), ("../../dotted.txt", b"dotted")]  # fmt: skip
    write_tar(folder / "0.tar", members)
    before = {path for path in tmp_path.rglob("*")}
    pictures = open_pictures(Data("webdataset", path=str(folder)), 8)
    assert sorted(pictures.texts(np.arange(len(pictures)))) == ["absolute", "dotted"]
    images, _ = pictures.read(np.arange(2))
    assert (images == [255, 0, 0]).all()
    new = {path.parent for path in tmp_path.rglob("*")} - {path.parent for path in before}
    assert not new and not os.path.exists("/etc/absolute.png")


def test_a_sparse_giant_is_left_out(tmp_path):
    sparse(tmp_path / "a.tar", 8 * 2**30 - 1)
    tracemalloc.start()
    index = tars.scan(str(tmp_path / "a.tar"))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(index.span) == 0 and peak < MEGABYTE


@pytest.mark.parametrize("size", [-512, -1024, -(10**9)])
def test_a_negative_size_of_a_member_does_not_lead_back(tmp_path, size):
    header = bytearray(tarfile.TarInfo("a.png").tobuf(tarfile.GNU_FORMAT))
    header[124:136] = size.to_bytes(12, "big", signed=True)
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    good = tarfile.TarInfo("b.png").tobuf()
    (tmp_path / "a.tar").write_bytes(good + header + good + bytes(1024))
    index = tars.scan(str(tmp_path / "a.tar"))
    assert index.span.tolist() == [[512, 0], [1536, 0]]
    assert index.inventory.left_out() == {"broken_header": 1}


def test_many_members_of_a_tar_take_less_memory_than_their_headers(tmp_path):
    header, count = tarfile.TarInfo("a.png").tobuf(), 20000
    (tmp_path / "a.tar").write_bytes(header * count + bytes(1024))
    tracemalloc.start()
    index = tars.scan(str(tmp_path / "a.tar"))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(index.span) == count and peak < count * len(header)


READERS = {
    "statistics": lambda path: stats_files.read(path),
    "weights": lambda path: torch_weights.read(path),
    "metadata": lambda path: torch_weights.read_metadata(path),
    "embeddings": lambda path: embeddings.read(path.read_bytes(), "npz"),
}


@pytest.mark.parametrize("reader", READERS)
def test_an_archive_that_unpacks_to_far_more_than_it_is_is_refused(
    bounded, tmp_path, monkeypatch, reader
):
    monkeypatch.setattr(untrusted, "_SMALL", MEGABYTE)
    np.savez_compressed(tmp_path / "a.npz", encodings=np.zeros(16 * MEGABYTE, np.uint8))
    said = bounded(2, ValueError, READERS[reader], tmp_path / "a.npz")
    assert "bytes unpack to 16,777,344, but a file of its size may unpack to" in said


@pytest.mark.parametrize("shape", ["(10**15,)", "(2**62,)", "(-1,)", "(1000000, 1000000)"])
def test_an_array_that_says_it_is_larger_than_its_file_is_refused(bounded, shape):
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {eval(shape)}, }}".encode()
    contents = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header) + 1) + header + b"\n" + bytes(9)
    assert "cannot read the embeddings" in bounded(5, ValueError, embeddings.read, contents, "npy")


@pytest.mark.parametrize("reader", [safetensors_files.map_safetensors, torch_weights.read])
@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [4], "data_offsets": [0, 2**60]},
        {"dtype": "F32", "shape": [4], "data_offsets": [-16, 0]},
        {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [-4], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [4], "data_offsets": [16, 0]},
        {"dtype": "NONE", "shape": [4], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": "4", "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [4], "data_offsets": "all"},
        {"dtype": "F32", "shape": [4]},
        [],
    ],
)  # fmt: skip
def test_a_lying_header_of_safetensors_is_refused(bounded, tmp_path, reader, entry):
    header = json.dumps({"w": entry}).encode()
    path = tmp_path / "a.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(16))
    assert str(path) in bounded(5, ValueError, reader, path)


@pytest.mark.parametrize("reader", [safetensors_files.map_safetensors, torch_weights.read])
@pytest.mark.parametrize("header", [b"", b"[" * 200000, b'{"a":' * 200000, b"\xff" * 9])
@pytest.mark.parametrize("length", [None, 2**62, 2**64 - 1])
def test_a_header_of_safetensors_that_is_none_is_refused(bounded, tmp_path, reader, header, length):
    path = tmp_path / "a.safetensors"
    said = len(header) if length is None else length
    path.write_bytes(struct.pack("<Q", said) + header)
    assert str(path) in bounded(60, ValueError, reader, path)


@pytest.mark.parametrize("size", [(100000, 100000), (2**31 - 1, 1), (20000, 20000)])
def test_an_image_of_too_many_pixels_is_refused_by_its_header(bounded, tmp_path, size):
    (tmp_path / "a.png").write_bytes(giant_png(*size))
    bounded(2, transforms.Unusable, transforms.crop, giant_png(*size), (8, 8))
    if size[0] * size[1] > 2**31:
        said = bounded(2, ValueError, untrusted.open_image, tmp_path / "a.png")
        assert "decompression bomb" in said.lower()


@pytest.mark.parametrize("format", ["EPS", "SPIDER"])
def test_decoders_that_run_programs_or_accept_any_file_are_switched_off(bounded, format):
    file = io.BytesIO()
    mode = "F" if format == "SPIDER" else "RGB"
    Image.new(mode, (8, 8)).save(file, format)
    assert Image.open(io.BytesIO(file.getvalue())).format
    bounded(2, transforms.Unusable, transforms.crop, file.getvalue(), (8, 8))
    bounded(2, OSError, untrusted.open_image, file.getvalue())


def test_uploads_are_of_the_formats_of_web_pages(bounded):
    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, "TIFF")
    assert untrusted.open_image(file.getvalue()).format == "TIFF"
    bounded(2, OSError, untrusted.open_image, file.getvalue(), untrusted.WEB_FORMATS)


def test_json_that_is_nested_without_end_is_one_line(bounded, tmp_path):
    deep = "[" * 200000
    text = records.read_text(deep.encode(), "json:caption")
    assert isinstance(text, transforms.Unusable) and "nested too deeply" in str(text)
    for name, reader in ((runs.CONFIG, lambda path: runs.load(path.parent)),
                         ("index.json", pretrained.read_json)):  # fmt: skip
        (tmp_path / name).write_text(deep)
        assert str(tmp_path / name) in bounded(60, ValueError, reader, tmp_path / name)


def read_yaml(path, megabytes, answer):
    """Write the message of the error, of a process that can map so much more memory."""
    used = int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + megabytes * MEGABYTE,) * 2)
    try:
        ldm_config.find(path.with_suffix(".ckpt"), path)
    except ValueError as error:
        answer.write_text(str(error))


@pytest.mark.parametrize("deep", [True, False])
def test_yaml_that_doubles_itself_or_is_nested_without_end_is_one_line(tmp_path, deep):
    """In a process of limited memory: tracing allocations walks the stack, which is deep here."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    for i in range(1, 30):
        lines.append(f"a{i}: &a{i} [{', '.join(9 * [f'*a{i - 1}'])}]")
    (tmp_path / "a.yaml").write_text("[" * 20000 if deep else "\n".join(lines))
    process = commands.fork(read_yaml, tmp_path / "a.yaml", 60, tmp_path / "message")
    process.join()
    assert process.exitcode == 0
    message = (tmp_path / "message").read_text()
    assert str(tmp_path / "a.yaml") in message and len(message) < 1000


def zipped(path, pickled):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/byteorder", b"little")


def read_wdinfo(path):
    return tars.find(str(path))


PICKLES = {
    "a torch checkpoint": ("a.ckpt", zipped, torch_files.read_state_dict),
    "a mapped one": ("a.bin", zipped, torch_files.map_state_dict),
    "one of before 1.6": ("a.pt", lambda p, b: p.write_bytes(b), torch_files.read_state_dict),
    "NeMo's list": ("wdinfo.pkl", lambda p, b: p.write_bytes(b), read_wdinfo),
    "NeMo's embeddings": ("a.pickle", lambda p, b: p.write_bytes(b),
                          lambda path: merge.read_pickle(path.read_bytes())),
}  # fmt: skip
LONG = b"\x80\x04\x8e" + struct.pack("<Q", 2**40)  # Bytes that never come.
SHAPE = (
    b"\x80\x02cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nJ" + struct.pack("<i", 2**30)
    + b"J" + struct.pack("<i", 2**30) + b"\x86C\x01b\x87R."
)  # fmt: skip


@pytest.mark.parametrize("name", PICKLES)
@pytest.mark.parametrize("content", ["code", "length", "string", "number", "array", "depth"])
def test_a_pickle_runs_nothing_and_takes_no_memory(bounded, tmp_path, name, content):
    file, write, read = PICKLES[name]
    contents = {
        "code": pickle.dumps({"state_dict": Harm(tmp_path / "harm"), "tar_files": []}, protocol=2),
        "length": LONG,
        "string": b"\x80\x04B" + struct.pack("<I", 2**27) + b".",
        "number": b"\x80\x02]r" + struct.pack("<I", 2**23) + b".",  # Of an object in a table.
        "array": SHAPE,
        "depth": b"\x80\x02" + b"]" * 100000 + b"a" * 99999 + b".",
    }
    write(tmp_path / file, contents[content])
    bounded(60, ValueError, read, tmp_path / file)
    assert not (tmp_path / "harm").exists()


def test_a_pickle_of_too_many_operations_is_refused(bounded, tmp_path, monkeypatch):
    torch_writer.save(tmp_path / "a.ckpt", {"w": np.zeros((4, 4), np.float32)})
    assert torch_files.read_state_dict(tmp_path / "a.ckpt")["w"].shape == (4, 4)
    monkeypatch.setattr(untrusted, "_OPERATIONS", 10)
    message = bounded(5, ValueError, torch_files.read_state_dict, tmp_path / "a.ckpt")
    assert "the pickle has more than 10 operations or objects" in message


def test_a_compressed_array_in_a_checkpoint_is_bounded(bounded, tmp_path, monkeypatch):
    torch_writer.save(tmp_path / "a.ckpt", {"w": np.zeros(16 * MEGABYTE // 4, np.float32)})
    with (
        zipfile.ZipFile(tmp_path / "a.ckpt") as old,
        zipfile.ZipFile(tmp_path / "b.ckpt", "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for name in old.namelist():
            new.writestr(name, old.read(name))
    monkeypatch.setattr(untrusted, "_SMALL", MEGABYTE)
    message = bounded(2, ValueError, torch_files.read_state_dict, tmp_path / "b.ckpt")
    assert "bytes unpack to 16,777,373, but a file of its size may" in message


@pytest.mark.parametrize("read", [torch_files.read_state_dict, torch_files.read_nemo_config])
@pytest.mark.parametrize("name", ["model_weights.ckpt", "model_config.yaml", "other", "x" * 9999])
def test_a_gzipped_nemo_file_unpacks_up_to_a_limit(bounded, tmp_path, monkeypatch, read, name):
    monkeypatch.setattr(untrusted, "_SMALL", MEGABYTE)
    with tarfile.open(tmp_path / "m.nemo", "w:gz") as tar:
        info = tarfile.TarInfo(name)
        info.size = 16 * MEGABYTE
        tar.addfile(info, io.BytesIO(bytes(info.size)))
    message = bounded(2, ValueError, read, tmp_path / "m.nemo")
    assert message.endswith("1,048,576 bytes, the limit for a file of its size")


def test_a_name_in_a_gzipped_nemo_file_is_bounded_too(bounded, tmp_path, monkeypatch):
    monkeypatch.setattr(untrusted, "_SMALL", MEGABYTE)
    info = tarfile.TarInfo("././@LongLink")
    info.type, info.size = tarfile.GNUTYPE_LONGNAME, 16 * MEGABYTE
    (tmp_path / "m.nemo").write_bytes(gzip.compress(info.tobuf() + bytes(info.size)))
    message = bounded(2, ValueError, torch_files.read_state_dict, tmp_path / "m.nemo")
    assert "it unpacks to more than 1,048,576 bytes" in message


def test_a_tensor_that_sees_beyond_its_storage_is_refused(bounded, tmp_path):
    torch_writer.save(tmp_path / "a.ckpt", {"w": np.zeros((4, 4), np.float32)})
    with zipfile.ZipFile(tmp_path / "a.ckpt") as archive:
        pickled = archive.read("archive/data.pkl")
    shape = b"J\x04\x00\x00\x00"
    with zipfile.ZipFile(tmp_path / "b.ckpt", "w") as archive:
        archive.writestr("archive/data.pkl", pickled.replace(shape, b"J\xff\xff\xff\x7f"))
        archive.writestr("archive/data/0", bytes(64))
    said = bounded(5, ValueError, torch_files.read_state_dict, tmp_path / "b.ckpt")
    assert "does not fit in its storage" in said


def test_names_and_captions_cannot_rule_the_terminal(capsys):
    evil = "a \x1b[2J\x1b]0;title\x07 cat\x9b31m\r\x00"
    with pytest.raises(SystemExit), cli.bad_input():
        raise ValueError(evil)
    said = r"error: a \x1b[2J\x1b]0;title\x07 cat\x9b31m\x0d\x00"
    assert capsys.readouterr().err == f"{said}\n"
    assert untrusted.printable("two\nlines\tof ümlaut 🙂") == "two\nlines\tof ümlaut 🙂"


def test_prompts_are_text_and_no_html_in_a_page(tmp_path):
    evil = "<script>alert(1)</script>"
    folder = tmp_path / evil.replace("/", "")
    row = {"guidance": "1.0", "checkpoint": "1", "ema": evil, "fid": "3.0", "clip_score": "0.2"}
    evaluation = folder / runs.EVALUATION / "sweep"
    evaluation.mkdir(parents=True)
    (evaluation / "sweep.csv").write_text(f"{','.join(row)}\n{','.join(row.values())}\n")
    (folder / runs.CONFIG).write_text("{}")
    html = frozen.page([folder])
    assert r"\u003cscript>alert(1)" in html and "<script>alert" not in html
    assert sys.getsizeof(html) < MEGABYTE


@pytest.mark.parametrize("pack", [np.savez, np.savez_compressed])
def test_honest_arrays_are_read_as_numpy_reads_them(pack):
    arrays = {
        "plain": np.arange(6, dtype=np.float32).reshape(2, 3),
        "fortran": np.asfortranarray(np.arange(6, dtype=np.int16).reshape(2, 3)),
        "empty": np.zeros((0, 5), np.float64), "scalar": np.array(3), "text": np.array("card"),
    }  # fmt: skip
    file = io.BytesIO()
    pack(file, **arrays)
    read = untrusted.read_archive(file)
    assert list(read) == list(arrays)
    for name, array in arrays.items():
        np.testing.assert_array_equal(read[name], array)
        assert read[name].dtype == array.dtype and read[name].shape == array.shape
