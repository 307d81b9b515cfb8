"""Operations of flag_gems whose kernels `triton.autotune` tunes; its own tuner class is no part of this.

They are called directly, never registered in PyTorch, so that nothing else of a workload runs on them.
"""

from __future__ import annotations

from functools import partial

import torch

from benchmarks.lib.libraries.workloads.tensors import DEVICE, random_floats, random_tensor


def layer_norm(rows: int, width: int) -> None:
    """Layer normalisation of [rows, width], and its gradient."""
    from flag_gems.ops import layer_norm as forward
    from flag_gems.ops import layer_norm_backward as backward

    x, weight, bias = (random_tensor(*shape, grad=False) for shape in ((rows, width), (width,), (width,)))
    y, mean, rstd = forward(x, [width], weight, bias)
    backward(torch.randn_like(y), x, [width], mean, rstd, weight, bias, [True, True, True])


def rms_norm(rows: int, width: int) -> None:
    """RMS normalisation of [rows, width], wider than a block."""
    from flag_gems.ops import rms_norm as forward

    forward(random_tensor(rows, width, grad=False), [width], random_tensor(width, grad=False))


def softmax_gradient(rows: int, width: int) -> None:
    """The gradient of a softmax over rows."""
    from flag_gems.ops import softmax_backward as backward

    shares = torch.softmax(random_floats(rows, width, grad=False), -1)
    backward(torch.randn_like(shares), shares, -1, torch.float32)


def log_softmax_gradient(rows: int, width: int) -> None:
    """The gradient of a log-softmax over rows."""
    from flag_gems.ops import log_softmax_backward as backward

    logs = torch.log_softmax(random_floats(rows, width, grad=False), -1)
    backward(torch.randn_like(logs), logs, -1, torch.float32)


def scaled_softmax(batch: int, heads: int, queries: int, keys: int) -> None:
    """A scaled softmax of attention scores, and its gradient."""
    from flag_gems.ops.scaled_softmax import scaled_softmax_backward, scaled_softmax_forward

    shares = scaled_softmax_forward(random_tensor(batch, heads, queries, keys, grad=False), 0.125)
    scaled_softmax_backward(torch.randn_like(shares), shares, 0.125)


def cross_entropy(rows: int, words: int, smoothing: float) -> None:
    """The cross entropy of [rows, words] and its gradient."""
    from flag_gems.fused import cross_entropy_loss

    target = torch.randint(0, words, (rows,), device=DEVICE)
    cross_entropy_loss(random_floats(rows, words), target, label_smoothing=smoothing).backward()


def batch_norm(images: int, channels: int, side: int) -> None:
    """Batch normalisation while training, and its gradient."""
    from flag_gems.ops import batch_norm as forward
    from flag_gems.ops import batch_norm_backward as backward

    x = random_floats(images, channels, side, side, grad=False)
    weight, bias = random_floats(channels, grad=False), random_floats(channels, grad=False)
    mean, variance = torch.zeros(channels, device=DEVICE), torch.ones(channels, device=DEVICE)
    y, *saved = forward(x, weight, bias, mean, variance, True)
    backward(torch.randn_like(y), x, weight, mean, variance, *saved, True, 1e-5, [True, True, True])


def instance_norm(images: int, channels: int, side: int) -> None:
    """Instance normalisation, and its gradient."""
    from flag_gems.fused import instance_norm as forward

    y = forward(random_floats(images, channels, side, side), random_floats(channels), random_floats(channels))
    y.backward(torch.randn_like(y))


def convolution(images: int, channels: int, filters: int, side: int) -> None:
    """A convolution by 3x3 filters, and its gradient."""
    from flag_gems.ops import conv2d

    x = random_tensor(images, channels, side, side, dtype=torch.float16)
    y = conv2d(x, random_tensor(filters, channels, 3, 3, dtype=torch.float16, scale=0.05), None, 1, 1)
    y.backward(torch.randn_like(y))


