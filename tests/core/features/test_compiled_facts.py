"""Facts of compiled candidates: what PTX and resource usage say."""

from __future__ import annotations

from forecast_autotune.features.ptx import PTX_FACT_NAMES, ptx_facts, resource_usage

PTX = """
//
.version 8.7
.visible .entry kernel(
	.param .u64 .ptr .global .align 1 kernel_param_0
)
{
	.reg .pred 	%p<3>;
	ld.param.b64 	%rd1, [kernel_param_0];
	@%p1 ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];
	ld.global.nc.b16 { %rs1 }, [ %rd2 + 0 ];
	@!%p2 st.global.v2.b64 [ %rd3 + 0 ], { %rd4, %rd5 };
	cp.async.cg.shared.global [ %r5 + 0 ], [ %rd6 + 0 ], 0x10, %r7;
	cp.async.commit_group;
	ld.shared.b32 	%r8, [%r9];
	ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r10, %r11, %r12, %r13}, [%r14];
	st.shared.v4.b32 	[%r9], {%r1, %r2, %r3, %r4};
	bar.sync 	0;
	shfl.sync.bfly.b32 	%r15, %r16, 16, 31, -1;
	mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%f1, %f2}, {%r1, %r2}, {%r5, %r6}, {%f1, %f2};
	wgmma.fence.sync.aligned;
	wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {%f5}, %rd7, %rd8, 1, 1, 1, 0, 0;
	ex2.approx.f32 	%f6, %f7;
	div.full.f32 	%f8, %f6, %f7;
	red.global.relaxed.gpu.add.f32 [%rd9], %f8;
	@%p1 bra 	$L__BB0_2;
	ret;
}
"""


def test_ptx_is_counted_by_what_moves_computes_and_waits() -> None:
    result = ptx_facts(PTX)
    assert set(result) == set(PTX_FACT_NAMES)
    assert {k: v for k, v in result.items() if k != "instructions"} == {
        "global_loads": 2,
        "global_load_bytes": 16 + 2,
        "global_stores": 1,
        "global_store_bytes": 16,
        "async_copies": 1,
        "shared_loads": 2,
        "shared_stores": 1,
        "barriers": 1,
        "shuffles": 1,
        "tensor_ops": 2,
        "special": 2,
        "atomics": 1,
        "branches": 1,
    }
    assert result["instructions"] >= 18


def test_usage_takes_the_largest_of_several_functions() -> None:
    text = """Resource usage:
 Common:
  GLOBAL:0
 Function helper:
  REG:24 STACK:0 SHARED:0 LOCAL:0 CONSTANT[0]:528
 Function kernel:
  REG:255 STACK:96 SHARED:1024 LOCAL:0 CONSTANT[0]:560
"""
    assert resource_usage(text) == {"registers": 255, "stack": 96, "static_shared": 1024}
    assert resource_usage("nothing of the kind") == {}
