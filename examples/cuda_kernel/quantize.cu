// The kernels as they were before they became an op: plain CUDA.

constexpr int kThreads = 256;

// The largest |x| that each block sees.
__global__ void block_maxima(const float* x, long long count, float* maxima) {
  __shared__ float most[kThreads];
  float own = 0.0f;
  const long long step = static_cast<long long>(gridDim.x) * kThreads;
  for (long long i = blockIdx.x * static_cast<long long>(kThreads) + threadIdx.x; i < count;
       i += step)
    own = fmaxf(own, fabsf(x[i]));
  most[threadIdx.x] = own;
  __syncthreads();
  for (int half = kThreads / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) most[threadIdx.x] = fmaxf(most[threadIdx.x], most[threadIdx.x + half]);
    __syncthreads();
  }
  if (threadIdx.x == 0) maxima[blockIdx.x] = most[0];
}

__global__ void quantize_all(const float* x, long long count, const float* maxima, int blocks,
                             float levels, signed char* q, float* scale) {
  float most = 0.0f;
  for (int k = 0; k < blocks; ++k) most = fmaxf(most, maxima[k]);
  const float unit = most > 0.0f ? most / levels : 1.0f;
  const long long i = blockIdx.x * static_cast<long long>(kThreads) + threadIdx.x;
  if (i < count) q[i] = static_cast<signed char>(rintf(x[i] / unit));
  if (i == 0) *scale = unit;
}
