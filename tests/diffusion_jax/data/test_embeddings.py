"""Files of embeddings: formats, and errors."""

import io
import os
import pickle

import numpy as np
import pytest
import safetensors.numpy

from diffusion_jax.data import embeddings

ARRAY = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float16)


def saved(save, *args, **kwargs):
    buffer = io.BytesIO()
    save(buffer, *args, **kwargs)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("name", "contents"),
    [
        ("a.npy", saved(np.save, ARRAY)),
        ("a.t5.npz", saved(np.savez, ARRAY)),
        ("a.npz", saved(np.savez, mask=np.ones(3), **{"embeddings_t5_xxl/encodings": ARRAY})),
        ("a.safetensors", safetensors.numpy.save({"encodings": ARRAY, "ids": np.arange(3)})),
    ],
)
def test_every_format_is_read_as_a_float32_array(name, contents):
    np.testing.assert_array_equal(embeddings.read(contents, name), ARRAY.astype(np.float32), strict=True)


@pytest.mark.parametrize(
    ("name", "contents", "message"),
    [
        ("a.npy", b"\x93NUM", r"cannot read the embeddings a\.npy: "),
        ("a.npy", saved(np.save, np.array([{}]), allow_pickle=True), "cannot read.* Python objects"),
        ("a.npy", pickle.dumps(ARRAY), "cannot read the embeddings"),
        ("a.npz", saved(np.savez, a=ARRAY, b=ARRAY), r"arrays \['a', 'b'\]: name one of them"),
        ("a.npy", saved(np.save, ARRAY[0]), r"are float16\[4\]: they must be a float array \[tok"),
        ("a.npy", saved(np.save, np.eye(2, dtype=int)), r"are int64\[2, 2\]: they must be a float array"),
        ("a.npy", saved(np.save, np.array([[1, np.nan]])), "a.npy hold NaN or infinite values: enc"),
        ("a.npy", saved(np.save, np.array([[np.inf]], "f2")), "a.npy hold NaN or infinite values: encode"),
    ],
)
def test_damaged_files_of_embeddings_are_errors(name, contents, message):
    with pytest.raises(ValueError, match=message):
        embeddings.read(contents, name)


@pytest.mark.parametrize("suffix", ["pickle", "t5.pkl", "pt"])
def test_pickled_embeddings_are_an_error_that_suggests_numpy_save(suffix):
    with pytest.raises(ValueError, match=r"can run arbitrary code .* numpy\.save"):
        embeddings.check_suffix(suffix)


def as_nemo(array, protocol=4):
    return pickle.dumps({"embeddings_t5_xxl": {"encodings": array}}, protocol=protocol)


@pytest.mark.parametrize("protocol", range(2, 6))
def test_arrays_are_read_from_pickles_of_every_protocol(protocol):
    array = np.arange(6, dtype=np.float16).reshape(2, 3)
    np.testing.assert_array_equal(embeddings.read_pickle(as_nemo(array, protocol)), array, strict=True)
    several = pickle.dumps({"a": {"x": array}, "b": array * 2}, protocol)
    np.testing.assert_array_equal(embeddings.read_pickle(several, "a/x"), array)
    with pytest.raises(ValueError, match="the pickle holds a/x, b: choose one array with --key"):
        embeddings.read_pickle(several)


def test_a_pickle_that_would_execute_code_is_an_error(tmp_path):
    class Harm:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "harm"),))

    with pytest.raises(ValueError, match=r"the pickle refers to \w+\.mkdir, but may hold only arrays"):
        embeddings.read_pickle(pickle.dumps({"encodings": Harm()}))
    assert not (tmp_path / "harm").exists()
    with pytest.raises(ValueError, match="cannot read embeddings from a pickle"):
        embeddings.read_pickle(b"\x80\x04 no pickle")
