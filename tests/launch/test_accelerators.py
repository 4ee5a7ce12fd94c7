"""Names of accelerators: hosts and chips as offered by the clouds, and errors."""

import pytest

from launch import accelerators


@pytest.mark.parametrize(
    ("name", "devices", "hosts", "per_host", "island"),
    [
        ("v5p:4x4x4", 64, 16, 4, 64),
        ("v4:2x2x1", 4, 1, 4, 4),
        ("v5e:1x1", 1, 1, 1, 1),
        ("v5e:2x4", 8, 1, 8, 8),
        ("v5e:4x8*2", 64, 8, 4, 32),
        ("v6e:16x16", 256, 64, 4, 256),
        ("h100:1", 1, 1, 1, 8),
        ("a100-80gb:4", 4, 1, 4, 8),
        ("h100:64", 64, 8, 8, 8),
        ("v7x:2x2x4", 32, 4, 8, 32),
        ("v5p:16x16x24", 6144, 1536, 4, 6144),
        ("gb200:8", 8, 2, 4, 72),
    ],
)
def test_an_accelerators_name_determines_its_devices_hosts_and_slices(name, devices, hosts, per_host, island):
    accelerator = accelerators.parse(name)
    assert (accelerator.devices, accelerator.hosts, accelerator.devices_per_host) == (devices, hosts, per_host)
    assert accelerator.island == island
    assert accelerator.devices == accelerator.hosts * accelerator.devices_per_host * accelerator.slices
    assert f"{accelerator.name}:{accelerator.topology}" == name.removesuffix("*2")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("h10:8", "accelerator is 'h10': did you mean 'h100'?"),
        ("m4:1", "accelerator is 'm4': choose from v4, v5e, v5p, v6e, v7x, a100, "),
        ("v5p", "a v5p slice has 3 dimensions, such as v5p:4x4x4, or v5p:4x4x4*2 for two"),
        ("v5p:4x4", "a v5p slice has 3 dimensions, such as v5p:4x4x4"),
        ("v5p:4x4x0", "a v5p slice has 3 dimensions, such as v5p:4x4x4"),
        ("v6e:64", "a v6e slice has 2 dimensions, such as v6e:4x4"),
        ("v6e:1x3", "'v6e:1x3': there is no such v6e slice; choose 1x1, 2x2, 2x4, 4x4, 4x8, 8x8, "),
        ("v5p:4x4x5", "choose 2x2x1, 2x2x2, 2x2x4, 2x4x4, 4x4x4, or three multiples of 4 in asc"),
        ("v5p:8x4x4", "'v5p:8x4x4': there is no such v5p slice"),
        ("v5p:16x16x28", "has 7168 chips, but a v5p slice has at most 6144"),
        ("h100", "give a number of GPUs, such as h100:8"),
        ("h100:8*2", "give a number of GPUs, such as h100:8"),
        ("gb200:6", "each host has 4 GPUs, so choose gb200:4 or gb200:8"),
        ("h100:12", "each host has 8 GPUs, so choose h100:8 or h100:16"),
    ],
)
def test_an_unknown_accelerator_is_an_error_that_suggests_a_valid_one(name, message):
    with pytest.raises(ValueError) as raised:
        accelerators.parse(name)
    assert message in str(raised.value)
