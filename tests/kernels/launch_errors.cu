// What launch.cuh makes of failures of the runtime (failing_runtime.cpp), its own and others'.
#include <cstdio>

#include "twinop/primitives/launch.cuh"

extern cudaError_t next, last;
static __global__ void Kernel() {}

int main() {
  using namespace twinop;
  Context context;
  Call call;
  call.context = &context;
  const auto say = [](const char* what, const Status& status) {
    std::printf("%s: %s, left: %d\n", what, status.ok() ? "ok" : status.message().c_str(), last);
  };
  const auto launch = [&](int shared, int cluster = 1, int threads = 32) {
    return LaunchKernel(Kernel, {1, dim3(threads), 1, shared, cluster}, call);
  };
  last = cudaErrorInvalidDevice;  // of another library
  say("after another's failure", launch(0));
  last = cudaSuccess;
  next = cudaErrorInvalidConfiguration;
  say("a launch that fails", launch(0));
  say("the next", launch(0));
  next = cudaErrorInvalidValue;
  say("memory that is refused", launch(64 << 10));
  say("the next", launch(64 << 10));
  say("memory that no block has", launch(100 << 10));
  say("a cluster that nothing holds", launch(0, 2));
  next = cudaErrorLaunchOutOfResources;
  say("too many registers", launch(0, 1, 1024));
  Tensor tensor;
  next = cudaErrorInvalidValue;
  say("a copy that fails", CopyTensor(call, tensor, nullptr));
  context.device_index = 1;
  next = cudaErrorInvalidDevice;
  say("a question that fails", launch(0));
  say("the next", launch(0));
  next = cudaErrorInvalidDevice;
  say("a device that is missing", OnDevice(call, [](const Call&) { return Status(); }));
}
