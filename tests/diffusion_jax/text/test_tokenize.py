"""Tokenizers against sentencepiece, open_clip and transformers."""

import json
import threading

import ftfy
import numpy as np
import pytest
import sentencepiece
import transformers

from diffusion_jax.text import tokenize
from tests.diffusion_jax.text.tiny_weights import FIXTURES, ROOT, spiece

SHARED = ROOT.parent / "shared" / "tokenizers"
# Ids from open_clip 3.3's SimpleTokenizer with the fixture's 2,000 merges.
OPEN_CLIP = json.loads((FIXTURES / "open_clip_ids.json").read_text())
CORGI = "A photo of a corgi riding a bike in Times Square."
CORGI_IDS = [71, 1202, 13, 3, 9, 4301, 122, 23, 7494, 3, 9, 3724, 16, 5324, 7120, 5, 1]


@pytest.fixture(scope="module")
def t5(tmp_path_factory):
    folder = tmp_path_factory.mktemp("t5")
    (folder / "spiece.model").write_bytes(spiece())
    return tokenize.t5(folder)


@pytest.fixture(scope="module")
def clip_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clip")
    merges = (FIXTURES / "clip_merges_2000.txt.gz").read_bytes()
    (folder / "bpe_simple_vocab_16e6.txt.gz").write_bytes(merges)
    return folder


def ids(tokenizer, text, length=64):
    tokens = tokenizer([text], length)
    return tokens["text_ids"][0][tokens["text_mask"][0]].tolist()


def test_t5_pads_with_0_and_masks(t5):
    tokens = t5([CORGI, ""], 20)
    np.testing.assert_array_equal(tokens["text_ids"], [CORGI_IDS + [0] * 3, [1] + [0] * 19])
    np.testing.assert_array_equal(tokens["text_mask"].sum(1), [17, 1])
    assert (tokens["text_ids"].dtype, tokens["text_mask"].dtype) == (np.int32, bool)


def test_a_long_text_is_cut_and_ends_with_the_end_token(t5):
    assert ids(t5, CORGI, length=6) == [*CORGI_IDS[:5], 1]


def test_cut_off_returns_the_end_of_the_text_that_is_cut(t5, clip_folder):
    assert t5.cut_off([CORGI, "a photo"], 6) == ["corgi riding a bike in Times Square.", ""]
    assert t5.cut_off([CORGI], 17) == [""]
    clip = tokenize.clip(clip_folder, open_clip=True)
    assert clip.cut_off(["A  Dog &amp; the Cat", "dog"], 5) == ["the Cat", ""]


def test_t5_ids_match_sentencepiece(t5):
    """For unusual texts, including control tokens next to characters they could merge with."""
    reference = sentencepiece.SentencePieceProcessor(model_proto=spiece())
    texts = [*OPEN_CLIP, "<unk></s></s>>", "=></s> <pad", "<extra_id_0> </s>x", "word " * 700]
    for text in texts:
        assert ids(t5, text, 1000) == [*reference.encode(text), 1]


@pytest.mark.parametrize("text", OPEN_CLIP)
def test_open_clip_text_cleaning_matches_its_own_tokenizer(clip_folder, text):
    """Curly quotes, wrong decodings, entities, controls, white space, Greek capitals."""
    begin, *body, end = ids(tokenize.clip(clip_folder, open_clip=True), text, 200)
    assert (begin, body, end) == (2512, OPEN_CLIP[text], 2513)


def test_open_clip_cleans_a_long_caption_in_linear_time(clip_folder, monkeypatch):
    """ftfy removes one level of "&amp;amp;..." in each pass over the text."""
    lengths = []
    unescape = ftfy.FIXERS["unescape_html"]
    counted = lambda text: (lengths.append(len(text)), unescape(text))[1]
    monkeypatch.setitem(ftfy.FIXERS, "unescape_html", counted)
    clip = tokenize.clip(clip_folder, open_clip=True)
    assert ids(clip, "a &" + 500 * "amp;" + " b") == ids(clip, "a & b")
    lengths.clear()
    ids(clip, "a &" + 5000 * "amp;")
    assert 0 < sum(lengths) < 3e6  # One pass per level would read 5000 x 10,000 characters.


def test_only_openai_clip_parses_control_tokens_in_captions(clip_folder):
    text = "a <|endoftext|> b"
    assert ids(tokenize.clip(clip_folder), text) == [2512, 320, 2513, 321, 2513]
    assert ids(tokenize.clip(clip_folder, open_clip=True), text).count(2513) == 1


def test_clip_gives_the_reference_caption_its_saved_ids(clip_folder):
    """With 2,000 of 48,894 merges, the begin token is 2512 and the end token is 2513."""
    caption = [320, 1125, 539, 320, 2368]
    assert ids(tokenize.clip(clip_folder), "a photo of a cat") == [2512, *caption, 2513]
    assert ids(tokenize.clip(clip_folder), " A  Photo OF\na cat ") == [2512, *caption, 2513]


def test_open_clip_pads_with_0_and_openai_clip_with_the_end_token(clip_folder):
    for open_clip, pad in ((True, 0), (False, 2513)):
        tokens = tokenize.clip(clip_folder, open_clip=open_clip)(["a cat"], 6)
        assert tokens["text_ids"].tolist() == [[2512, 320, 2368, 2513, pad, pad]]


