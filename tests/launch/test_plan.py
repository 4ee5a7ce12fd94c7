"""The planner's command: communication, errors, and its numbers."""

import json

import numpy as np
import pytest

from launch import accelerators
from launch.planner import traffic
from tests.imagen_jax import commands

TINY = ("--config=configs/quickstart.py", "--config.unet.embed_dim=32", "--config.unet.cond_dim=32")


MESH = "mesh['a'=2,'b'=1,'c'=3], device_ids=([3,2]T(1,0)) {'c'}, x={1}"
SEND = "%s = (f32[4,8]{1,0}, u32[], token[]) send(%x, %t), channel_id=8, is_host_transfer=true, frontend_attributes="


@pytest.mark.parametrize(
    ("result", "devices", "kind", "size", "groups"),
    [
        ("f32[8,4]{1,0} all-gather(%x)", "[2,4]<=[8], x", "all-gather", 128, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("bf16[8]{0} all-reduce(%x)", "[2,2]<=[2,2]T(1,0)", "all-reduce", 16, [[0, 2], [1, 3]]),
        ("(f32[2]{0}, f32[3]{0}) all-reduce(%x, %y)", "{{0,1},{2,3}}, t", "all-reduce", 20, [[0, 1], [2, 3]]),
        ("f32[2]{0} reduce-scatter(%x)", "mesh['a'=2,'b'=2] {'a'}, d", "reduce-scatter", 16, [[0, 2], [1, 3]]),
        ("f32[2]{0} all-reduce(%x)", MESH, "all-reduce", 8, [[0, 2, 4], [1, 3, 5]]),
        ("(f32[2], f32[8]) all-gather-start(%x)", "[1,4]<=[4]", "all-gather", 32, [[0, 1, 2, 3]]),
    ],
)
def test_collectives_are_read_from_hlo_text(result, devices, kind, size, groups):
    (collective,) = traffic.of_hlo(f"%a = {result}, replica_groups={devices}")
    assert (collective.kind, collective.size) == (kind, size)
    np.testing.assert_array_equal(collective.groups, groups)


@pytest.mark.parametrize(
    ("transfer", "kind", "size"), [("ALL_REDUCE", "all-reduce", 128), ("ALL_GATHER", "all-gather", 256)]
)
def test_transfers_between_slices_are_read_from_hlo_text(transfer, kind, size):
    attributes = f'_xla_megascale_target="{{1,2}}x{{0:3}}",_xla_megascale_transfer_type="{transfer}"'
    handler = '_xla_host_transfer_handler_name="xla_megascale_runtime"'
    (collective,) = traffic.of_hlo(f"{SEND}{{{handler},{attributes}}}", 4)
    assert (collective.kind, collective.size) == (kind, size)
    np.testing.assert_array_equal(collective.groups, [[0, 4], [1, 5], [2, 6], [3, 7]])


def test_an_all_to_all_between_two_slices_is_read_from_hlo_text():
    target = "{{100000,100001,200000,200001},{100002,100003,200002,200003}}"
    attributes = f'_xla_megascale_target={target},_xla_megascale_transfer_type="ALL_TO_ALL"'
    (collective,) = traffic.of_hlo(f"{SEND}{{{attributes}}}", 4)
    assert (collective.kind, collective.size) == ("all-to-all", 128)
    np.testing.assert_array_equal(collective.groups, [[0, 1, 4, 5], [2, 3, 6, 7]])


def test_collectives_with_the_same_channel_count_once():
    line = "%{} = f32[8] all-gather(%x), channel_id={}, replica_groups={{{{0,1}}}}, x"
    text = "\n".join(line.format(name, channel) for name, channel in [("a", 1), ("b", 1), ("c", 2)])
    assert [c.size for c in traffic.of_hlo(text)] == [32, 32]


def test_unreadable_groups_of_devices_are_an_error():
    with pytest.raises(ValueError, match=r"cannot parse the groups of devices .*nobody.*: use --fast"):
        traffic.of_hlo("%a = f32[8] all-reduce(%x), replica_groups=nobody, x")


def test_the_slower_of_nvlink_and_network_determines_the_time():
    one_node, nodes = np.arange(8)[None], np.arange(16)[None]
    gather = lambda groups: [traffic.Collective("all-gather", 8_000_000_000, groups)]
    target = accelerators.parse("h100:16")
    # 7/8 of 8 GB arrive over NVLink at 450 GB/s.
    assert traffic.seconds(gather(one_node), target) == pytest.approx(7e9 / 450e9)
    # Each node receives half over 8 network cards of 50 GB/s: 10 ms. NVLink 15/16: 16.7 ms.
    assert traffic.seconds(gather(nodes), target) == pytest.approx(7.5e9 / 450e9)
    # One GPU per node uses one network card.
    pair = [traffic.Collective("all-reduce", 8_000_000_000, np.array([[0, 8]]))]
    assert traffic.seconds(pair, target) == pytest.approx(8e9 / 50e9)
    assert traffic.bytes_by_kind(pair) == {"all-reduce": 8_000_000_000}


def plan(*arguments):
    """Return what a fast plan prints."""
    ended = commands.run("launch.plan", *arguments, "--fast")
    assert ended.code == 0, ended.err
    return ended.out


def numbers(*arguments):
    return json.loads(plan(*arguments, "--json").splitlines()[-1])


def test_the_numbers_of_a_plan_are_consistent():
    f = numbers(*TINY, "--target=h100:16", "--config.batch_size=64")
    assert f["mesh"] == {"replica": 1, "fsdp": 16, "tensor": 1}
    need = f["bytes_per_device"]
    assert need["ema"] == need["parameters"]
    # Two moments, the update count, and two scalars of the schedule.
    assert need["optimizer"] == 2 * need["parameters"] + 12
    parts = ("parameters", "optimizer", "ema", "frozen", "batch", "temporary")
    assert need["total"] == sum(need[part] for part in parts)
    assert f["fits"] and f["largest_batch"] > 64
    seconds = f["seconds"]
    arithmetic = 64 / 16 * f["tflop_per_sample"] * 1e12 / (0.4 * 989.4e12)
    assert seconds["arithmetic"] == pytest.approx(arithmetic)
    exposed = sum(seconds[part] for part in ("arithmetic", "update", "communication"))
    assert f["samples_per_second"]["exposed"] == pytest.approx(64 / exposed)
    assert f["device_hours"] == pytest.approx(16 * 1200 * exposed / 3600)
    assert f["disk"]["checkpoint"] == 4 * (4 * f["parameters"]) + 4 * 5
    assert f["disk"]["checkpoints_kept"] == 2


def test_the_plan_says_if_the_model_does_not_fit_and_suggests_settings():
    text = plan("--config=configs/quickstart.py", "--config.batch_size=8388608", "--target=v5e:2x2")
    for advice in ("DOES NOT FIT", "unet.remat=True: global batches of up to", "--config.optimizer.micro_batch="):
        assert advice in text


@pytest.mark.parametrize(
    ("target", "batch", "warning"),
    [
        ("v5e:2x2", 28, "micro batch has fewer than 8 samples"),
        ("v5e:2x2", 32, ""),
        ("h100:4", 8, "each GPU has 2 samples per pass, so expect less than 40 % MFU"),
        ("h100:4", 64, ""),
    ],
)
def test_a_plan_warns_about_few_samples_per_device(target, batch, warning):
    text = plan(*TINY, f"--target={target}", f"--config.batch_size={batch}")
    assert warning in text
    assert bool(warning) == ("samples per pass" in text or "micro batch has" in text)


@pytest.mark.slow
def test_a_plan_for_nemos_gpus_gets_nemos_batch_size_per_gpu():
    """NeMo trains base64_500m with batch size 4096 on 32 A100 GPUs of 80 GB, 128 samples each.

    This machine cannot compile cuDNN's attention, so the plan uses another one.
    """
    f = numbers("--config=configs/base64_500m.py", "--target=a100-80gb:32", "--config.unet.attention_impl=cudnn")
    assert f["fits"] and f["micro_batch"] == 128 and f["accumulate"] == 1
    assert "so the plan uses blockwise attention" in f["notes"][-1]
    # The state of 8.4 GB would fit on each device, but each would have to update all of it.
    advice = f["advice"][-1]
    assert advice.startswith("--config.mesh.replica=1 --config.mesh.fsdp=32 --config.optimizer.micro_batch=128")
    assert "; plain data parallelism " in advice


@pytest.mark.slow
def test_the_advice_explains_why_plain_data_parallelism_does_not_fit():
    """The state of base64_2b takes 35 GB."""
    f = numbers("--config=configs/base64_2b.py", "--target=a100:8")
    advice = f["advice"][-1]
    assert not f["fits"] and "--config.mesh.fsdp=8 --config.optimizer.micro_batch=" in advice
    assert "plain data parallelism does not fit: the state alone is 32.4 GiB" in advice
