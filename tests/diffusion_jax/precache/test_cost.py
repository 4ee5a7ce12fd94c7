"""The table of costs: numbers that can be worked out by hand."""

import numpy as np

from diffusion_jax.precache import cost


def test_bytes_are_rows_with_their_scales_and_the_index():
    assert cost.bytes_per_caption(20, 1024, "int8") == 20 * (1024 + 2 * 16) + 72
    assert cost.bytes_per_caption(20, 1024, "bfloat16") == 20 * 2048 + 72
    assert cost.bytes_per_caption(20, 1024, "float32") == 20 * 4096 + 72


def test_a_typical_caption_of_t5_takes_more_than_8_times_less_than_padded():
    padded = 2 * 128 * 1024
    assert padded / cost.bytes_per_caption(20, 1024, "int8") > 12
    assert padded / cost.bytes_per_caption(30, 1024, "int8") > 8


def test_the_table_says_disk_and_the_price_of_encoding_online():
    text = cost.table(
        np.array([10, 30]), width=1024, max_tokens=128, format="int8", captions=5000,
        free=10**12, flops=1.003e12, parameters=4_864_791_552,
    )  # fmt: skip
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert lines[0].startswith(
        "5,000 captions; of 2 of them 20.0 tokens on average, 30 at most, of"
    )
    assert lines[2] == "1 21,192 B 41,032 B 81,992 B 262,144 B"
    assert lines[3] == "5,000 106 MB 205 MB 410 MB 1.31 GB"
    assert lines[6] == "676,000,000 14.3 TB 27.7 TB 55.4 TB 177 TB"
    assert "int8, 12.4 times smaller than padded bf16; at most 106 MB" in text
    assert "1 TB free" in text
    assert "4,865 M parameters, 1.00 TFLOP for each image" in text
    assert "50 % of a step of base64_500m, 20 % of a step of base64_2b" in text
