"""Weighted and long prompts are read as by the web UI of AUTOMATIC1111, and weight embeddings.

The fixture holds 200 prompts with what the web UI's own functions make of them: the parts and
weights, and the number of tokens in each chunk. Its tokens are words and punctuation marks.
"""

import gzip
import json
import pathlib
import re

import jax.numpy as jnp
import numpy as np
import pytest

from diffusion_jax.text import clip, prompt_weights, tokenize
from tests import written_runs

FIXTURE = pathlib.Path("tests/fixtures/prompt_weights.json.gz")
CASES = json.loads(gzip.decompress(FIXTURE.read_bytes()))
BEGIN, END, PAD, COMMA, LENGTH = 200, 201, 0, 1, 77


class Words(tokenize.TextTokenizer):
    """A tokenizer with a token for each word and punctuation mark."""

    def __init__(self):
        self.begin, self.end, self.pad = BEGIN, END, PAD

    def split(self, texts):
        word_id = lambda word: COMMA if word == "," else 2 + sum(map(ord, word)) % 97
        return [[word_id(word) for word in re.findall(r"\w+|[^\w\s]", text)] for text in texts]

    def words(self, texts):
        return [[[id] for id in ids] for ids in self.split(texts)]


TOKENIZER = Words()


def rows(prompts, num_chunks=1, length=LENGTH):
    """Return ids and weights [B, N, L]."""
    tokens = prompt_weights.tokenize(TOKENIZER, length, prompts, num_chunks)
    return [tokens[name].reshape(len(prompts), -1, length) for name in ("text_ids", "text_weights")]


def test_prompts_are_split_into_weighted_parts_like_in_the_web_ui():
    assert len(CASES) == 200
    for case in CASES:
        assert [list(part) for part in prompt_weights.parse(case["prompt"])] == case["parts"]


def test_the_chunks_of_the_prompts_equal_those_of_the_web_ui():
    """The web UI moves the words after a comma to the next chunk if the comma is near its end."""
    num_compared = 0
    for case in CASES:
        try:
            (ids,), (weights,) = rows([case["prompt"]])
        except ValueError:
            continue
        num_compared += 1
        ends = (ids == END).argmax(1)
        assert (ends - 1).tolist() == case["starts"]
        inside = [np.arange(1, end) for end in ends]
        parts = [part for part in case["parts"] if part != ["BREAK", -1]]
        expected = [(id, w) for text, w in parts for id in TOKENIZER.split([text])[0]]
        given = [(ids[n, i], weights[n, i]) for n, at in enumerate(inside) for i in at]
        assert [id for id, _ in given] == [id for id, _ in expected]
        np.testing.assert_array_equal([w for _, w in given], np.float32([w for _, w in expected]))
        assert (ids[:, 0] == BEGIN).all()
        assert all((row[end + 1 :] == PAD).all() for row, end in zip(ids, ends, strict=True))
    assert num_compared > 190


def test_shorter_prompts_repeat_all_of_their_chunks():
    ids, weights = rows(["a b", "(a:1.5) BREAK b BREAK c", "a BREAK b"], length=6)
    a, b, c = (TOKENIZER.split([word])[0][0] for word in "abc")
    one = lambda id: [BEGIN, id, END, 0, 0, 0]
    assert ids[0].tolist() == 6 * [[BEGIN, a, b, END, 0, 0]]
    assert ids[1].tolist() == 2 * [one(a), one(b), one(c)]
    assert ids[2].tolist() == 3 * [one(a), one(b)]
    np.testing.assert_array_equal(weights[1, [0, 3]], np.float32(2 * [[1, 1.5, 1, 1, 1, 1]]))
    weights[1, [0, 3]] = 1
    assert (weights == 1).all()
    assert rows(["a"], num_chunks=2, length=6)[0].tolist() == [[one(a), one(a)]]


