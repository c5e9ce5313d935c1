#include "kernels/registry.h"

extern "C" {
// Bounds of the section, provided by the linker for each shared library.
[[gnu::visibility("hidden")]] extern const twinop::Record* const __start_twinop_records[];
[[gnu::visibility("hidden")]] extern const twinop::Record* const __stop_twinop_records[];
}

namespace twinop {

const Record* const* Registry::begin() const { return __start_twinop_records; }
const Record* const* Registry::end() const { return __stop_twinop_records; }

namespace {
// What the library is: read by tools beside the records.
constexpr std::string_view kBuild =
    "{\"twinop\":\"" TWINOP_VERSION "\",\"cuda_archs\":\"" TWINOP_CUDA_ARCHS
    "\",\"cuda_version\":\"" TWINOP_CUDA_VERSION "\"}";
template <std::size_t N>
constexpr std::array<char, N + 1> Cut(std::string_view text) {
  std::array<char, N + 1> result{};
  for (std::size_t i = 0; i < N; ++i) result[i] = text[i];
  return result;
}
[[gnu::section(".twinop"), gnu::used]] constexpr auto kBuildText = Cut<kBuild.size()>(kBuild);
}  // namespace
}  // namespace twinop
