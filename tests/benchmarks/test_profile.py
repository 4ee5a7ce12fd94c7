"""Cycles read from compiled programs, and a step as the sum of its blocks."""

import importlib.util
import json

import jax
import pytest

from benchmarks.profile import blocks, cycles, hlo, pallas, step
from configs import base64_500m, emoji64_transformer, quickstart
from diffusion_jax.devices import flops
from diffusion_jax.train import memory
from launch.planner import tasks
from tests.imagen_jax import commands
from tests.launch.planner.test_compiling import last_two_numbers, run

# A fusion with a convolution, a copy, a loop over a reduction, a gather without overlap,
# one that overlaps with a fusion, and a Pallas kernel whose metadata contains a line break.
TEXT = """HloModule jit_step, is_scheduled=true

%fused.1 (p: bf16[2,8], q: f32[8,8]) -> bf16[2,8] {
  %p = bf16[2,8]{1,0:T(8,128)(2,1)} parameter(0)
  ROOT %c = bf16[2,8]{1,0:T(8,128)(2,1)} convolution(%p, %p), dim_labels=bf_io->bf
}

%body (s: (s32[])) -> (s32[]) {
  %r = f32[8]{0:T(128)} reduce(%x, %y), metadata={op_name="jit(step)/jvp(UNet)/mid_attn/norm/sum"}, backend_config={"window_config":{"estimated_cycles":"50"}}
}

ENTRY %main (a: bf16[2,8]) -> bf16[2,8] {
  %a = bf16[2,8]{1,0:T(8,128)(2,1)} parameter(0)
  %f = bf16[2,8]{1,0:T(8,128)(2,1)} fusion(%a), kind=kOutput, calls=%fused.1, metadata={op_name="jit(step)/transpose(jvp(UNet))/down_1_0_res/conv1/conv"}, backend_config={"window_config":{"estimated_cycles":"1000"}}
  %copy.1 = bf16[2,8]{0,1:T(8,128)(2,1)} copy(%f), metadata={op_name="jit(step)/jvp(UNet)/down_1_1_res/conv1/conv"}, backend_config={"window_config":{"estimated_cycles":"300"}}
  %w = (s32[]) while(%t), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"4"}}
  %d = f32[4,4]{1,0} dot(%g1, %g2), metadata={op_name="jit(step)/jvp(UNet)/emb/dot"}
  %g1 = f32[4,4]{1,0} add(%a, %a), metadata={op_name="jit(step)/update/add"}, backend_config={"window_config":{"estimated_cycles":"20"}}
  %g2 = f32[4,4]{1,0} add(%a, %a)
  %s1 = (f32[1,4]{1,0}, f32[4,4]{1,0}) all-gather-start(%a), replica_groups=[1,4]<=[4]
  %e1 = f32[4,4]{1,0} all-gather-done(%s1)
  %s2 = (bf16[1,4]{1,0}, bf16[4,4]{1,0}) all-gather-start(%a), replica_groups=[1,4]<=[4]
  %f2 = bf16[2,8]{1,0:T(8,128)(2,1)} fusion(%a), kind=kOutput, calls=%fused.1
  %e2 = bf16[4,4]{1,0} all-gather-done(%s2)
  %splash_mha_fwd_x.1 = (f32[512,128]{1,0}, bf16[2,8,1024,64]{3,2,1,0}) custom-call(%a), custom_call_target="tpu_custom_call", operand_layout_constraints={s8[1,2,3]{2,1,0}, s8[1,2,3]{2,1,0}, bf16[2,8,1024,64]{3,2,1,0}, bf16[2,8,1152,64]{3,2,1,0}}, frontend_attributes={kernel_metadata={
"xprof_metadata":"{}"
}}, metadata={op_name="jit(step)/jvp(UNet)/mid_attn/splash"}
  ROOT %out = bf16[2,8]{1,0} all-reduce(%f2), replica_groups=[1,4]<=[4]
}
"""  # noqa: E501


def test_cycles_are_multiplied_by_the_number_of_runs():
    rows = [*cycles.costs(TEXT, lambda kernel: 7.0)]
    assert [(row.cycles, row.kind, row.layer) for row in rows] == [
        (1000, "matrix unit", "down_1_res"),
        (300, "copies", "down_1_res"),
        (4 * 50, "norm", "mid_attn"),
        (20, "optimizer", ""),
        (7, "attention kernel", "mid_attn"),
    ]


def test_a_product_fused_with_an_all_reduce_counts_as_matrix_unit():
    """The compiler for v5e fuses them like this."""
    beside = "  %sum = f32[8]{0} all-reduce(%q), replica_groups=[1,4]<=[4]\n  ROOT %c ="
    rows = cycles.costs(TEXT.replace("  ROOT %c =", beside), lambda kernel: 7.0)
    assert next(rows)[:2] == (1000, "matrix unit")


LIBTPUS = """
%cond (c: (s32[])) -> pred[] {
  %limit = s32[]{:T(128)} constant(4)
  %c = (s32[]{:T(128)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%c), index=0
  ROOT %lt = pred[]{:T(512)} compare(%i, %limit), direction=LT, metadata={op_name="while/cond/lt"}
}

ENTRY"""


