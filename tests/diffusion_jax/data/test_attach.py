"""Joining NeMo's tars of embeddings with the pictures of a table, without copying."""

import pickle

import numpy as np
import pytest

from diffusion_jax.config.settings import Data
from diffusion_jax.data import __main__ as data_command
from diffusion_jax.data import sources, tars
from diffusion_jax.data.decoding import Unusable
from tests import golden_sets, written_tars
from tests.diffusion_jax.data import calls


def as_nemo(array):
    return pickle.dumps({"embeddings_t5_xxl": {"encodings": array}})


def embedding(shard, number):
    return np.full((2, 4), 10 * shard + number, np.float16)


def write_embeddings(path, embeddings, checksums=False):
    records = [{tars.KEY: name.encode(), "pickle": as_nemo(array)} for name, array in embeddings]
    tars.write(path, records, checksums=checksums)


@pytest.fixture
def data(tmp_path, monkeypatch):
    """Two tars of pictures with equal keys, and a tar of embeddings in another order."""
    monkeypatch.setattr(tars, "cache_folders", lambda: [tmp_path / "cache"])
    for name in ("images", "precached"):
        (tmp_path / name).mkdir()
    for shard in range(2):
        records = [{tars.KEY: b"%04d" % i, "jpg": b"%d%d" % (shard, i), "txt": b"t"} for i in range(3)]
        tars.write(tmp_path / f"images/{shard:05}.tar", records)
    places = [(1, 2), (0, 0), (0, 1), (1, 0), (1, 1)]  # (0, 2) has no embedding.
    stored = [(f"{s:05}.tar/{i:04}", embedding(s, i)) for s, i in places]
    write_embeddings(tmp_path / "precached/t0_r0_0.tar", stored)
    return tmp_path


def attach(data, *more):
    """Attach the embeddings, and return the exit code."""
    flags = (f"--out={data}/table", "--column=t5", f"--from={data}/precached", *more)
    return calls.exit_code(data_command.main, "attach", f"webdataset:{data}/images", *flags)


def opened(data, text="t5.npy", uncaptioned="drop"):
    settings = Data("webdataset", str(data / "table"), text, uncaptioned=uncaptioned)
    return sources.open_records(settings)


def lines_of(capsys):
    out = capsys.readouterr().out
    return {line[:14].strip(): line[14:].strip() for line in out.splitlines()}


def test_each_picture_gets_its_own_embedding_and_keeps_its_caption(data, capsys):
    before = {path: path.read_bytes() for path in (data / "images").glob("*.tar")}
    assert attach(data) == 0
    printed = lines_of(capsys)
    assert printed["joined"] == "5 of 6 pictures"
    assert printed["no embedding"] == f"1: {data}/images/00000.tar/0002.jpg"
    assert "--config.data.text=t5.npy" in printed["to train"]
    assert set(printed) == {"joined", "no embedding", "to train"}
    records = opened(data).read(range(5))
    assert [record.image for record in records] == [b"00", b"01", b"10", b"11", b"12"]
    for record in records:
        np.testing.assert_array_equal(record.text, np.full((2, 4), int(record.image), np.float32), strict=True)
    assert [record.text for record in opened(data, "txt").read(range(6))] == ["t"] * 6
    assert opened(data).left_out() == {"no_caption": 1}
    assert before == {path: path.read_bytes() for path in before}
    assert not list((data / "table").glob("*.pictures"))


def test_pictures_without_an_embedding_are_an_error_unless_they_are_dropped(data):
    attach(data)
    with pytest.raises(ValueError, match=r"1 of 6 images have no text \(data.text=t5.npy\)"):
        opened(data, uncaptioned="error")


def test_all_that_does_not_fit_is_counted_and_named(data, capsys):
    more = data / "precached/t1.tar"
    ones = [(name, np.ones((2, 4))) for name in ("00001.tar/0001", "00009.tar/0001", "00001.tar/0000")]
    write_embeddings(more, [("00000/0002", np.zeros((1, 3))), *ones], checksums=True)
    whole = bytearray(more.read_bytes())
    at = whole.index(b"00001.tar/0001") + 512 + 200
    whole[at] ^= 1
    more.write_bytes(whole)
    assert attach(data) == 0
    printed = lines_of(capsys)
    assert printed["joined"] == "6 of 6 pictures"
    assert printed["no picture"] == f"1: {more}/00009.tar/0001.pickle"
    assert set(printed) == {"joined", "no picture", "duplicates", "damaged", "width 3", "to train"}
    first = f"{data}/precached/t0_r0_0.tar/00001.tar"
    assert printed["duplicates"].startswith("2: ") and first in printed["duplicates"]
    assert printed["damaged"].startswith(f"1: {more}/00001.tar/0001.pickle (wrong_checksum: ")
    assert printed["width 3"] == f"1: {more}/00000/0002.pickle"
    texts = opened(data).texts(range(6))
    np.testing.assert_array_equal(texts[3], np.ones((2, 4)))  # The last of two embeddings.
    assert isinstance(texts[4], Unusable)


def test_damaged_tars_of_embeddings_are_named(data, capsys):
    stored = data / "precached/t0_r0_0.tar"
    whole = bytearray(stored.read_bytes())
    whole[3] ^= 1  # The header of the first embedding.
    stored.write_bytes(whole)
    (data / "precached/t1.tar").write_bytes(b"no tar")
    assert attach(data) == 0
    printed = lines_of(capsys)
    assert printed["joined"] == "4 of 6 pictures"
    assert printed["damaged tars"].startswith(f"2: {stored} (1 files or more are lost), cannot")


