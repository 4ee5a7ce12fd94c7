"""Malicious files: bounded memory, a one-line error, no code executed, nothing written."""

import contextlib
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

import msgpack
import numpy as np
import pyarrow
import pytest
from PIL import Image
from pyarrow import parquet

from diffusion_jax import cli, runs
from diffusion_jax.config.settings import Data
from diffusion_jax.data import decoding, embeddings, records, rows, storage, tars
from diffusion_jax.data.sources import arrow, open_pictures
from diffusion_jax.evaluate import drawn_features
from diffusion_jax.files import safetensors_files, untrusted
from diffusion_jax.metrics import stats_files
from diffusion_jax.web import frozen
from diffusion_jax.weights import flax_files, pretrained, torch_files, torch_weights
from sd_jax.weights import ldm_config
from tests.diffusion_jax.weights import torch_writer
from tests.imagen_jax import commands

MEGABYTE = 2**20


@pytest.fixture
def bounded():
    """bounded(megabytes, exception, function, *arguments) -> the text of the short error."""

    def call(megabytes, exception, function, *arguments):
        with peaking_below(megabytes * MEGABYTE), pytest.raises(exception) as error:
            function(*arguments)
        assert len(str(error.value)) < 1000
        return str(error.value)

    return call


class Harm:
    """Creates a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (os.mkdir, (str(self.path),))


@contextlib.contextmanager
def peaking_below(size):
    """Fail if the block allocates as many bytes in Python at once."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < size
    finally:
        tracemalloc.stop()


def encoded(format, side=8, mode="RGB", **options):
    """Return a white picture as a file of this format."""
    Image.new(mode, (side, side), "white").save(file := io.BytesIO(), format, **options)
    return file.getvalue()


def giant_png(width, height):
    """Return the header of a PNG without pixels."""
    chunk = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    end = struct.pack(">I", zlib.crc32(chunk))
    head = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", len(chunk) - 4) + chunk + end
    return head + struct.pack(">I", 1000) + b"IDAT"


def write_tar(path, members):
    """Write a tar of (name, content): bytes, or a type of link to /etc/passwd."""
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
    """Write a tar with a sparse file that claims `size` bytes."""
    header = bytearray(tarfile.TarInfo("a.png").tobuf(tarfile.GNU_FORMAT))
    header[156:157] = tarfile.GNUTYPE_SPARSE
    header[386:410] = b"%011o\0%011o\0" % (size, 0)
    header[482:495] = b"\0" + b"%011o\0" % size
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    path.write_bytes(bytes(header) + bytes(1024))


def test_links_devices_and_paths_out_of_a_tar_are_never_followed(tmp_path):
    folder = tmp_path / "tars"
    folder.mkdir()
    members = []
    for kind in ("SYM", "LNK", "CHR", "BLK", "FIFO", "DIR"):
        members += [(f"{kind}.png", getattr(tarfile, f"{kind}TYPE")), (f"{kind}.txt", b"no picture")]
    for name in ("/etc/absolute", "../../dotted"):
        members += [(f"{name}.png", encoded("PNG")), (f"{name}.txt", name.rpartition("/")[2].encode())]
    write_tar(folder / "0.tar", members)
    before = {path for path in tmp_path.rglob("*")}
    pictures = open_pictures(Data("webdataset", path=str(folder)), 8)
    assert sorted(pictures.texts(np.arange(len(pictures)))) == ["absolute", "dotted"]
    images, _ = pictures.read(np.arange(2))
    assert (images == 255).all()
    new = {path.parent for path in tmp_path.rglob("*")} - {path.parent for path in before}
    assert all((folder / storage.OWN) in (path, *path.parents) for path in new)
    assert not os.path.exists("/etc/absolute.png")


def test_a_giant_sparse_file_in_a_tar_is_skipped(tmp_path):
    sparse(tmp_path / "a.tar", 8 * 2**30 - 1)
    with peaking_below(MEGABYTE):
        assert len(tars.scan(str(tmp_path / "a.tar")).span) == 0


@pytest.mark.parametrize("size", [-512, -1024, -(10**9)])
def test_a_member_with_a_negative_size_is_skipped(tmp_path, size):
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
    with peaking_below(count * len(header)):
        assert len(tars.scan(str(tmp_path / "a.tar")).span) == count