TEXTS = ("wow!", "hello!!! world", "!", "a!b", "caf\u00e9 &amp; it's!", "A <|endoftext|> b", "")
NAMED = {  # The padding in special_tokens_map.json and in tokenizer_config.json.
    "Stable Diffusion 2": ("!", "<|endoftext|>"),
    "the end token": ("<|endoftext|>", "<|endoftext|>"),
    "only in the config": (None, "<|endoftext|>"),
    "only in the map": ("!", None),
    "a dictionary": ({"content": "!", "lstrip": False}, None),
    "a word": ("b</w>", None),
    "a new token": ("[PAD]", "[PAD]"),
}


@pytest.fixture
def transformers_folder(clip_folder, tmp_path):
    """Return a folder with the tokenizer in the format of transformers, without a config."""
    vocab, merges = tokenize._read_open_ai(clip_folder / "bpe_simple_vocab_16e6.txt.gz")
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    lines = ["#version: 0.2", *(f"{a} {b}" for a, b in merges)]
    (tmp_path / "merges.txt").write_text("\n".join(lines) + "\n")
    return tmp_path


def name_padding(folder, named):
    for file, pad in zip(("special_tokens_map", "tokenizer_config"), named, strict=True):
        names = {"bos_token": "<|startoftext|>", "eos_token": "<|endoftext|>", "pad_token": pad}
        if pad:
            (folder / f"{file}.json").write_text(json.dumps(names))


@pytest.mark.parametrize("is_saved_again", [False, True])
@pytest.mark.parametrize("open_clip", [False, True])
@pytest.mark.parametrize("named", NAMED)
def test_the_files_of_a_folder_decide_its_padding_as_in_transformers(
    transformers_folder, tmp_path, named, open_clip, is_saved_again
):
    """transformers splits texts at the padding token, and does not clean them."""
    name_padding(transformers_folder, NAMED[named])
    theirs = transformers.CLIPTokenizer.from_pretrained(str(transformers_folder))
    if is_saved_again:
        theirs.save_pretrained(tmp_path / "again")
    folder = tmp_path / "again" if is_saved_again else transformers_folder
    ours = tokenize.clip(folder, open_clip=open_clip)
    expected = theirs(list(TEXTS), padding="max_length", max_length=40, truncation=True)
    assert ours(TEXTS, 40)["text_ids"].tolist() == expected["input_ids"]
    assert ours.pad == theirs.pad_token_id == expected["input_ids"][-1][-1]


@pytest.mark.parametrize("text", TEXTS)
def test_texts_are_cleaned_as_in_open_clip_if_no_file_names_the_padding(transformers_folder, clip_folder, text):
    mended = ids(tokenize.clip(clip_folder, open_clip=True), text)
    assert ids(tokenize.clip(transformers_folder, open_clip=True), text) == mended
    name_padding(transformers_folder, NAMED["the end token"])
    (transformers_folder / "open_clip_config.json").write_text("{}")
    assert ids(tokenize.clip(transformers_folder, open_clip=True), text) == mended


def test_open_clip_decodes_html_entities_also_beside_a_less_than_sign(clip_folder):
    tokenizer = tokenize.clip(clip_folder, open_clip=True)
    assert ids(tokenizer, "a < b &amp;amp; c") == ids(tokenizer, "a < b & c")


def test_tokenizer_json_gives_the_same_ids(t5, clip_folder, tmp_path):
    clip = tokenize.clip(clip_folder)
    clip._tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert ids(tokenize.clip(tmp_path), "a photo") == ids(clip, "a photo")


def test_threads_can_share_a_tokenizer(t5):
    results = []

    def work(length):
        for _ in range(50):
            results.append(t5([CORGI], length)["text_mask"].sum() == min(length, 17))

    threads = [threading.Thread(target=work, args=[length]) for length in (4, 9, 17, 30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 200


@pytest.mark.parametrize("make", [tokenize.t5, tokenize.clip])
def test_a_folder_without_a_tokenizer_is_an_error(make, tmp_path):
    with pytest.raises(FileNotFoundError, match=f"{tmp_path} holds n.*copy.*into it"):
        make(tmp_path)


def test_damaged_and_foreign_tokenizer_files_are_errors(tmp_path, clip_folder):
    (tmp_path / "spiece.model").write_bytes(b"\x0a\xff\xff")
    with pytest.raises(ValueError, match=r"spiece\.model is damaged or not a sentencepiece model"):
        tokenize.t5(tmp_path)
    (tmp_path / "spiece.model").unlink()
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="cannot read the tokenizer"):
        tokenize.t5(tmp_path)
    tokenize.clip(clip_folder)._tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match="is not T5's: it has no </s> or no <pad>"):
        tokenize.t5(tmp_path)


def test_embeddings_in_place_of_captions_are_an_error(t5):
    message = r"the data hold ndarray of shape \(3, 8\): set data.text to the field"
    with pytest.raises(ValueError, match=message):
        t5([np.zeros((3, 8))], 8)


@pytest.mark.skipif(not SHARED.is_dir(), reason="needs the whole tokenizer files")
def test_the_complete_tokenizer_files_give_the_reference_ids():
    assert ids(tokenize.t5(SHARED), CORGI) == CORGI_IDS
    clip = tokenize.clip(SHARED, open_clip=True)
    text = "Tom &amp;amp; Jerry's   café №5 — 日本 😀"
    body = [2435, 261, 9164, 568, 15304, 8604, 500, 276, 2005, 39121, 19277, 361, 7334]
    assert ids(clip, text) == [49406, *body, 49407]
    assert clip(["x " * 100], 77)["text_ids"][0].tolist() == [49406, *[343] * 75, 49407]
