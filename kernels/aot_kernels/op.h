// What the sources that `twinop build` writes for Python files include.
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>

#include "twinop/aot_kernels/kernels.h"
#include "twinop/aot_kernels/run.h"
#include "twinop/library.h"
#include "twinop/record/registry.h"

// TWINOP_EMBED(name, "mish_kernel.sm_90.cubin"): the content of a file beside this source, in the
// folder <source>.files. TWINOP_EMBEDDED(name) is its std::string_view.
#define TWINOP_EMBED(name, file)                                                         \
  asm(".pushsection .rodata\n.balign 64\n" #name ":\n.incbin \"" __FILE__ ".files/" file \
      "\"\n" #name "_end:\n.byte 0\n.popsection");                                       \
  extern "C" [[gnu::visibility("hidden")]] const char name[], name##_end[]
#define TWINOP_EMBEDDED(name) std::string_view(name, static_cast<std::size_t>(name##_end - name))

// TWINOP_AOT_OP(mish, record), in namespace twinop, registers an op. The namespace mish_op has
//
//   void Plan(aot_kernels::PlanRunner& run)                  describes a call
//   const Device& Load(const twinop_call& call)       loads the kernels of such calls
#define TWINOP_AOT_OP(id, record)                                                \
  TWINOP_RECORD(id, (record).state<aot_kernels::StateOf<id##_op::Load>>(), true) \
  TWINOP_ENTRY(id, nullptr, aot_kernels::Launch<Plan>)

namespace twinop::aot_kernels {

template <const Device& (*kLoad)(const twinop_call&)>
struct StateOf : State {
  static Status Create(const Call& call, std::unique_ptr<StateOf>* state) {
    state->reset(new StateOf{{&kLoad(call)}});
    return {};
  }
};

template <void (*kPlan)(PlanRunner&)>
Status Launch(const twinop_call* call) {
  PlanRunner run(*call, PlanRunner::Mode::kLaunch);
  kPlan(run);
  return {};
}

// For Record::scratch.
template <void (*kPlan)(PlanRunner&)>
std::int64_t ScratchBytes(const Call& call) {
  PlanRunner run(call, PlanRunner::Mode::kScratch);
  kPlan(run);
  return run.scratch();
}

}  // namespace twinop::aot_kernels