def max_pooling(images: int, channels: int, side: int) -> None:
    """Maxima of 3x3 windows, and their gradient."""
    from flag_gems.ops import max_pool2d_backward, max_pool2d_with_indices

    x = random_floats(images, channels, side, side, grad=False)
    y, places = max_pool2d_with_indices(x, 3, 2, 1)
    max_pool2d_backward(torch.randn_like(y), x, places, [3, 3], [2, 2], [1, 1], [1, 1], False)


def average_pooling(images: int, channels: int, side: int) -> None:
    """Means of 2x2 windows, and their gradient."""
    from flag_gems.ops import avg_pool2d, avg_pool2d_backward

    x = random_floats(images, channels, side, side, grad=False)
    y = avg_pool2d(x, 2, 2)
    avg_pool2d_backward(torch.randn_like(y), x, [2, 2], [2, 2], [0, 0], False, True, None)


def upsampling(images: int, channels: int, side: int) -> None:
    """Twice the height and width by nearest neighbours."""
    from flag_gems.ops import upsample_nearest2d

    upsample_nearest2d(random_tensor(images, channels, side, side, grad=False), (2 * side, 2 * side))


def vector_norms(rows: int, width: int) -> None:
    """Norms of rows: Euclidean, of order 1, and the largest entry."""
    from flag_gems.ops import vector_norm

    x = random_floats(rows, width, grad=False)
    for order in (2, 1, float("inf")):
        vector_norm(x, order, [1])


def spread(rows: int, width: int) -> None:
    """Variances with means, and standard deviations, of rows."""
    from flag_gems.ops import std, var_mean

    x = random_floats(rows, width, grad=False)
    var_mean(x, [1])
    std(x, [1])


def matrix_vector(rows: int, width: int) -> None:
    """A vector plus a matrix times a vector."""
    from flag_gems.ops import addmv

    vectors = random_tensor(rows, grad=False), random_tensor(width, grad=False)
    addmv(vectors[0], random_tensor(rows, width, grad=False), vectors[1])


def upper_triangle(*shape: int) -> None:
    """The upper triangles of one matrix, or of several."""
    from flag_gems.ops import triu

    triu(random_floats(*shape, grad=False))


def weight_norm(rows: int, width: int, dimension: int) -> None:
    """A weight as direction and length, and the gradient."""
    from flag_gems.ops import weight_norm_interface as forward
    from flag_gems.ops import weight_norm_interface_backward as backward

    v = random_floats(rows, width, grad=False)
    g = random_floats(*((rows, 1) if dimension == 0 else (1, width)), grad=False)
    w, norms = forward(v, g, dimension)
    backward(torch.randn_like(w), v, g, norms, dimension)


def kronecker_product(side: int) -> None:
    """The Kronecker product of two square matrices."""
    from flag_gems.ops import kron

    kron(random_floats(side, side, grad=False), random_floats(side, side, grad=False))


def count_nonzero(rows: int, width: int) -> None:
    """How many entries of each row are not zero."""
    from flag_gems.ops import count_nonzero as count

    count(random_floats(rows, width, grad=False), 1)


def stacking(rows: int, width: int) -> None:
    """Four matrices on top of one another."""
    from flag_gems.ops import vstack

    vstack([random_tensor(rows, width, grad=False) for _ in range(4)])


def stream_mixing(tokens: int, streams: int, width: int) -> None:
    """Return what a layer writes back into several residual streams."""
    from flag_gems.fused.mhc.mhc_post import mhc_post

    x, residual = random_tensor(tokens, width, grad=False), random_tensor(tokens, streams, width, grad=False)
    scale, combination = (random_floats(tokens, streams, n, grad=False) for n in (1, streams))
    mhc_post(x, residual, scale, combination)


def expert_sum(tokens: int, experts: int, width: int) -> None:
    """The sum over the experts of each token."""
    from flag_gems.fused.moe_sum import moe_sum

    x = random_tensor(tokens, experts, width, dtype=torch.float16, grad=False)
    moe_sum(x, torch.empty(tokens, width, dtype=torch.float16, device=DEVICE))