def read_embeddings(path):
    return embeddings.read(path.read_bytes(), "npz")


@pytest.mark.parametrize("reader", [stats_files.read, torch_weights.read, torch_weights.read_metadata, read_embeddings])
def test_an_archive_that_unpacks_to_far_more_than_its_size_is_an_error(bounded, tmp_path, monkeypatch, reader):
    monkeypatch.setattr(untrusted, "_SMALL", MEGABYTE)
    np.savez_compressed(tmp_path / "a.npz", encodings=np.zeros(16 * MEGABYTE, np.uint8))
    message = bounded(2, ValueError, reader, tmp_path / "a.npz")
    assert "bytes unpack to 16,777,344, but a file of its size may unpack to" in message


@pytest.mark.parametrize("shape", ["(10**15,)", "(2**62,)", "(-1,)", "(1000000, 1000000)"])
def test_an_array_that_claims_to_be_larger_than_its_file_is_an_error(bounded, shape):
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {eval(shape)}, }}".encode()
    contents = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header) + 1) + header + b"\n" + bytes(9)
    assert "cannot read the embeddings" in bounded(5, ValueError, embeddings.read, contents, "npy")


WRONG = [{"data_offsets": offsets} for offsets in ([0, 2**60], [-16, 0], [16, 0], "all")]
WRONG += [{"dtype": "NONE"}, *({"shape": shape} for shape in ([2**40], [-4], "4"))]
ENTRIES = [{"dtype": "F32", "shape": [4], "data_offsets": [0, 16]} | wrong for wrong in WRONG]


@pytest.mark.parametrize("reader", [safetensors_files.map_safetensors, torch_weights.read])
@pytest.mark.parametrize("entry", [*ENTRIES, {"dtype": "F32", "shape": [4]}, []])
def test_a_safetensors_header_that_does_not_match_its_file_is_an_error(bounded, tmp_path, reader, entry):
    header = json.dumps({"w": entry}).encode()
    path = tmp_path / "a.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(16))
    assert str(path) in bounded(5, ValueError, reader, path)


@pytest.mark.parametrize("reader", [safetensors_files.map_safetensors, torch_weights.read])
@pytest.mark.parametrize("header", [b"", b"[" * 200000, b'{"a":' * 200000, b"\xff" * 9])
@pytest.mark.parametrize("length", [None, 2**62, 2**64 - 1])
def test_an_invalid_safetensors_header_is_an_error(bounded, tmp_path, reader, header, length):
    path = tmp_path / "a.safetensors"
    claimed = len(header) if length is None else length
    path.write_bytes(struct.pack("<Q", claimed) + header)
    assert str(path) in bounded(60, ValueError, reader, path)


@pytest.mark.parametrize("size", [(100000, 100000), (2**31 - 1, 1), (20000, 20000)])
def test_an_image_with_too_many_pixels_is_rejected_by_its_header(bounded, tmp_path, size):
    (tmp_path / "a.png").write_bytes(giant_png(*size))
    bounded(2, decoding.Unusable, decoding.crop, giant_png(*size), (8, 8))
    if size[0] * size[1] > 2**31:
        message = bounded(2, ValueError, untrusted.open_image, tmp_path / "a.png")
        assert "decompression bomb" in message.lower()


@pytest.mark.parametrize("format", ["EPS", "SPIDER"])
def test_decoders_that_run_programs_or_accept_any_file_are_switched_off(bounded, format):
    file = encoded(format, mode="F" if format == "SPIDER" else "RGB")
    assert Image.open(io.BytesIO(file)).format
    bounded(2, decoding.Unusable, decoding.crop, file, (8, 8))
    bounded(2, OSError, untrusted.open_image, file)


def test_uploads_in_other_than_web_formats_are_errors(bounded):
    file = encoded("TIFF")
    assert untrusted.open_image(file).format == "TIFF"
    bounded(2, OSError, untrusted.open_image, file, untrusted.WEB_FORMATS)


