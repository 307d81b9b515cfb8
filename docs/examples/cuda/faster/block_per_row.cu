/* launch
grid = ["rows"]
block = ["THREADS"]
[macros]
THREADS = [256, 128, 512]
*/
template <typename Combine>
__device__ float over_block(float value, Combine combine) {
  __shared__ float parts[THREADS / 32];
  for (int lane = 16; lane > 0; lane /= 2) value = combine(value, __shfl_xor_sync(~0u, value, lane));
  __syncthreads();
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = value;
  __syncthreads();
  value = parts[0];
  for (int warp = 1; warp < THREADS / 32; ++warp) value = combine(value, parts[warp]);
  return value;
}

extern "C" __global__ void row_softmax(const float* x, float* y, int rows, int columns) {
  x += (long long)blockIdx.x * columns;
  y += (long long)blockIdx.x * columns;
  float most = x[0];
  for (int i = threadIdx.x; i < columns; i += THREADS) most = fmaxf(most, x[i]);
  most = over_block(most, [](float a, float b) { return fmaxf(a, b); });
  float sum = 0;
  for (int i = threadIdx.x; i < columns; i += THREADS) sum += expf(x[i] - most);
  sum = over_block(sum, [](float a, float b) { return a + b; });
  for (int i = threadIdx.x; i < columns; i += THREADS) y[i] = expf(x[i] - most) / sum;
}
