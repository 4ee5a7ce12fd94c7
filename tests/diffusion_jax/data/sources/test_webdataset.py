"""The source webdataset: tables of records in tars, indices of tars, and damaged tars."""

import os
import pickle
import shutil
import tarfile

import fsspec
import numpy as np
import pytest

from diffusion_jax import files
from diffusion_jax.config import picture_fields
from diffusion_jax.data import home, reading, storage, tars
from diffusion_jax.data.decoding import Unusable
from diffusion_jax.data.inventory import Inventory
from diffusion_jax.data.sources.webdataset import open_tars
from diffusion_jax.examples.digits import rendering as digits
from tests import golden_sets, web_server
from tests.written_tars import write as write_tar


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Use a temporary cache instead of the user's own."""
    monkeypatch.setattr(tars, "cache_folders", lambda: [tmp_path / "cache"])
    return tmp_path / "cache"


def records_of(records):
    return [(r.image, r.text) for r in records.read(range(len(records)))]


@pytest.mark.parametrize("format", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
def test_members_with_the_same_stem_form_a_record(tmp_path, format):
    long = "x" * (120 if format != tarfile.USTAR_FORMAT else 80)
    tar = write_tar(
        tmp_path / "a.tar",
        {
            "b/1.jpg": b"first",
            "b/1.json": b"{}",
            "b/1.txt": b"one\n",
            "c/1.png": b"second",
            "c/1.txt": b"two",
            f"{long}.txt": b"three",
            f"{long}.webp": b"third",
            "b/._1.jpg": b"a fork of macOS",
            "only.txt": b"no image",
            "\u00e9.jpg": b"fourth",  # Of the forms of an accent, macOS writes the other one.
            "e\u0301.txt": b"four",
        },
        format=format,
    )
    records = open_tars(tar)
    assert records_of(records) == [(b"first", "one"), (b"second", "two"), (b"third", "three"), (b"fourth", "four")]
    assert records.read([1])[0].name == f"{tar}/c/1.png"
    assert records.inventory().rows() == [
        ("files", "4 pictures, 4 texts, 1 companions"),
        ("left out", f"1 no_picture: {tar}/only.txt"),
        ("left out", f"1 hidden: {tar}/b/._1.jpg"),
    ]


def test_a_tar_a_folder_and_a_brace_pattern_can_be_opened(tmp_path):
    for i in range(3):
        write_tar(tmp_path / f"s/shard-{i:02}.tar", {f"{i}.jpg": b"%d" % i, f"{i}.txt": b"t"})
    whole = [(b"0", "t"), (b"1", "t"), (b"2", "t")]
    assert records_of(open_tars(tmp_path / "s")) == whole
    assert records_of(open_tars(f"{tmp_path}/s/shard-{{00..02}}.tar")) == whole
    assert records_of(open_tars(f"{tmp_path}/s/shard-0{{2,0}}.tar")) == [whole[2], whole[0]]
    assert records_of(open_tars(tmp_path / "s/shard-01.tar")) == whole[1:2]


def test_the_error_for_some_missing_tars_names_the_first(tmp_path):
    write_tar(tmp_path / "0.tar", {"1.jpg": b"1", "1.txt": b"one"})
    with pytest.raises(FileNotFoundError, match=r"^2 of the 3 tars .*/{0\.\.2}\.tar do .*: copy .*/1\.tar and others"):
        open_tars(f"{tmp_path}/{{0..2}}.tar")


def test_the_error_for_keys_with_dots_says_where_a_key_ends(tmp_path):
    tar = write_tar(tmp_path / "0.tar", {"s0.input.jpg": b"1", "s0.txt": b"one"})
    with pytest.raises(ValueError, match=r"rename the files that end in \.input\.jpg: in a tar, the"):
        open_tars(tar)
    tar = write_tar(tmp_path / "1.tar", {"s0.jpg": b"1", "s0.txt": b"one"})
    with pytest.raises(ValueError, match=r"npy files and found jpg, txt; check the path$"):
        open_tars(tar, images=("npy",))


def test_braces_expand_as_in_a_shell():
    assert tars.expand("a.tar") == ["a.tar"]
    assert tars.expand("s-{08..11}.tar") == ["s-08.tar", "s-09.tar", "s-10.tar", "s-11.tar"]
    assert tars.expand("{a,b}/{0..1}") == ["a/0", "a/1", "b/0", "b/1"]


def test_the_index_of_a_tar_is_reused_until_the_tar_changes(tmp_path, monkeypatch):
    tar = write_tar(tmp_path / "a.tar", {"1.jpg": b"old", "1.txt": b"t"})
    assert records_of(open_tars(tar)) == [(b"old", "t")]
    scans = []
    scan = tars.scan
    monkeypatch.setattr(tars, "scan", lambda path: scans.append(path) or scan(path))
    assert records_of(open_tars(tar)) == [(b"old", "t")]
    assert scans == []

    write_tar(tar, {"1.txt": b"t", "1.jpg": b"new"})  # Other positions, but the same size.
    os.utime(tar, ns=(1, 1))
    assert records_of(open_tars(tar)) == [(b"new", "t")]
    assert scans == [str(tar)]


def tables(folder, pattern="*.arrow"):
    """Return the files of the tables beside the tars in a folder."""
    return sorted((folder / storage.OWN).glob(f"*/{pattern}"))


def test_a_damaged_index_or_table_is_rebuilt(tmp_path):
    tar = write_tar(tmp_path / "a.tar", {"1.jpg": b"x", "1.txt": b"t"})
    open_tars(tar)
    index = tmp_path / "a.tar.index.npz"
    (card,), (rows,) = tables(tmp_path, "card.json"), tables(tmp_path, "*.rows.arrow")
    for path in (card, rows):
        whole = path.read_bytes()
        for damaged in (b"", b"no zip", index.read_bytes()[:200]):
            index.write_bytes(damaged)
            path.write_bytes(whole[: len(damaged) // 2])
            assert records_of(open_tars(tar)) == [(b"x", "t")]
            assert len(index.read_bytes()) > 200 and path.read_bytes() == whole


def test_a_flipped_bit_in_an_index_changes_nothing(tmp_path):
    tar = str(write_tar(tmp_path / "a.tar", {"1.jpg": b"x", "1.txt": b"t", "._1": b""}))
    first, index = tars.load_index(tar), tmp_path / "a.tar.index.npz"
    whole = index.read_bytes()
    for at in range(0, len(whole), 2):
        damaged = bytearray(whole)
        damaged[at] ^= 16
        index.write_bytes(damaged)
        found = tars.load_index(tar)
        assert [tars.unpack(of) for of in found[5:]] == [tars.unpack(of) for of in first[5:]], at
        assert found.span.tolist() == first.span.tolist() and found.inventory.counts == first.inventory.counts


def test_the_index_of_a_read_only_folder_is_stored_in_the_cache(tmp_path, monkeypatch, cache):
    tar = write_tar(tmp_path / "s/a.tar", {"1.jpg": b"x", "1.txt": b"t"})
    write = files.write_whole

    def refuse_beside_the_tar(path, content):
        if os.path.dirname(path) == str(tar.parent):
            raise PermissionError(path)
        write(path, content)

    may = home._is_writable
    monkeypatch.setattr(files, "write_whole", refuse_beside_the_tar)
    monkeypatch.setattr(home, "_is_writable", lambda at: tar.parent not in at.parents and may(at))
    open_tars(tar)
    assert os.listdir(tar.parent) == ["a.tar"]
    (table,) = (path for path in cache.iterdir() if path.suffix != ".npz")
    assert len(list(table.glob("*.arrow"))) == 4
    monkeypatch.setattr(tars, "scan", None)  # The index is not built again,
    assert records_of(open_tars(tar)) == [(b"x", "t")]
    shutil.rmtree(table)  # not even without the table.
    assert records_of(open_tars(tar)) == [(b"x", "t")]


def test_complete_records_of_a_truncated_tar_are_used(tmp_path):
    members = {f"{i}.{s}": b"x" * 600 for i in range(3) for s in ("txt", "jpg")}
    tar = write_tar(tmp_path / "a.tar", members)
    # Within the last image. A member takes 512 + 600 bytes and padding.
    tar.write_bytes(tar.read_bytes()[: 5 * 1536 + 700])
    records = open_tars(tar)
    assert len(records) == 2
    lost = {"no_picture": 1, "truncated_tar": 1}
    assert records.left_out() == open_tars(tar).left_out() == lost
    # No index is stored, because reading it again may succeed, and the table is not used again.
    assert sorted(os.listdir(tmp_path)) == [storage.OWN, "a.tar"]
    tar.write_bytes((whole := tar.read_bytes()) + bytes(5 * 1536 + 1536 - len(whole)))
    os.utime(tar, ns=(1, 1))
    assert len(open_tars(tar)) == 3


def test_images_in_tars_without_captions_are_an_error_or_dropped(tmp_path):
    tar = write_tar(tmp_path / "a.tar", {"1.jpg": b"x", "1.pickle": b"", "2.jpg": b"y", "2.txt": b""})
    with pytest.raises(ValueError, match=r"1 of 2 images have .*a\.tar/1\.jpg.*jpg, pickle, txt"):
        open_tars(tar)
    records = open_tars(tar, uncaptioned="drop")
    assert records_of(records) == [(b"y", "")]
    assert records.left_out() == {"no_caption": 1}
    with pytest.raises(ValueError, match="'pickle' are pickles, which can run arbitrary code"):
        open_tars(tar, text="pickle")


def test_compressed_tars_and_tars_without_images_are_errors(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w:gz"):
        pass
    with pytest.raises(ValueError, match=r"cannot read .*a\.tar as a tar \(compressed\): decompress it"):
        open_tars(tmp_path / "a.tar")
    empty = write_tar(tmp_path / "e/b.tar", {"1.txt": b"no image"})
    with pytest.raises(ValueError, match=r"no images in .*b.tar: .* and found txt"):
        open_tars(empty)
    (tmp_path / "d").mkdir()
    with pytest.raises(ValueError, match=r"no .tar files in .*, or read image files with data\.source=folder"):
        open_tars(tmp_path / "d")


def test_the_error_for_missing_tars_suggests_a_command_for_examples(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"s/1.tar, .*s/2.tar, .*s/3.tar and 1 more"):
        open_tars(f"{tmp_path}/s/{{1..4}}.tar")
    with pytest.raises(FileNotFoundError) as error:
        open_tars(tmp_path / "a.tar")
    digits.main(str(error.value).split("diffusion_jax.data.digits ")[1].split())
    assert len(open_tars(tmp_path / "a.tar")) == 100


@pytest.fixture
def bucket(tmp_path):
    """A folder of an object store with two tars of two records each."""
    for i in range(2):
        members = {f"{i}{j}.{s}": b"%d%d %s" % (i, j, s.encode()) * 9 for j in range(2) for s in ("jpg", "txt")}
        tar = write_tar(tmp_path / f"local/s-{i}.tar", members)
        files.write_whole(f"memory://bucket/s-{i}.tar", tar.read_bytes())
    yield "memory://bucket"
    fsspec.filesystem("memory").store.clear()


@pytest.mark.parametrize("path", ["", "/s-{0..1}.tar", "/s-{0,1}.tar"])
def test_tars_in_an_object_store_are_read_like_local_ones(tmp_path, bucket, path):
    files.write_whole(f"{bucket}/._s-0.tar", b"a fork of macOS")
    assert records_of(open_tars(bucket + path)) == records_of(open_tars(tmp_path / "local"))


def test_an_indexed_tar_in_a_store_is_read_by_byte_ranges(bucket, monkeypatch):
    open_tars(bucket)
    indices = [f"memory:///bucket/s-{i}.tar.index.npz" for i in range(2)]
    assert set(indices) <= set(storage.walk(bucket, Inventory()))
    system = fsspec.filesystem("memory")
    monkeypatch.setattr(tars, "scan", None)  # scan would read a whole tar.
    sizes = []
    ranges = system.cat_ranges

    def record(paths, firsts, lasts, **kw):
        sizes.append(sum(lasts) - sum(firsts))
        return ranges(paths, firsts, lasts, **kw)

    monkeypatch.setattr(system, "cat_ranges", record)
    records = open_tars(bucket)
    assert [record.text for record in records.read([3, 0])] == ["11 txt" * 9, "00 txt" * 9]
    assert sizes == [2 * (512 + 54)]  # Header and image: the texts are in the table.


def test_tars_on_a_web_server_are_read_by_byte_ranges(tmp_path, bucket):
    pytest.importorskip("aiohttp")
    with web_server.serving(tmp_path / "local") as host:
        read = records_of(open_tars(f"http://{host}/s-{{0..1}}.tar"))
    assert read == records_of(open_tars(tmp_path / "local"))


def test_distant_members_of_a_record_are_read_separately(tmp_path):
    members = {"1.npy": golden_sets.array(5, (2, 2)), "1.bin": bytes(reading._GAP), "1.jpg": b"first"}
    tar = write_tar(tmp_path / "a.tar", members)
    (record,) = open_tars(tar, "npy").read([0])
    np.testing.assert_array_equal(record.text, np.full((2, 2), 5))
    assert (record.image, record.name) == (b"first", f"{tar}/1.jpg")


def test_nemos_wdinfo_pkl_lists_tars_beside_it(tmp_path, bucket):
    info = {"tar_files": ["s-1.tar", "s-0.tar"], "total_key_count": 4, "chunk_size": 2}
    listed = tmp_path / "local/wdinfo.pkl"
    listed.write_bytes(pickle.dumps(info))
    whole = records_of(open_tars(tmp_path / "local"))
    assert records_of(open_tars(listed)) == whole[2:] + whole[:2]
    files.write_whole(f"{bucket}/wdinfo.pkl", listed.read_bytes())
    assert records_of(open_tars(f"{bucket}/wdinfo.pkl")) == whole[2:] + whole[:2]
    several = f"{tmp_path}/local/{{wdinfo.pkl,s-0.tar}}"
    assert records_of(open_tars(several)) == whole[2:] + whole[:2] + whole[:2]
    listed.write_bytes(pickle.dumps(info | {"tar_files": ["gone.tar"]}))
    with pytest.raises(FileNotFoundError, match=r"no data at .*local/gone\.tar: check"):
        open_tars(listed)


def test_a_wdinfo_pkl_that_would_execute_code_is_an_error(tmp_path):
    class Harm:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "harm"),))

    (tmp_path / "wdinfo.pkl").write_bytes(pickle.dumps({"tar_files": [Harm()]}))
    with pytest.raises(ValueError, match=r"cannot read .*wdinfo.pkl.*refers to \w+\.mkdir"):
        open_tars(tmp_path / "wdinfo.pkl")
    assert not (tmp_path / "harm").exists()


def test_unreadable_tars_are_skipped_up_to_max_broken(tmp_path):
    for i in range(4):
        write_tar(tmp_path / f"s/{i}.tar", {f"{i}.jpg": b"%d" % i, f"{i}.txt": b"t"})
    (tmp_path / "s/2.tar").write_bytes(b"no tar" * 999)
    with pytest.raises(ValueError, match=r"1 of 4 tars cannot be read, .* 0\.2: .* cannot read .*2\.tar as a tar"):
        open_tars(tmp_path / "s", max_broken=0.2)
    records = open_tars(tmp_path / "s", max_broken=0.25)
    assert records_of(records) == [(b"0", "t"), (b"1", "t"), (b"3", "t")]
    assert records.left_out() == {"broken_tar": 1}


def test_damaged_embeddings_in_tars_are_unusable_and_others_are_read(tmp_path):
    members = {"1.jpg": b"", "1.npy": golden_sets.array(5, (2, 2)), "2.jpg": b"", "2.npy": b"damaged"}
    texts = open_tars(write_tar(tmp_path / "a.tar", members), text="npy").texts([0, 1])
    np.testing.assert_array_equal(texts[0], np.full((2, 2), 5))
    assert isinstance(texts[1], Unusable) and texts[1].reason == "broken_text"


def tar_of(path, num=20):
    """Return the bytes of a tar with records 0.jpg, 0.txt, 1.jpg, ..., and its headers' offsets."""
    members = {f"{i}.{s}": b"%d %s" % (i, s.encode()) for i in range(num) for s in ("jpg", "txt")}
    whole = write_tar(path / "whole.tar", members, format=tarfile.USTAR_FORMAT).read_bytes()
    return bytearray(whole), range(0, num * 2048, 1024)


PAIRS = [(b"%d jpg" % i, f"{i} txt") for i in range(20)]


@pytest.mark.parametrize("at", [5, 124, 130, 148, 156, 257, 345])
def test_a_flipped_bit_in_a_header_loses_only_one_file(tmp_path, at):
    whole, headers = tar_of(tmp_path)
    whole[headers[10] + at] ^= 1  # The header of 5.jpg.
    tar = tmp_path / "damaged" / "a.tar"
    tar.parent.mkdir()
    tar.write_bytes(whole)
    records = open_tars(tar, max_broken=0.1)
    assert records_of(records) == PAIRS[:5] + PAIRS[6:]
    assert records.left_out() == {"no_picture": 1, "broken_header": 1}
    assert records.inventory().first["broken_header"] == [f"{tar}/byte {headers[10]}"]
    assert not list(tar.parent.glob("*.npz"))  # No index is stored.
    with pytest.raises(ValueError, match=r"such as .*/byte 10240, hide 1 files or more, a larger sha"):
        open_tars(tar, max_broken=0.04)


def test_damaged_headers_of_images_and_captions_are_counted(tmp_path):
    whole, headers = tar_of(tmp_path)
    for number in (0, 11, 39):  # 0.jpg, 5.txt and 19.txt.
        whole[headers[number] + 150] ^= 1
    (tmp_path / "a.tar").write_bytes(whole)
    records = open_tars(tmp_path / "a.tar", max_broken=0.2)
    assert records_of(records) == PAIRS[1:5] + PAIRS[6:19]
    assert records.left_out() == {"no_picture": 1, "broken_record": 2, "broken_header": 3}


def test_a_block_of_zeros_within_a_tar_is_counted_as_damaged_headers(tmp_path):
    whole, headers = tar_of(tmp_path)
    whole[headers[10] : headers[18]] = bytes(8 * 1024)
    (tmp_path / "a.tar").write_bytes(whole)
    records = open_tars(tmp_path / "a.tar", max_broken=0.5)
    assert records_of(records) == PAIRS[:5] + PAIRS[9:]
    assert records.left_out() == {"broken_header": 8}


def test_a_damaged_header_of_a_long_name_loses_only_its_file(tmp_path):
    for format in (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT):
        members = {f"{'x' * 120}/{i}.{s}": b"%d %s" % (i, s.encode()) for i in range(20) for s in ("jpg", "txt")}
        whole = bytearray(write_tar(tmp_path / "a.tar", members, format=format).read_bytes())
        whole[10 * 2048 + 3] ^= 1  # A file has two more blocks: its long name, and the header of the name.
        (tmp_path / "a.tar").write_bytes(whole)
        records = open_tars(tmp_path / "a.tar", max_broken=0.1)
        assert records_of(records) == PAIRS[:5] + PAIRS[6:]
        assert records.left_out() == {"no_picture": 1, "broken_header": 1}


def test_concatenated_tars_are_read_to_the_end(tmp_path):
    whole, headers = tar_of(tmp_path)
    end = headers[-1] + 1024
    # Like cat and tar -A.
    marked, appended = bytes(whole) * 3, bytes(whole[:end]) * 2 + bytes(whole)
    for joined in (marked, appended):
        (tmp_path / "a.tar").write_bytes(joined)
        records = open_tars(tmp_path / "a.tar")
        assert records_of(records) == PAIRS * 3
        assert records.left_out() == {}
    (tmp_path / "a.tar").write_bytes(marked + b"no header")
    assert open_tars(tmp_path / "a.tar", max_broken=0.1).left_out() == {"broken_header": 1}
    # Preallocated, but not fully written.
    (tmp_path / "a.tar").write_bytes(bytes(whole[: headers[10]]) + bytes(2**21))
    assert open_tars(tmp_path / "a.tar").left_out() == {"truncated_tar": 1}


def test_files_of_separate_records_with_equal_keys_are_not_combined(tmp_path):
    names = ["a.txt", "b.jpg", "b.txt", "a.jpg", "a.txt", "c.jpg", "c.txt", "c.jpg", "c.txt"]
    members = [(name, b"%d" % number) for number, name in enumerate(names)]
    records = open_tars(write_tar(tmp_path / "a.tar", members))
    assert records_of(records) == [(b"1", "2"), (b"5", "6"), (b"7", "8")]
    assert records.left_out() == {"duplicate_key": 3}  # The caption of a.jpg is ambiguous.


@pytest.mark.parametrize(
    ("names", "records", "left_out"),
    [
        ("1.jpg 1.txt 1.txt 2.jpg 2.txt", "02 34", {"second_caption": 1}),
        ("1.jpg 1.txt 2.jpg 2.txt 1.txt 1.txt", "05 23", {"second_caption": 2}),  # tar -r
        ("1.jpg 2.jpg 1.txt 2.txt 1.txt", "04 13", {"second_caption": 1}),
        ("1.txt 1.webp 2.jpg 2.txt 1.txt", "14 23", {"second_caption": 1}),
        ("1.txt 1.txt 1.jpg 2.jpg 2.txt", "21 34", {"second_caption": 1}),
        ("1.jpg 1.txt 1.jpg 2.jpg 2.txt", "34", {"duplicate_key": 3}),
        ("1.jpg 1.txt 1.jpg 1.txt 1.txt 2.jpg 2.txt", "56", {"duplicate_key": 5}),
    ],
)
def test_of_captions_twice_in_a_tar_the_last_one_is_used(tmp_path, names, records, left_out):
    members = [(name, b"%d" % number) for number, name in enumerate(names.split())]
    opened = open_tars(write_tar(tmp_path / "a.tar", members), uncaptioned="drop")
    assert [(i.decode() + t) for i, t in records_of(opened)] == records.split()
    assert opened.left_out() == left_out


def test_of_numbers_twice_in_a_tar_the_last_ones_are_used(tmp_path):
    record = lambda key: [(f"{key}.jpg", b"x"), (f"{key}.txt", key.encode()), (f"{key}.json", b'{"n": 2}')]
    tar = write_tar(tmp_path / "a.tar", [*record("a"), *record("b"), ("a.json", b'{"n": 3}')])
    numbered = open_tars(tar, fields=picture_fields.read(("n=0..9",)))
    assert [(r.text, r.numbers["n"]) for r in numbered.read([0, 1])] == [("a", 3), ("b", 2)]
    plain = open_tars(tar)  # Companions that occur twice do not matter.
    assert records_of(plain) == [(b"x", "a"), (b"x", "b")] and plain.left_out() == {}


def test_pictures_and_texts_of_equal_keys_in_separate_parts_are_an_error(tmp_path):
    tars.write(tmp_path / "a.tar", [{tars.KEY: b"0", suffix: b"x"} for suffix in ("png", "png", "txt", "txt")])
    with pytest.raises(ValueError, match=r"names of files occur several times in a tar \(4, such as .*0\.png\), so no"):
        open_tars(tmp_path / "a.tar")


def test_every_member_of_a_tar_is_used_or_skipped_for_a_reason(tmp_path):
    names = ["a/1.JPG", "a/1.txt", "a/1.json", "a/1.cls", "a/2.gif", "a/2.txt", "a/2.png", "3.v1.png", "3.v1.txt"]
    names += ["4.mp4", "4", ".DS_Store", "__MACOSX/1.jpg", "alone.txt"]
    tar = write_tar(tmp_path / "s/a.tar", dict.fromkeys(names, b"x"))
    with tarfile.open(tar, "a") as opened:
        types = tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE
        for name, kind in zip(("5.png", "6.png", "7.png", "folder"), types, strict=True):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "a/1.JPG"
            opened.addfile(info)
    for name in ("b.tar.gz", "c.tgz", "stats.json", "._a.tar"):
        (tmp_path / "s" / name).write_bytes(b"")
    rows = [
        ("files", "2 pictures, 2 texts, 2 companions"),
        ("left out", f"2 dot_in_name: {tar}/3.v1.png, {tar}/3.v1.txt"),
        ("left out", f"2 format: {tar}/4.mp4, {tar}/4"),
        ("left out", f"1 no_picture: {tar}/alone.txt"),
        ("left out", f"1 second_picture: {tar}/a/2.gif"),
        ("left out", f"2 hidden: {tar}/.DS_Store, {tar}/__MACOSX/1.jpg"),
        ("left out", f"2 link: {tar}/5.png, {tar}/6.png"),
        ("left out", f"1 special: {tar}/7.png"),
    ]
    assert sorted(open_tars(tar).inventory().rows()) == sorted(rows)
    of_folder = dict.fromkeys(open_tars(tar.parent).inventory().rows())
    assert ("left out", f"4 format: {tar}/4.mp4, {tar}/4, {tar.parent}/b.tar.gz, ...") in of_folder
    assert ("left out", f"3 hidden: {tar}/.DS_Store, {tar}/__MACOSX/1.jpg, ._a.tar") in of_folder


def test_a_tar_with_several_links_is_read_once(tmp_path):
    folder, outside = tmp_path / "s", tmp_path / "outside.tar"
    tar = write_tar(folder / "b.tar", {"1.png": b"1", "1.txt": b"one"})
    write_tar(outside, {"2.png": b"2", "2.txt": b"two"})
    shutil.copy(tar, folder / "copy.tar")
    (folder / "a.tar").symlink_to(tar)
    os.link(tar, folder / "hard.tar")
    for name in ("x.tar", "y.tar"):
        (folder / name).symlink_to(outside)
    opened = open_tars(folder)
    assert [os.path.basename(name) for name in opened.files()] == ["b.tar", "copy.tar", "x.tar"]
    assert opened.texts(range(3)) == ["one", "one", "two"]
    assert ("left out", "3 link: hard.tar, a.tar, y.tar") in opened.inventory().rows()


def test_an_index_written_by_another_user_is_not_used(tmp_path, monkeypatch):
    tar = write_tar(tmp_path / "s/a.tar", {"1.jpg": b"1", "1.txt": b"t", "2.jpg": b"2", "2.txt": b"u"})
    open_tars(tar)
    (index,), (listed,) = tar.parent.glob("*.npz"), tables(tar.parent, "card.json")
    scans, scan = [], tars.scan
    monkeypatch.setattr(tars, "scan", lambda path: scans.append(path) or scan(path))
    open_tars(tar)
    assert not scans
    status = os.stat
    written = {str(index), str(listed)}

    def by_another(path, **options):
        found = status(path, **options)
        uid = found.st_uid + (os.fspath(path) in written)
        return os.stat_result((*found[:4], uid, *found[5:]))

    with monkeypatch.context() as patched:
        patched.setattr(os, "stat", by_another)
        # This user is neither root nor the owner of the file.
        patched.setattr(os, "geteuid", lambda: 1234)
        assert not tars.is_trusted(index, str(tar)) and not tars.is_trusted(listed, str(tar))
        assert tars.is_trusted(tar, str(tar))
    index.chmod(0o666)
    listed.chmod(0o666)  # Now every user could have written it.
    assert records_of(open_tars(tar)) == [(b"1", "t"), (b"2", "u")]
    assert scans == [str(tar)]


def test_a_cache_in_the_temporary_folder_must_belong_to_the_user(tmp_path, monkeypatch):
    monkeypatch.undo()  # The fixture's cache.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    home, shared = tars.cache_folders()
    assert shared == tmp_path / f"diffusion_jax-{os.geteuid()}"
    shared.symlink_to(tmp_path)  # Like one created by someone else.
    assert tars.cache_folders() == [home]
    shared.unlink()
    shared.mkdir(0o700)
    assert tars.cache_folders() == [home, shared]
    shared.chmod(0o777)
    assert tars.cache_folders() == [home]
    tars._save(tars.scan(str(write_tar(tmp_path / "a.tar", {"1.txt": b""}))), np.zeros(3), [str(home / "a.npz")])
    assert home.stat().st_mode & 0o777 == 0o700
