"""Meshes, sharding rules and the check of the batch size, with all error messages."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from diffusion_jax.devices import sharding
from diffusion_jax.train import optimizer
from diffusion_jax.train.state import init_state


def leaf(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [((1, -1, 1), (1, 8, 1)), ((2, -1, 2), (2, 2, 2)), ((-1, 4, 1), (2, 4, 1)), ((1, 1, -1), (1, 1, 8))],
)
def test_mesh_size_minus_1_takes_the_remaining_devices(sizes, expected):
    mesh = sharding.make_mesh(*sizes)
    assert tuple(mesh.shape.items()) == tuple(zip(("replica", "fsdp", "tensor"), expected, strict=True))
    assert set(mesh.axis_types) == {AxisType.Auto}
    np.testing.assert_array_equal([d.id for d in mesh.devices.flat], np.arange(np.prod(expected)))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((1, 3, 1), r"mesh replica=1, fsdp=3, tensor=1 does not fit 8 devices: 3 does not divide 8"),
        ((1, -1, 16), r"fsdp=-1, tensor=16 does not fit 8 devices: 16 does not divide 8"),
        ((-1, -1, 1), "one may be -1"),
        ((1, 0, 1), r"fsdp=0, tensor=1: sizes must be positive"),
    ],
)
def test_mesh_sizes_that_do_not_divide_the_devices_are_an_error(sizes, message):
    with pytest.raises(ValueError, match=message):
        sharding.make_mesh(*sizes)


def test_the_first_matching_rule_applies_to_params_averages_and_moments():
    params = {"conv": {"kernel": jnp.ones((3, 3, 8, 16)), "bias": jnp.ones(16)}}
    tx = optimizer.adamw(optimizer.warmup_constant(0.1, 1))
    state = init_state(params, tx, [0.9])
    rules = [(r"conv/kernel$", P(None, None, None, "tensor")), (r"kernel", P("fsdp")), (r"", P())]
    placed = sharding.shardings(state, sharding.make_mesh(1, 4, 2), rules)
    trees = (placed.params, placed.ema["0.9"], placed.opt_state[0].mu, placed.opt_state[0].nu)
    assert [t["conv"]["kernel"].spec for t in trees] == [P(None, None, None, "tensor")] * 4
    assert [t["conv"]["bias"].spec for t in trees] == [P()] * 4
    assert jax.tree.structure(placed) == jax.tree.structure(state)


@pytest.mark.parametrize(
    ("shape", "spec"),
    [
        ((3, 3, 64, 128), P(None, None, None, "fsdp")),  # The largest axis.
        ((3, 3, 128, 66), P(None, None, "fsdp")),
        ((4096, 10), P("fsdp")),
        ((1023, 999), P()),  # No axis is divisible.
        ((16, 16), P()),  # Below fsdp_min_size.
    ],
)
def test_fsdp_shards_the_largest_divisible_axis_of_a_large_array(shape, spec):
    mesh = sharding.make_mesh(1, 8, 1)
    placed = sharding.shardings({"w": leaf(*shape)}, mesh, [("w", sharding.FSDP)], fsdp_min_size=512)
    assert placed["w"].spec == spec


@pytest.mark.parametrize(
    ("word", "shape", "spec"),
    [
        (sharding.OUTPUTS, (3, 3, 64, 128), P(None, None, "fsdp", "tensor")),
        (sharding.INPUTS, (3, 3, 128, 64), P(None, None, "tensor", "fsdp")),
        (sharding.OUTPUTS, (16, 4), P(None, "tensor")),  # Too small for fsdp.
        (sharding.OUTPUTS, (512, 3), P("fsdp")),  # 3 is not divisible by 4.
    ],
)
def test_outputs_and_inputs_rules_shard_their_axis_over_tensor(word, shape, spec):
    tree, rules = {"w": leaf(*shape)}, [("w", word)]
    placed = sharding.shardings(tree, sharding.make_mesh(1, 2, 4), rules, fsdp_min_size=512)
    assert placed["w"].spec == spec
    whole = sharding.shardings(tree, sharding.make_mesh(8, 1, 1), rules, fsdp_min_size=2**30)
    assert whole["w"].spec == P()


class Chip:
    """A device of a TPU slice, with the attributes that meshes read."""

    platform, device_kind, process_index = "fake", "fake", 0

    def __init__(self, id, slice_index):
        self.id, self.slice_index = id, slice_index


@pytest.mark.parametrize(("sizes", "spans"), [((2, 4, 1), (True, False, False)), ((1, -1, 2), (False, True, False))])
def test_the_replica_axis_or_else_fsdp_spans_tpu_slices(sizes, spans):
    chips = [Chip(i, i // 4) for i in range(8)]
    grid = sharding.make_mesh(*sizes, devices=chips).devices
    slices = np.vectorize(lambda chip: chip.slice_index)(grid)
    assert tuple((np.ptp(slices, axis=axis) > 0).any() for axis in range(3)) == spans
    assert sorted(chip.id for chip in grid.flat) == list(range(8))


def test_a_tensor_axis_that_spans_tpu_slices_is_an_error():
    chips = [Chip(i, i // 4) for i in range(8)]
    with pytest.raises(ValueError, match=r"fsdp=1, tensor=8 does not fit 2 slices: .* of 2, so"):
        sharding.make_mesh(1, 1, 8, devices=chips)


def test_an_array_without_a_sharding_rule_is_an_error_but_a_scalar_is_not():
    tree = {"conv1": {"kernel": leaf(3, 3, 8, 8)}, "count": leaf()}
    mesh = sharding.make_mesh()
    with pytest.raises(ValueError, match=r"no sharding rule matches the path 'conv1/kernel'"):
        sharding.shardings(tree, mesh, [(r"bias", P())])
    placed = sharding.shardings(tree, mesh, [(r"kernel", P())])
    assert placed["count"].spec == P()


def test_a_sharding_spec_that_does_not_fit_its_array_is_an_error():
    mesh = sharding.make_mesh(1, 2, 4)
    with pytest.raises(ValueError, match=r"axis 1 of 'w' with shape \(8, 6\) is not divisible by tensor = 4"):
        sharding.shardings({"w": leaf(8, 6)}, mesh, [("w", P(None, "tensor"))])
    with pytest.raises(ValueError, match=r"fsdp x tensor = 8: choose a mesh size that divides 12"):
        sharding.shardings({"w": leaf(12, 6)}, mesh, [("w", P(("fsdp", "tensor")))])
    with pytest.raises(ValueError, match=r"does not fit 'w' of shape \(8,\)"):
        sharding.shardings({"w": leaf(8)}, mesh, [("w", P(None, "tensor"))])


def test_a_batch_is_sharded_over_replica_and_fsdp():
    mesh = sharding.make_mesh(2, 2, 2)
    x = jax.device_put(np.arange(8), sharding.batch_sharding(mesh))
    assert {tuple(s.data.tolist()) for s in x.addressable_shards} == {(0, 1), (2, 3), (4, 5), (6, 7)}


def test_check_batch_names_every_value_and_the_nearest_sizes():
    mesh = sharding.make_mesh(2, 2, 2)
    sharding.check_batch(24, 3, mesh)
    message = r"batch_size 30 is not divisible by optimizer.micro_batch 3 x replica 2 x fsdp 2 = 12: .* 24 and 36"
    with pytest.raises(ValueError, match=message):
        sharding.check_batch(30, 3, mesh)
    with pytest.raises(ValueError, match=r"the nearest valid size is 12$"):
        sharding.check_batch(5, 3, mesh)
    with pytest.raises(ValueError, match=r"30 is not divisible by replica 2 x fsdp 2 = 4: "):
        sharding.check_batch(30, 0, mesh)