@pytest.mark.parametrize("name", ["0001", "sub/0001"])
def test_embeddings_without_a_tar_in_their_name_belong_to_any_tar(data, name):
    members = ("sub/0001.jpg", "0001.jpg", "0001.txt", "sub/0001.txt")
    written_tars.write(data / "images/00000.tar", {member: member.encode() for member in members})
    (data / "images/00001.tar").unlink()
    (data / "precached/t0_r0_0.tar").unlink()
    tars.write(data / "precached/e.tar", [{tars.KEY: name.encode(), "t5.npy": golden_sets.array(5, (2, 4))}])
    assert attach(data) == 0
    [record] = opened(data).read([0])
    assert record.image == f"{name}.jpg".encode()
    np.testing.assert_array_equal(record.text, np.full((2, 4), 5))


def write_bare(data, name, shard, numbers=range(3)):
    """Write a tar of embeddings whose names do not say of which tar they are."""
    (data / "precached/t0_r0_0.tar").unlink(missing_ok=True)
    write_embeddings(data / f"precached/{name}.tar", [(f"{i:04}", embedding(shard, i)) for i in numbers])


@pytest.mark.parametrize("others", [{}, {"sub/00009": 9, "more": 7}])
def test_embeddings_in_tars_with_the_names_of_the_pictures_tars_are_joined_tar_by_tar(data, capsys, others):
    write_bare(data, "00000", 0, [2, 0])
    write_bare(data, "00001", 1)
    (data / "precached/sub").mkdir()
    for name, shard in others.items():  # They belong to no picture.
        write_bare(data, name, shard)
    assert attach(data) == 0
    printed = lines_of(capsys)
    assert printed["joined"] == "5 of 6 pictures" and printed["no embedding"] == f"1: {data}/images/00000.tar/0001.jpg"
    assert ("no picture" in printed) == bool(others)
    for record in opened(data).read(range(5)):
        np.testing.assert_array_equal(record.text, np.full((2, 4), int(record.image)))


def test_two_tars_of_embeddings_of_one_name_are_refused(data, capfd):
    (data / "precached/sub").mkdir()
    for name, shard in (("00000", 0), ("00001", 1), ("sub/00000", 0)):
        write_bare(data, name, shard)
    assert attach(data) == 2
    assert "precached has several tars 00000.tar: attach those of each folder by themselves" in capfd.readouterr().err


def test_an_embedding_that_could_belong_to_several_pictures_is_refused(data, capfd):
    """Keys are unique in a tar only. As in two tars of embeddings with names of their own."""
    for shard in range(2):
        write_bare(data, f"e{shard}", shard)
    assert attach(data) == 2
    error = capfd.readouterr().err
    assert "3 of the embeddings in" in error and "/precached/e1.tar/0000.pickle that of" in error
    assert f"{data}/images/00000.tar/0000.jpg and {data}/images/00001.tar/0000.jpg: name" in error
    (data / "images/b").mkdir()
    (data / "images/00001.tar").rename(data / "images/b/00000.tar")
    for shard in range(2):
        stored = [(f"00000.tar/{i:04}", np.zeros((2, 4), np.float16)) for i in range(3)]
        write_embeddings(data / f"precached/{shard:05}.tar", stored)
    assert attach(data) == 2
    assert "if their tars have equal names" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("more", "error"),
    [
        (["--column=../x"], "--column=../x: use letters"),
        (["--out="], "is no table that `import --out` wrote: add --out=FOLDER"),
        (["--from={}/images"], "the first embeddings are none"),
        (["--from={}/missing.tar"], "no data at"),
    ],
)
def test_what_cannot_be_attached_is_refused_in_one_line(data, capfd, more, error):
    assert attach(data, *(flag.format(data) for flag in more)) == 2
    assert error in capfd.readouterr().err


def edit(data, names):
    """Leave out the named pictures, and return the exit code."""
    (data / "names.txt").write_text("\n".join(names))
    return calls.exit_code(data_command.main, "edit", f"{data}/table", f"--leave_out={data}/names.txt")


def test_left_out_pictures_keep_their_rows_and_are_not_read(data, capsys):
    attach(data)
    before = {path: path.read_bytes() for path in (data / "table").glob("*.arrow")}
    keys = opened(data).keys(np.arange(5))
    assert edit(data, [f"{data}/images/00001.tar/0000.jpg", ""]) == 0
    assert lines_of(capsys)["left out"] == "1 of 6 pictures"
    for text, row in (("t5.npy", 2), ("txt", 3)):
        records = opened(data, text)
        [first, left] = records.read([0, row])
        assert (first.image, left.image, str(left.text)) == (b"00", b"", "left_out: `data edit --leave_out` names it")
        assert str(records.texts([row])[0]) == str(left.text)
        assert records.left_out()["left_out"] == 1
    assert list(opened(data, "txt").left()) == [(f"{data}/images/00001.tar/0000.jpg", "left_out")]
    np.testing.assert_array_equal(opened(data).keys(np.arange(5)), keys)
    assert before == {path: path.read_bytes() for path in before}
    assert edit(data, []) == 0  # An empty list leaves out none.
    assert opened(data, "txt").read([3])[0].image == b"10"
    assert opened(data).left_out() == {"no_caption": 1}


def test_names_of_no_picture_are_refused_and_change_nothing(data, capfd):
    attach(data)
    assert edit(data, ["0000.jpg", f"{data}/images/00001.tar/0000.jpg"]) == 2
    assert "1 of the 2 names in" in capfd.readouterr().err
    assert "left_out" not in opened(data, "txt").left_out()


def test_the_column_moves_with_the_table(data):
    attach(data)
    (data / "table").rename(data / "moved")
    records = sources.open_records(Data("webdataset", str(data / "moved"), "t5.npy", uncaptioned="drop"))
    assert len(records) == 5