def scaled_matmul(m: int, n: int, k: int) -> None:
    """A product of 8-bit floats with a scale per row and column."""
    from flag_gems.fused.cutlass_scaled_mm import cutlass_scaled_mm_sm90_fp8

    a, b = (random_tensor(*shape, grad=False).to(torch.float8_e4m3fn) for shape in ((m, k), (n, k)))
    scales = (random_floats(*shape, grad=False).abs() for shape in ((m, 1), (1, n)))
    out = torch.empty(m, n, dtype=torch.bfloat16, device=DEVICE)
    cutlass_scaled_mm_sm90_fp8(out, a, b.t(), *scales)


def attention(tokens: int, heads: int, groups: int) -> None:
    """Causal softmax attention without gradients."""
    from flag_gems.ops.flash_api import mha_fwd

    q, k, v = (random_tensor(2, tokens, n, 128, grad=False) for n in (heads, groups, groups))
    mha_fwd(q, k, v, None, None, 0.0, 128**-0.5, True, -1, -1, 0.0, False, disable_splitkv=True)


WORKLOADS = {
    "layer_norm_8192x4096": partial(layer_norm, 8192, 4096),
    "cross_entropy_4096x32000": partial(cross_entropy, 4096, 32000, 0.0),
    "vector_norms_8192x4096": partial(vector_norms, 8192, 4096),
    "matrix_vector_8192x8192": partial(matrix_vector, 8192, 8192),
    "scaled_softmax_2048": partial(scaled_softmax, 2, 16, 2048, 2048),
    "convolution_32x64x56": partial(convolution, 32, 64, 128, 56),
    "max_pooling_32x64x112": partial(max_pooling, 32, 64, 112),
    "rms_norm_4096x8192": partial(rms_norm, 4096, 8192),
    "stream_mixing_8192x4x2048": partial(stream_mixing, 8192, 4, 2048),
    "softmax_gradient_8192x4096": partial(softmax_gradient, 8192, 4096),
    "weight_norm_rows_4096x4096": partial(weight_norm, 4096, 4096, 0),
    "scaled_matmul_4096": partial(scaled_matmul, 4096, 4096, 4096),
    "spread_8192x4096": partial(spread, 8192, 4096),
    "instance_norm_16x64x64": partial(instance_norm, 16, 64, 64),
    "upper_triangle_8192": partial(upper_triangle, 8192, 8192),
    "attention_2048": partial(attention, 2048, 16, 16),
    "average_pooling_32x64x112": partial(average_pooling, 32, 64, 112),
    "kronecker_product_96": partial(kronecker_product, 96),
    "count_nonzero_4096x4096": partial(count_nonzero, 4096, 4096),
    "stacking_2048x4096": partial(stacking, 2048, 4096),
    "batch_norm_32x64x56": partial(batch_norm, 32, 64, 56),
    "log_softmax_gradient_8192x4096": partial(log_softmax_gradient, 8192, 4096),
    "expert_sum_4096x4x2048": partial(expert_sum, 4096, 4, 2048),
    "upsampling_16x64x64": partial(upsampling, 16, 64, 64),
    "layer_norm_512x1024": partial(layer_norm, 512, 1024),
    "matrix_vector_1024x1024": partial(matrix_vector, 1024, 1024),
    "cross_entropy_smooth_8192x1000": partial(cross_entropy, 8192, 1000, 0.1),
    "upper_triangle_64x512": partial(upper_triangle, 64, 512, 512),
    "weight_norm_columns_1024x1024": partial(weight_norm, 1024, 1024, 1),
    "layer_norm_1024x8192": partial(layer_norm, 1024, 8192),
    "rms_norm_64x16384": partial(rms_norm, 64, 16384),
    "vector_norms_512x1024": partial(vector_norms, 512, 1024),
}
