// A driver that launches one kernel on the host: y[i] = factor * x[i], and notes how it was asked.
#include <cstdio>
#include <cstring>

static unsigned attribute_bytes = 0;

extern "C" {
int cuModuleLoadData(void **module, const void *image) {
  *module = (void *)1;
  return memcmp(image, "\x7f" "ELF", 4) ? 200 : 0;
}
int cuModuleGetFunction(void **function, void *, const char *name) {
  *function = (void *)2;
  return strcmp(name, "twice") ? 500 : 0;
}
int cuFuncSetAttribute(void *, int which, int value) {
  attribute_bytes = which == 8 ? unsigned(value) : 0;
  return 0;
}
int cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, void *stream, void **given, void **extra) {
  if (function != (void *)2 || stream || extra) return 1;
  if (bx * by * bz > 1024 || (shared > 49152 && shared > attribute_bytes)) return 701;
  const float *x = *(const float **)given[0];
  float *y = *(float **)given[1], factor = *(float *)given[3];
  int n = *(int *)given[2];
  for (int at = 0; at < n && at < int(gx * bx); at++) y[at] = factor * x[at];
  if (n > 4) y[0] = float(gx), y[1] = float(gy * gz), y[2] = float(bx), y[3] = float(by * bz), y[4] = float(shared);
  return 0;
}
}
