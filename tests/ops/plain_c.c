/* A custom-op library in C99 with nothing of twinop's but the C header: negate, in the domain
 * test_c. TABLE_VERSION, DOMAIN, SIGN, ZEROS and ENDS make variants of it
 * (tests/library/test_abi.py). */
#include <stdlib.h>
#include <string.h>

#include "twinop/abi.h"

#ifndef TABLE_VERSION
#define TABLE_VERSION TWINOP_ABI_VERSION
#endif
#ifndef DOMAIN
#define DOMAIN "test_c"
#endif
#ifndef SIGN
#define SIGN -1
#endif

#ifdef ZEROS
__attribute__((section(".rodata.zeros"), used, aligned(4096))) static const char kZeros[ZEROS] = {
    0};
#endif
#ifdef ENDS
__attribute__((constructor)) static void End(void) { abort(); }
#endif

static const char kSchema[] = "negate(Tensor x, float times=1.0) -> Tensor";

static void NegateRange(int64_t begin, int64_t end, void* argument) {
  const twinop_call* call = (const twinop_call*)argument;
  const float* x = (const float*)call->inputs[0].data;
  float* y = (float*)call->outputs[0].data;
  int64_t i;
  for (i = begin; i < end; ++i) y[i] = SIGN * (float)call->attributes[0].f * x[i];
}

static int32_t Negate(const twinop_call* call, twinop_error* error) {
  static const char kReason[] = "times is 0: nothing is left to negate";
  if (call->attributes[0].f == 0) {
    error->set(error, kReason, strlen(kReason));
    return 1;
  }
  call->context->parallel_for(call->context->pool, call->outputs[0].numel, 1024, NegateRange,
                              (void*)call);
  return 0;
}

static const twinop_op kNegate = {
    .struct_size = sizeof(twinop_op),
    .schema = kSchema,
    .dtypes = "float32",
    .domain = DOMAIN,
    .name = "negate",
    .onnx_name = "CustomNegate",
    .arguments = {{.name = "x", .kind = TWINOP_TENSOR, .shape = -1},
                  {.name = "times",
                   .kind = TWINOP_FLOAT,
                   .has_default = 1,
                   .default_float = 1.0,
                   .default_text = {"1.0", 3}}},
    .input_count = 1,
    .attribute_count = 1,
    .outputs = {{.name = "y", .shape = 0, .in_place = 0}},
    .output_count = 1,
    .returned_count = 1,
    .input_types = {{TWINOP_FLOAT32}},
    .output_types = {{TWINOP_FLOAT32}},
    .combination_count = 1,
    .limits = {{.attribute = 0, .rule = TWINOP_AT_LEAST, .number = 0}},
    .limit_count = 1,
    .nodes = {{.operation = TWINOP_SHAPE, .index = 0, .a = -1, .b = -1}},
    .node_count = 1,
    .rows = {.attribute = -1},
    .cpu = Negate};
static const twinop_op* const kOps[] = {&kNegate};
static const twinop_table kTable = {
    TABLE_VERSION, sizeof(twinop_table), "0.1.0", DOMAIN, 1, "none", 1, kOps};

const twinop_table* twinop_library(uint32_t wanted_abi) {
  (void)wanted_abi;
  return &kTable;
}

/* What tools read from the file. */
__attribute__((section(".twinop"), used)) static const char kLibraryText[] =
    "{\"twinop\":\"0.1.0\",\"abi\":3,\"domain\":\"" DOMAIN
    "\",\"domain_version\":1,\"cuda_archs\":\"none\",\"cuda_version\":\"\"}";
__attribute__((section(".twinop"), used)) static const char kNegateText[] =
    "{\"schema\":\"negate(Tensor x, float times=1.0) -> Tensor\",\"dtypes\":\"float32\","
    "\"in_place\":\"y = x\",\"limits\":\"times >= 0\",\"elementwise\":false,"
    "\"devices\":[\"cpu\"]}";
