// rope on the CPU.
#pragma once

#include <algorithm>
#include <cstdint>

#include "twinop/math/cpu.h"
#include "twinop/ops/rope/params.h"
#include "twinop/primitives/cpu_features.h"

namespace twinop::rope {

inline constexpr std::int64_t kGrainElements = 1 << 15;

// Pairs in a buffer. For 16-bit types, the compiler vectorises three loops that convert, rotate and
// round, but not one loop that does all three.
inline constexpr std::int64_t kBlock = 64;

// Reads cos and sin of `count` pairs.
template <class Number>
using ReadAngles = void(const RopeParams& p, const void* cos, const void* sin, std::int64_t first,
                        std::int64_t count, Number* cos_out, Number* sin_out);

template <class Number, class Table>
void ReadAnglesOf(const RopeParams& p, const void* cos, const void* sin, std::int64_t first,
                  std::int64_t count, Number* cos_out, Number* sin_out) {
  for (std::int64_t i = 0; i < count; ++i) {
    cos_out[i] = Number(ToCompute(static_cast<const Table*>(cos)[first + i]));
    const Number angle_sin = Number(ToCompute(static_cast<const Table*>(sin)[first + i]));
    sin_out[i] = p.is_inverse ? -angle_sin : angle_sin;
  }
}

template <class T>
struct Operands {
  struct Rows {
    std::int64_t heads;
    const T* x;
    T* y;  // may be x
  };
  Rows rows[2];  // q and k
  const void *cos, *sin;
  ReadAngles<Compute<T>>* read_angles;
};

template <class T, bool kInterleaved>
struct RotateTokens {
  using Number = Compute<T>;
  static constexpr std::int64_t kStep = kInterleaved ? 2 : 1;

  TWINOP_INLINE static void RotateWithOneNan(Number cos, Number sin, Number* a, Number* b) {
    ApplyRope(cos, sin, a, b);
    *a = OneNan(*a);
    *b = OneNan(*b);
  }

  // Rotates `count` pairs of one head.
  TWINOP_INLINE static void Head(std::int64_t pairs, std::int64_t count, const Number* cos,
                                 const Number* sin, const T* x, T* y) {
    const std::int64_t other = kInterleaved ? 1 : pairs;
    if constexpr (sizeof(T) > 2) {
#pragma GCC ivdep
      for (std::int64_t i = 0; i < count; ++i) {
        Number a = x[i * kStep], b = x[i * kStep + other];
        RotateWithOneNan(cos[i], sin[i], &a, &b);
        y[i * kStep] = a;
        y[i * kStep + other] = b;
      }
    } else {
      Number a[kBlock], b[kBlock];
      for (std::int64_t i = 0; i < count; ++i) {
        a[i] = ToCompute(x[i * kStep]);
        b[i] = ToCompute(x[i * kStep + other]);
      }
      for (std::int64_t i = 0; i < count; ++i) RotateWithOneNan(cos[i], sin[i], &a[i], &b[i]);
      for (std::int64_t i = 0; i < count; ++i) {
        Round(a[i], &y[i * kStep]);
        Round(b[i], &y[i * kStep + other]);
      }
    }
  }

  template <Level kLevel>
  TWINOP_INLINE static void Run(const RopeParams& p, const Operands<T>& operands,
                                std::int64_t begin, std::int64_t end) {
    Number cos[kBlock], sin[kBlock];
    for (std::int64_t token = begin; token < end; ++token) {
      for (std::int64_t first = 0; first < p.pairs; first += kBlock) {
        const std::int64_t count = std::min(kBlock, p.pairs - first);
        operands.read_angles(p, operands.cos, operands.sin, TableRow(p, token) * p.pairs + first,
                             count, cos, sin);
        for (const auto& rows : operands.rows) {
          for (std::int64_t head = token * rows.heads; head < (token + 1) * rows.heads; ++head) {
            const std::int64_t at = head * p.head_size + first * kStep;
            Head(p.pairs, count, cos, sin, rows.x + at, rows.y + at);
          }
        }
      }
      const std::int64_t rotated = 2 * p.pairs;
      for (const auto& rows : operands.rows) {
        if (rotated == p.head_size || rows.x == rows.y) continue;
        for (std::int64_t head = token * rows.heads; head < (token + 1) * rows.heads; ++head)
          std::copy(rows.x + head * p.head_size + rotated, rows.x + (head + 1) * p.head_size,
                    rows.y + head * p.head_size + rotated);
      }
    }
  }
};

template <class Op>
Status Run(const CallOf<Op>& call) {
  RopeParams p;
  TWINOP_RETURN_IF_ERROR(ParamsOf(call, &p));
  return DispatchTypes(call, [&](auto type, auto table) {
    using T = typename decltype(type)::Type;
    using Table = typename decltype(table)::Type;
    using Function = void(const RopeParams&, const Operands<T>&, std::int64_t, std::int64_t);
    const Operands<T> operands{
        {{p.q_heads, InputData<T>(call, "q"_name), OutputData<T>(call, "turned_q"_name)},
         {p.k_heads, InputData<T>(call, "k"_name), OutputData<T>(call, "turned_k"_name)}},
        InputData<Table>(call, "cos"_name),
        InputData<Table>(call, "sin"_name),
        ReadAnglesOf<Compute<T>, Table>};
    Function* const rotate = p.is_interleaved ? ByLevel<RotateTokens<T, true>, Function>::Choose()
                                              : ByLevel<RotateTokens<T, false>, Function>::Choose();
    const std::int64_t width = (p.q_heads + p.k_heads) * p.head_size;
    const std::int64_t grain = kGrainElements / std::max<std::int64_t>(width, 1) + 1;
    call.context->ParallelFor(p.tokens, grain, [&](std::int64_t begin, std::int64_t end) {
      rotate(p, operands, begin, end);
    });
    return Status();
  });
}

}  // namespace twinop::rope
