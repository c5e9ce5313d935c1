// swiglu, swiglu_packed -> torch.ops.custom_domain.swiglu, CustomSwiglu ...
#pragma once

#include "kernels/elementwise.h"
#include "kernels/math/math.h"

namespace twinop {

// y = silu(gate) * x, with silu(v) = v * sigmoid(v).
template <class T>
struct Swiglu {
  TWINOP_INLINE T operator()(T x, T gate) const { return Sigmoid(gate, gate) * x; }
};

// silu'(v) = sigmoid(v) * (1 + v * (1 - sigmoid(v)))
template <class T>
struct SwigluBackward {
  TWINOP_INLINE elementwise::Results<T, 2> operator()(T grad_y, T x, T gate) const {
    const T sigmoid = Sigmoid(gate);
    const T slope = sigmoid * (T(1) + gate * (T(1) - sigmoid));
    return {{grad_y * (gate * sigmoid), grad_y * x * slope}};
  }
};

// One tensor that holds both: of its 2n columns the first n are the gate, the others x.
struct Packed {
  Tensor x, gate;
  std::int64_t sizes[kMaxRank];
  std::int64_t strides[kMaxRank];

  explicit Packed(const Tensor& packed) : gate(packed) {
    const std::size_t rank = packed.rank;
    std::int64_t dense = 1;
    for (std::size_t i = rank; i-- > 0; dense *= packed.sizes[i]) {
      sizes[i] = packed.sizes[i];
      strides[i] = packed.strides != nullptr ? packed.strides[i] : dense;
    }
    sizes[rank - 1] /= 2;
    gate.sizes = sizes;
    gate.strides = strides;
    gate.numel /= 2;
    x = gate;
    x.data = gate.as<char>() +
             sizes[rank - 1] * strides[rank - 1] * static_cast<std::int64_t>(Info(gate.dtype).size);
  }
  Packed(const Packed&) = delete;
  Packed& operator=(const Packed&) = delete;
};

template <Status (*kSwiglu)(const Call&)>
Status SwigluPacked(const Call& call) {
  const Packed packed(call.inputs[0]);
  const Tensor inputs[] = {packed.x, packed.gate};
  Call halves = call;
  halves.inputs = inputs;
  return kSwiglu(halves);
}

template <Status (*kSwigluBackward)(const Call&)>
Status SwigluPackedBackward(const Call& call) {
  const Packed packed(call.inputs[1]);
  const Packed grad(call.outputs[0]);
  const Tensor inputs[] = {call.inputs[0], packed.x, packed.gate};
  Tensor outputs[] = {grad.x, grad.gate};
  Call halves = call;
  halves.inputs = inputs;
  halves.outputs = outputs;
  return kSwigluBackward(halves);
}

// clang-format off
// Second derivatives, in torch's operators.
#define TWINOP_SILU(v) "torch.nn.functional.silu(" v ")"
#define TWINOP_SILU_SLOPE(v) "torch.sigmoid(" v ") * (1 + " v " * (1 - torch.sigmoid(" v ")))"
#define TWINOP_SILU_CURVE(v) \
  "torch.sigmoid(" v ") * (1 - torch.sigmoid(" v ")) * (2 + " v " * (1 - 2 * torch.sigmoid(" v ")))"
// The two halves of a packed tensor.
#define TWINOP_GATE(v) v ".chunk(2, -1)[0]"
#define TWINOP_VALUE(v) v ".chunk(2, -1)[1]"

TWINOP_OP(swiglu,
          Record("swiglu(Tensor x, Tensor gate) -> Tensor")
              .elementwise()
              .in_place("y = x")
              .autocast("widest")
              .gradient("x, gate = swiglu_backward(grad, x, gate)"),
          elementwise::Cpu<Swiglu>, elementwise::Cuda<Swiglu>)

TWINOP_OP(swiglu_backward,
          Record("swiglu_backward(Tensor grad_y, Tensor x, Tensor gate) -> (Tensor grad_x, Tensor grad_gate)")
              .elementwise()
              .gradient("grad_y = grad_grad_x * " TWINOP_SILU("gate")
                        " + grad_grad_gate * x * " TWINOP_SILU_SLOPE("gate") "; "
                        "x = grad_grad_gate * grad_y * " TWINOP_SILU_SLOPE("gate") "; "
                        "gate = grad_grad_x * grad_y * " TWINOP_SILU_SLOPE("gate")
                        " + grad_grad_gate * grad_y * x * " TWINOP_SILU_CURVE("gate")),
          elementwise::Cpu<SwigluBackward>, elementwise::Cuda<SwigluBackward>)

TWINOP_OP(swiglu_packed,
          Record("swiglu_packed(Tensor x) -> Tensor")
              .shapes("y = x[:-1] + [x[-1] // 2]")
              .input_shapes("x = x[:-1] + [x[-1] // 2 * 2]")
              .rows("-1")
              .gradient("x = swiglu_packed_backward(grad, x)"),
          SwigluPacked<elementwise::Cpu<Swiglu>>, SwigluPacked<elementwise::Cuda<Swiglu>>)

TWINOP_OP(swiglu_packed_backward,
          Record("swiglu_packed_backward(Tensor grad_y, Tensor x) -> Tensor grad_x")
              .shapes("grad_x = x")
              .input_shapes("grad_y = x[:-1] + [x[-1] // 2]; x = x[:-1] + [x[-1] // 2 * 2]")
              .rows("-1")
              .gradient("grad_y = " TWINOP_VALUE("grad") " * " TWINOP_SILU(TWINOP_GATE("x"))
                        " + " TWINOP_GATE("grad") " * " TWINOP_VALUE("x") " * " TWINOP_SILU_SLOPE(TWINOP_GATE("x")) "; "
                        "x = torch.cat(("
                        TWINOP_VALUE("grad") " * grad_y * " TWINOP_SILU_SLOPE(TWINOP_GATE("x"))
                        " + " TWINOP_GATE("grad") " * grad_y * " TWINOP_VALUE("x") " * " TWINOP_SILU_CURVE(TWINOP_GATE("x")) ", "
                        TWINOP_GATE("grad") " * grad_y * " TWINOP_SILU_SLOPE(TWINOP_GATE("x")) "), -1)"),
          SwigluPackedBackward<elementwise::Cpu<SwigluBackward>>,
          SwigluPackedBackward<elementwise::Cuda<SwigluBackward>>)
// clang-format on

#undef TWINOP_SILU
#undef TWINOP_SILU_SLOPE
#undef TWINOP_SILU_CURVE
#undef TWINOP_GATE
#undef TWINOP_VALUE

}  // namespace twinop