def test_embeddings_are_weighted_and_each_chunk_keeps_its_mean():
    rng = np.random.default_rng(0)
    x, w = rng.normal(1, 1, (3, 5, 4)).astype("f4"), rng.uniform(0.5, 1.5, (3, 5)).astype("f4")
    weighted = np.asarray(prompt_weights.weighted(jnp.asarray(x), jnp.asarray(w)))
    np.testing.assert_allclose(weighted.mean((1, 2)), x.mean((1, 2)), rtol=1e-6)
    ratios = weighted / (x * w[..., None])
    np.testing.assert_allclose(ratios, np.broadcast_to(ratios[:, :1, :1], x.shape), rtol=1e-6)
    same = prompt_weights.weighted(jnp.asarray(x), jnp.ones((3, 5)))
    np.testing.assert_array_equal(same, x)


def test_clip_encodes_each_chunk_alone():
    tower = clip.TextTower(300, 6, 8, 16, 2, 2, None, "gelu", None)
    ids, weights = rows(["(a:1.5) b BREAK c", "a"], length=6)
    params = written_runs.random_params(lambda key: tower.init(key, jnp.asarray(ids[0])))
    model = clip.of_tower(tower, params, TOKENIZER, 6)
    embeddings, mask = model.encode(params, prompt_weights.tokenize(TOKENIZER, 6, ["(a:1.5) b BREAK c", "a"]))
    assert embeddings.shape == (2, 12, 8) and mask.all()
    for n in range(2):
        plain = np.asarray(model.encode(params, {"text_ids": ids[:, n]})[0])
        scaled = plain * weights[:, n, :, None]
        scaled *= (plain.mean((1, 2)) / scaled.mean((1, 2)))[:, None, None]
        np.testing.assert_allclose(embeddings[:, 6 * n : 6 * n + 6], scaled, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("a (b:1.2.3)", r"the weight 1\.2\.3 in the prompt 'a \(b:1\.2\.3\)' is not a number"),
        ("a [b:c:0.5]", r"\[b:c:0\.5\] in the prompt 'a \[b:c:0\.5\]' is not supported: only"),
        ("a [b|c]", r"\[b\|c\] in the prompt .* is not supported"),
        ("a AND b", "AND in the prompt .* is not supported"),
        ("a <lora:b:1>", "<lora:b:1> in the prompt .* is not supported: .* LoRA files by --lora"),
        ("a <b:c>", "^<b:c> in the prompt"),
        ("a cat :1.5", "^:1.5 in the prompt"),
        ("a [b:-2.\n", "^:-2. in the prompt"),
        ("a,\nb: 2", "^: 2 in the prompt"),
    ],
)
def test_other_syntax_of_the_web_ui_is_refused(prompt, message):
    with pytest.raises(ValueError, match=message):
        prompt_weights.tokenize(TOKENIZER, LENGTH, [prompt])


@pytest.mark.parametrize(
    ("prompt", "first"),
    [
        ("[a:0.5]", "[a:0.5]"),
        ("x [a:b: .5] [c|d]", "[a:b: .5]"),
        ("[a:b:-1]", "[a:b:-1]"),
        ("[a:b:+1.]", "[a:b:+1.]"),
        ("[a:b:1e-1]", "[a:b:1e-1]"),
        ("[:0.5]", "[:0.5]"),
        ("[[[a]]:2]", "[[[a]]:2]"),
        ("[a:[b]:0.5]", "[a:[b]:0.5]"),
        ("[(a:2):3]", "[(a:2):3]"),
        ("([a|b]:1.2)", "[a|b]"),
        ("[a|[b]]", "[a|[b]]"),
        ("[|]", "[|]"),
        ("[x [a:b:2]:[c]:3]", "[a:b:2]"),
        (r"[a\]:0.5]", r"[a\]:0.5]"),
        ("((a][:b:c [d:3]", "[d:3]"),
        ("[[a:0.5]", "[a:0.5]"),
        ("[a:b:0.5 ]", ""),
        ("[a:b:x]", ""),
        ("[a:b:1.5.5]", ""),
        ("[a:b:c:0.5]", ""),
        ("[a:(b:0.5]", ""),
        ("[a|b:0.5]", ""),
        ("([a|b:0.5] [c:1]", ""),
        ("a|b [c:0.5]", ""),
        ("[c:0.5] (a|b", ""),
        ("[(a|b)]", ""),
        (r"\[a:0.5]", ""),
        ("[a:0.5] \\", ""),
        ("(" * 5000 + "[a]", ""),
    ],
)
def test_schedules_are_found_where_the_web_ui_finds_them(prompt, first):
    """The web UI's grammar found them. If it can be read in two ways, one of them counts."""
    assert prompt_weights.schedule(prompt) == first


