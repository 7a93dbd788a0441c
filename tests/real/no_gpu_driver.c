/*
 * Stands in for libcuda.so.1 on machines without an NVIDIA driver. SGLang's
 * kernel package is linked against the driver even where only its CPU kernels
 * run; the loader then needs these names, and nothing ever calls them. Whoever
 * does is told that there is no device.
 */
enum { NO_DEVICE = 100 }; /* CUDA_ERROR_NO_DEVICE */

#define ABSENT(name) \
  int name(void) { return NO_DEVICE; }

ABSENT(cuInit)
ABSENT(cuDriverGetVersion)
ABSENT(cuGetErrorString)
ABSENT(cuGetProcAddress_v2)
ABSENT(cuPointerGetAttribute)
ABSENT(cuStreamCreate)
ABSENT(cuCtxPushCurrent_v2)
ABSENT(cuCtxPopCurrent_v2)
ABSENT(cuCtxFromGreenCtx)
ABSENT(cuGreenCtxCreate)
ABSENT(cuGreenCtxDestroy)
ABSENT(cuGreenCtxGetDevResource)
ABSENT(cuDeviceGetDevResource)
ABSENT(cuDevResourceGenerateDesc)
ABSENT(cuDevSmResourceSplitByCount)
