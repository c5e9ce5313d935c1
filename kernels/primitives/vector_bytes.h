// The width of a vector access.
#pragma once

namespace twinop {

inline constexpr int kVectorBytes = 16;  // the widest access to global memory of sm_75 to sm_90

}  // namespace twinop