ADDED = {"fox-style": 3, "easy(neg)": 2, "<cat>": 2, "big": 74}


@pytest.fixture(scope="module")
def added(tmp_path_factory):
    """CLIP's tokenizer with added words, and a function that names the tokens of a prompt."""
    folder = tmp_path_factory.mktemp("clip")
    merges = pathlib.Path("tests/fixtures/clip_merges_2000.txt.gz").read_bytes()
    (folder / "bpe_simple_vocab_16e6.txt.gz").write_bytes(merges)
    tokenizer = tokenize.clip(folder)
    ids = tokenizer.add_words(ADDED)
    of_id = dict(zip(ids, (f"{w} {n}" for w, num in ADDED.items() for n in range(num)), strict=True))

    def read(prompt):
        tokens = prompt_weights.tokenize(tokenizer, LENGTH, [prompt])["text_ids"].reshape(-1, LENGTH)
        inside = [row[1 : np.flatnonzero(row != tokenizer.end)[-1] + 1] for row in tokens]
        return [[of_id.get(int(id), "") for id in row] for row in inside]

    return tokenizer, read


FOX, NEG, CAT = ([f"{w} {n}" for n in range(ADDED[w])] for w in ("fox-style", "easy(neg)", "<cat>"))


@pytest.mark.parametrize(
    ("prompt", "chunks"),
    [
        ("fox-style a", [[*FOX, ""]]),
        ("a " * 72 + "fox-style", [[""] * 72 + FOX]),
        ("a " * 73 + "Fox-Style", [[""] * 73, FOX]),
        ("a " * 75 + "fox-style", [[""] * 75, FOX]),
        ("a " * 60 + ", " + "a " * 13 + "fox-style", [[""] * 74, FOX]),
        ("a " * 60 + ", " + "a " * 14 + "fox-style", [[""] * 61, [""] * 14 + FOX]),
        ("a " * 60 + ", " + "a " * 11 + "fox-style b", [[""] * 61, [""] * 11 + [*FOX, ""]]),
        ("a BREAK fox-style", [[""], FOX]),
        ("(a fox-style:1.2) fox-style.", [["", *FOX, *FOX, ""]]),
        ("a easy\\(neg\\) a", [["", *NEG, ""]]),
        ("a easy(neg)", [[""] * 5]),
        ("fox-style2", [[*FOX, ""]]),
        ("a<cat>a", [["", *CAT, ""]]),
        ("fox(-style)", [[""] * 4]),
    ],
)
def test_the_vectors_of_an_added_word_stay_together_as_in_the_web_ui(added, prompt, chunks):
    assert added[1](prompt) == chunks


@pytest.mark.parametrize(
    ("prompt", "cleaned"),
    [
        ("\u201ca\u201d it\u2019s", '"a" it\'s'),
        ("\uff46\uff55\uff4c\uff4c", "full"),
        ("\ufb01sh", "fish"),
        ("a &amp; b", "a & b"),
        ("\u00e9t\u00c3\u00a9", "\u00e9t\u00e9"),
        ("\u039f\u03a3", "\u03bf\u03c2"),
    ],
)
def test_prompts_with_weights_are_repaired_like_in_the_web_ui(added, prompt, cleaned):
    tokenizer, _ = added
    assert tokenizer.words([prompt]) == [[[id] for id in tokenizer.split([cleaned])[0]]]


def test_marked_returns_the_prompts_that_contain_weights_or_breaks():
    prompts = ["a", "(a)", r"\(a\)", "a [b", "a BREAK b", "BREAKS", "a:1.3)"]
    assert prompt_weights.marked(prompts) == ["(a)", "a [b", "a BREAK b"]
