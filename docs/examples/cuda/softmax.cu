/* launch
grid = ["(rows + THREADS - 1) // THREADS"]
block = ["THREADS"]
[macros]
THREADS = [128, 32]
*/
extern "C" __global__ void row_softmax(const float* x, float* y, int rows, int columns) {
  int row = blockIdx.x * THREADS + threadIdx.x;
  if (row >= rows) return;
  x += (long long)row * columns;
  y += (long long)row * columns;
  float most = x[0];
  for (int i = 1; i < columns; ++i) most = fmaxf(most, x[i]);
  float sum = 0;
  for (int i = 0; i < columns; ++i) sum += expf(x[i] - most);
  for (int i = 0; i < columns; ++i) y[i] = expf(x[i] - most) / sum;
}