def test_deeply_nested_json_is_a_one_line_error(bounded, tmp_path):
    deep = "[" * 200000
    text = records.read_text(deep.encode(), "json:caption")
    assert isinstance(text, decoding.Unusable) and "nested too deeply" in str(text)
    for name, reader in ((runs.CONFIG, lambda path: runs.load(path.parent)), ("index.json", pretrained.read_json)):
        (tmp_path / name).write_text(deep)
        assert str(tmp_path / name) in bounded(60, ValueError, reader, tmp_path / name)


def read_yaml(path, megabytes, answer):
    """Read a file with this much additional memory, and write the error message to `answer`."""
    used = int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + megabytes * MEGABYTE,) * 2)
    try:
        ldm_config.find(path.with_suffix(".ckpt"), path)
    except ValueError as error:
        answer.write_text(str(error))


@pytest.mark.parametrize("deep", [True, False])
def test_deeply_nested_and_exponentially_growing_yaml_are_one_line_errors(tmp_path, deep):
    """Runs in a process with limited memory. Tracing allocations is slow with a deep stack."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    for i in range(1, 30):
        lines.append(f"a{i}: &a{i} [{', '.join(9 * [f'*a{i - 1}'])}]")
    (tmp_path / "a.yaml").write_text("[" * 3000 if deep else "\n".join(lines))
    process = commands.fork(read_yaml, tmp_path / "a.yaml", 60, tmp_path / "message")
    process.join()
    assert process.exitcode == 0
    message = (tmp_path / "message").read_text()
    assert str(tmp_path / "a.yaml") in message and len(message) < 1000


def zipped(path, pickled):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/byteorder", b"little")


PICKLES = {
    "a torch checkpoint": ("a.ckpt", zipped, torch_files.read_state_dict),
    "a mapped one": ("a.bin", zipped, torch_files.map_state_dict),
    "one of before 1.6": ("a.pt", pathlib.Path.write_bytes, torch_files.read_state_dict),
    "NeMo's list": ("wdinfo.pkl", pathlib.Path.write_bytes, lambda path: tars.find(str(path))),
    "NeMo's embeddings": ("a.pickle", pathlib.Path.write_bytes, lambda p: embeddings.read_pickle(p.read_bytes())),
}
LONG = b"\x80\x04\x8e" + struct.pack("<Q", 2**40)  # Claims 2^40 bytes.
SIDES = 2 * (b"J" + struct.pack("<i", 2**30))
SHAPE = b"\x80\x02cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\n" + SIDES + b"\x86C\x01b\x87R."


@pytest.mark.parametrize("name", PICKLES)
@pytest.mark.parametrize("content", ["code", "length", "string", "number", "array", "depth"])
def test_a_harmful_pickle_neither_executes_code_nor_fills_the_memory(bounded, tmp_path, name, content):
    file, write, read = PICKLES[name]
    contents = {
        "code": pickle.dumps({"state_dict": Harm(tmp_path / "harm"), "tar_files": []}, protocol=2),
        "length": LONG,
        "string": b"\x80\x04B" + struct.pack("<I", 2**27) + b".",
        "number": b"\x80\x02]r" + struct.pack("<I", 2**23) + b".",  # The number of an object in pickle's memo.
        "array": SHAPE,
        "depth": b"\x80\x02" + b"]" * 100000 + b"a" * 99999 + b".",
    }
    write(tmp_path / file, contents[content])
    bounded(60, ValueError, read, tmp_path / file)
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize(
    "read",
    [lambda path: tars._load(str(path), np.zeros(1)), drawn_features._is_whole],
    ids=["index of a tar", "features"],
)
def test_a_pickle_in_a_file_that_we_wrote_counts_as_damage_and_executes_no_code(tmp_path, read):
    np.savez(tmp_path / "a.npz", stamp=np.array([Harm(tmp_path / "harm")], object))
    assert not read(tmp_path / "a.npz")
    assert not (tmp_path / "harm").exists()


def test_a_pickle_with_too_many_operations_is_an_error(bounded, tmp_path, monkeypatch):
    torch_writer.save(tmp_path / "a.ckpt", {"w": np.zeros((4, 4), np.float32)})
    assert torch_files.read_state_dict(tmp_path / "a.ckpt")["w"].shape == (4, 4)
    monkeypatch.setattr(untrusted, "_OPERATIONS", 10)
    message = bounded(5, ValueError, torch_files.read_state_dict, tmp_path / "a.ckpt")
    assert "the pickle has more than 10 operations or objects" in message


def test_a_compressed_array_in_a_checkpoint_unpacks_up_to_a_limit(bounded, tmp_path, monkeypatch):
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


def test_a_long_name_in_a_gzipped_nemo_file_unpacks_up_to_a_limit(bounded, tmp_path, monkeypatch):
    monkeypatch.setattr(untrusted, "_SMALL", MEGABYTE)
    info = tarfile.TarInfo("././@LongLink")
    info.type, info.size = tarfile.GNUTYPE_LONGNAME, 16 * MEGABYTE
    (tmp_path / "m.nemo").write_bytes(gzip.compress(info.tobuf() + bytes(info.size)))
    message = bounded(2, ValueError, torch_files.read_state_dict, tmp_path / "m.nemo")
    assert "it unpacks to more than 1,048,576 bytes" in message


def test_a_tensor_larger_than_its_storage_is_an_error(bounded, tmp_path):
    torch_writer.save(tmp_path / "a.ckpt", {"w": np.zeros((4, 4), np.float32)})
    with zipfile.ZipFile(tmp_path / "a.ckpt") as archive:
        pickled = archive.read("archive/data.pkl")
    shape = b"J\x04\x00\x00\x00"
    with zipfile.ZipFile(tmp_path / "b.ckpt", "w") as archive:
        archive.writestr("archive/data.pkl", pickled.replace(shape, b"J\xff\xff\xff\x7f"))
        archive.writestr("archive/data/0", bytes(64))
    message = bounded(5, ValueError, torch_files.read_state_dict, tmp_path / "b.ckpt")
    assert "does not fit in its storage" in message


def test_control_characters_are_escaped_in_messages(capsys):
    evil = "a \x1b[2J\x1b]0;title\x07 cat\x9b31m\r\x00"
    with pytest.raises(SystemExit), cli.bad_input():
        raise ValueError(evil)
    expected = r"error: a \x1b[2J\x1b]0;title\x07 cat\x9b31m\x0d\x00"
    assert capsys.readouterr().err == f"{expected}\n"
    assert untrusted.printable("\ud800 \udcff") == r"\ud800 \xff"
    assert untrusted.printable("two\nlines\tof ümlaut 🙂") == "two\nlines\tof ümlaut 🙂"


def test_names_are_escaped_in_the_html_page(tmp_path):
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
def test_valid_arrays_are_read_like_in_numpy(pack):
    arrays = {"empty": np.zeros((0, 5)), "scalar": np.array(3), "text": np.array("card")}
    arrays["plain"] = np.arange(6, dtype=np.float32).reshape(2, 3)
    arrays["fortran"] = np.asfortranarray(arrays["plain"].astype(np.int16))
    file = io.BytesIO()
    pack(file, **arrays)
    read = untrusted.read_archive(file)
    assert list(read) == list(arrays)
    for name, array in arrays.items():
        np.testing.assert_array_equal(read[name], array)
        assert read[name].dtype == array.dtype and read[name].shape == array.shape


def test_one_array_of_an_archive_can_be_read_without_the_others():
    file = io.BytesIO()
    np.savez(file, first=np.arange(3), second=np.arange(4))
    assert {n: a.tolist() for n, a in untrusted.read_archive(file, only="second").items()} == {"second": [0, 1, 2, 3]}
    assert untrusted.read_archive(file, only="third") == {}


def lists(texts):
    return pyarrow.ListArray.from_arrays(pyarrow.array(range(len(texts) + 1), "int32"), texts)


def cast(kind):
    return lambda texts: texts.cast(kind)


KINDS = [*map(cast, (pyarrow.string(), pyarrow.large_string(), pyarrow.binary()))]


@pytest.mark.parametrize("dictionary", [True, False])
@pytest.mark.parametrize("kind", [*KINDS, pyarrow.StringArray.dictionary_encode, lists])
def test_a_table_that_unpacks_to_far_more_than_its_size_is_an_error(bounded, tmp_path, monkeypatch, kind, dictionary):
    path, column = tmp_path / "a.parquet", kind(pyarrow.array(["x" * 10_000] * 2000))
    parquet.write_table(pyarrow.table({"text": column}), path, compression="zstd", use_dictionary=dictionary)
    assert path.stat().st_size < 50_000
    monkeypatch.setattr(untrusted, "_SMALL", 2**23)
    message = bounded(20, ValueError, lambda: [*rows.read(path)])
    assert message == f"{path} unpacks to more than 8,388,608 bytes, the limit for a file of its size"
    monkeypatch.setattr(untrusted, "_SMALL", 2**25)
    assert len([*rows.read(path)]) == 2000


def test_a_compressed_arrow_table_unpacks_up_to_a_limit(bounded, tmp_path, monkeypatch):
    table = pyarrow.table({"text": ["x" * 10_000] * 2000, "image": [{"bytes": b"x"}] * 2000})
    path, options = tmp_path / "a.arrow", pyarrow.ipc.IpcWriteOptions(compression="zstd")
    with pyarrow.ipc.new_stream(path, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=100)
    with monkeypatch.context() as patch:
        patch.setattr(untrusted, "_SMALL", 2**23)
        message = bounded(20, ValueError, arrow.open_saved, tmp_path)
    assert f"{path} unpacks to more than 8,388,608 bytes" in message
    assert len(arrow.open_saved(tmp_path)) == 2000


@pytest.mark.parametrize("format", ["WEBP", "PNG", "GIF"])
def test_a_small_file_with_many_pixels_is_rejected_by_its_header(bounded, tmp_path, format):
    path = tmp_path / "a"
    path.write_bytes(encoded(format, 8000, "P" if format == "GIF" else "RGB", lossless=True))
    error = bounded(2, decoding.Unusable, decoding.crop, path.read_bytes(), (8, 8))
    assert "unpack to 8000 x 8000 pixels: an image of over 33,554,432 pixels may have 64" in error
    assert bounded(2, ValueError, untrusted.open_image, path) in error
    with path.open("ab") as longer:  # An ordinary picture has more bytes for its pixels.
        longer.write(bytes(1_000_000))
    with untrusted.open_image(path) as image:
        assert image.size == (8000, 8000)


@pytest.mark.parametrize(
    "content",
    [
        b"\xdd\x00\x0f\x42\x40" + b"\x80" * 10**6,  # An array of empty maps.
        b"\xc9\x00\x0f\x42\x45\x01\xdd\x00\x0f\x42\x40" + b"\x80" * 10**6,  # In NumPy's extension.
        b"\xdf\x00\x0f\x42\x40" + b"\xa2ab\xcd\x10\x00" * 10**6,  # A map of texts to numbers.
        b"\x91" * 10**6,
    ],
)
def test_many_objects_in_a_flax_file_are_refused_before_they_are_read(bounded, tmp_path, content):
    path = tmp_path / "a.msgpack"
    path.write_bytes(content)
    message = bounded(2, ValueError, flax_files.read, path)
    assert message.startswith(f"{path} holds more than 200,000 objects, so it is not a Flax model")


def test_all_kinds_of_objects_in_a_flax_file_are_counted_as_msgpack_reads_them(tmp_path, monkeypatch):
    numbers = [0, 127, 128, 255, 256, 65536, 2**32, -1, -33, -129, -(2**15) - 1, -(2**31) - 1, 0.5]
    texts = ["a" * size for size in (0, 31, 32, 256, 65536)]
    blobs = [bytes(size) for size in (0, 256, 65536)]
    maps = [{"a": {}}, *({str(i): 0 for i in range(size)} for size in (16, 65536))]
    value = [*numbers, *texts, *blobs, None, True, [0] * 16, [0] * 65536, *maps]
    count = 1 + 13 + 5 + 3 + 2 + 17 + 65537 + 3 + 33 + 131073
    (path := tmp_path / "a.msgpack").write_bytes(msgpack.packb(value))
    flax_files._check_objects(path)
    for limit, refused in ((count, False), (count - 1, True)):
        monkeypatch.setattr(flax_files, "_OBJECTS", limit)
        with pytest.raises(ValueError) if refused else contextlib.nullcontext():
            flax_files._check_objects(path)
