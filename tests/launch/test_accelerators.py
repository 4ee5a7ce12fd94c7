"""Names of accelerators: hosts and chips as the clouds sell them, and mistakes."""

import pytest

from launch import accelerators


@pytest.mark.parametrize(
    ("name", "pool", "hosts", "per_host"),
    [
        ("v5p:4x4x4", "tpu-v5p-slice", 16, 4),
        ("v4:2x2x1", "tpu-v4-podslice", 1, 4),
        ("v5e:1x1", "tpu-v5-lite-podslice", 1, 1),
        ("v5e:2x4", "tpu-v5-lite-podslice", 1, 8),
        ("v6e:4x4", "tpu-v6e-slice", 4, 4),
        ("v6e:16x16", "tpu-v6e-slice", 64, 4),
        ("h100:1", "nvidia-h100-80gb", 1, 1),
        ("h200:8", "nvidia-h200-141gb", 1, 8),
        ("h100:64", "nvidia-h100-80gb", 8, 8),
    ],
)
def test_a_name_says_how_many_hosts_there_are(name, pool, hosts, per_host):
    found = accelerators.parse(name)
    assert (found.pool, found.hosts, found.chips_per_host) == (pool, hosts, per_host)
    assert found.is_tpu == name.startswith("v")
    assert found.topology == (name.partition(":")[2] if found.is_tpu else "")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("h10:8", "accelerator is 'h10': did you mean 'h100'?"),
        ("m4:1", "accelerator is 'm4': choose from v4, v5e, v5p, v6e, a100, "),
        ("v5p", "a v5p slice has 3 sizes, such as v5p:4x4x4"),
        ("v5p:4x4", "a v5p slice has 3 sizes, such as v5p:4x4x4"),
        ("v6e:64", "a v6e slice has 2 sizes, such as v6e:4x4"),
        ("v6e:1x3", "has 3 chips, which do not fill hosts of 4"),
        ("h100", "say how many, such as h100:8"),
        ("h100:12", "hosts have 8 GPUs, so take h100:8 or h100:16"),
    ],
)
def test_a_name_that_is_none_is_an_error_with_one_that_is(name, message):
    with pytest.raises(ValueError) as raised:
        accelerators.parse(name)
    assert message in str(raised.value)