def test_a_loops_trip_count_is_read_from_its_condition_if_necessary():
    text = TEXT.replace(', backend_config={"known_trip_count":{"n":"4"}}', "")
    rows = lambda text: [*cycles.costs(text, lambda kernel: 7.0)]
    assert rows(text.replace("\nENTRY", LIBTPUS)) == rows(TEXT)
    assert rows(text)[2].cycles == 50


_LOOP = """
import jax, jax.numpy as jnp
from diffusion_jax.devices import sharding
from benchmarks.profile import cycles
from launch.planner import compiling
compiling.prepare(1)
where = sharding.replicated(compiling.one_device("v5e"))
shape = jax.ShapeDtypeStruct((512, 512), jnp.bfloat16, sharding=where)
for turns in (3, 6):
    loop = lambda x, w: jax.lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, length=turns)[0]
    text = compiling.compile_for(jax.jit(loop).lower(shape, shape), "v5e").text
    rows = cycles.costs(text, lambda kernel: 0.0)
    print(sum(row.cycles for row in rows if row.kind == "matrix unit"))
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
def test_on_a_tpu_six_iterations_cost_twice_as_much_as_three():
    three, six = last_two_numbers(_LOOP)
    assert six == 2 * three > 0


def test_the_grid_of_a_kernel_is_read_from_its_operands():
    (instruction,) = [i for i, _ in hlo.read(TEXT).run() if cycles.is_kernel(i)]
    # 2 x 8 rows and heads, 2 blocks of queries, and 3 blocks of keys.
    assert pallas.grid_of(instruction) == pallas.KernelGrid(1024, 1152, 64, 2 * 8 * 2 * 3, backward=False, masked=False)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["v5e", "v5p", "v6e"])
@pytest.mark.parametrize("sizes", [("256", "333", "64", "masked"), ("4096", "4096", "128", "unmasked")])
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
def test_splash_attention_and_its_gradient_compile_for_tpus(kind, sizes):
    ended = run("-m", "benchmarks.profile.pallas", kind, *sizes)
    assert ended.returncode == 0, ended.stderr
    forward, backward = json.loads(ended.stdout.splitlines()[-1])
    # A lower bound is the number of cycles of the matrix products over 128 lanes. They have
    # 256 x 384 or 512 x 4,096 scores, in two products forwards and five backwards.
    assert 500 < forward < backward < 30_000


@pytest.mark.parametrize("config", [quickstart, emoji64_transformer, pytest.param(base64_500m, marks=pytest.mark.slow)])
def test_the_flops_of_a_models_blocks_sum_to_those_of_its_loss(config):
    model = tasks.read(config.get_config().to_dict())
    parts = blocks.record(model, 2)
    work = sum(len(block.names) * blocks.work(block) for block in parts)
    frozen, batch = memory.shapes(model.task.frozen), memory.batch_of(model.example, 2)
    loss = jax.make_jaxpr(model.task.loss)(model.state.params, frozen, batch, memory.abstract_keys(2))
    assert work == pytest.approx(3 * flops.count(loss.jaxpr), rel=1e-6)
    if config is base64_500m:
        (fused,) = [b for b in parts if b.label == "FusedAttention 2x32x32x512, 2x128x512, 2x128"]
        assert len(fused.names) == 7
        assert sum(len(block.names) for block in parts) == 65


def test_a_profile_counts_each_block_as_often_as_it_is_called():
    costliest = [cycles.Cost(3e6, "matrix unit", "", "conv")]
    one = blocks.Profile("v5e", "a", {"norm": 1e6, "matrix unit": 3e6}, {}, 4e11, 0, 1.0, costliest, 0)
    update = one._replace(label="update", cycles={"optimizer": 2e6}, flops=0.0, costliest=[])
    names = ["down_0_0_res", "down_0_1_res", "mid_res_0"]
    block = blocks.NetworkBlock("a", names, None, {}, ((), {}), True)  # pyright: ignore
    profile = step.total([(block, one)], update, passes=2, kind="v5e")
    assert profile.cycles == {"matrix unit": 18e6, "norm": 6e6, "optimizer": 2e6}
    assert profile.layers == {"down_0_res": 16e6, "mid_res_0": 8e6, "update": 2e6}
    assert profile.mfu == pytest.approx(6 * 4e11 / 2**17 / 26e6)
    assert profile.update == pytest.approx(2e6 / 1.503e9, rel=1e-3)
    assert profile.costliest[0].description == "6 x a: conv"
    text = dict(step.table(profile))
    assert "26.0 M cycles per step, 17.3 ms at 1.50 GHz" in text["compiler's estimate"]
    assert "Nothing was measured" in text["compiler's estimate"]


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
def test_a_profile_is_printed_for_a_tpu_without_the_hardware():
    flags = ("--config=configs/quickstart.py", *commands.config_flags("unet.embed_dim=32 batch_size=8"))
    ended = commands.run("benchmarks.profile", *flags, "--target=v5e:1x1")
    assert ended.code == 0, ended.err
    assert "the sum of 10 blocks and the update" in ended.out and "Nothing was measured" in ended.out
