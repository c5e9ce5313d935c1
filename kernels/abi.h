/* The C interface between a custom-op library and the runtimes' adapters.
 *
 * A library exports twinop_library(), which returns its table of ops. Two adapters read the table:
 * the one for ONNX Runtime (ort_customop/), which is linked into each library, and the one for
 * torch (torch_op/), which is a library of its own. Nothing else crosses the boundary: no C++ type,
 * no memory that the other side frees, and no exception.
 *
 * The header is C99. Authors of ops in C++ include kernels/record/registry.h instead.
 */
#ifndef TWINOP_KERNELS_ABI_H_
#define TWINOP_KERNELS_ABI_H_

#include <stddef.h>
#include <stdint.h>

/* C++ code sees the structures of kernels/record/call.h, which derive from those below and add
 * functions, but no data. */
#ifdef __cplusplus
namespace twinop {
enum class DType : int32_t;
struct Tensor;
struct Attribute;
struct Context;
}  // namespace twinop
#define TWINOP_TYPE(cpp, c) cpp
extern "C" {
#else
#define TWINOP_TYPE(cpp, c) c
#endif

/* Changes when a caller of the previous version would misread a structure. A field that is added at
 * the end of twinop_op or twinop_table does not change it: struct_size says whether it is there. */
#define TWINOP_ABI_VERSION 1

/* Element types (twinop_tensor.dtype). */
enum {
  TWINOP_NONE = 0,
  TWINOP_FLOAT32 = 1,
  TWINOP_FLOAT16 = 2,
  TWINOP_BFLOAT16 = 3,
  TWINOP_FLOAT64 = 4,
  TWINOP_INT8 = 5,
  TWINOP_INT16 = 6,
  TWINOP_INT32 = 7,
  TWINOP_INT64 = 8,
  TWINOP_UINT8 = 9,
  TWINOP_BOOL = 10,
  TWINOP_COMPLEX64 = 11,
  TWINOP_COMPLEX128 = 12,
  TWINOP_UINT16 = 13,
  TWINOP_UINT32 = 14,
  TWINOP_UINT64 = 15,
  TWINOP_FLOAT8_E4M3FN = 16,
  TWINOP_FLOAT8_E5M2 = 17
};

/* Device types (twinop_context.device_type). */
enum { TWINOP_CPU = 0, TWINOP_CUDA = 1 };

/* A view of a framework's tensor. */
typedef struct twinop_tensor {
  void* data;
  const int64_t* sizes;
  const int64_t* strides; /* in elements; null: contiguous */
  int64_t numel;
  size_t rank;
  TWINOP_TYPE(twinop::DType, int32_t) dtype;
  int32_t present; /* 0 where an optional input is absent */
} twinop_tensor;

/* The value of an attribute; which field holds it depends on the attribute's kind. */
typedef struct twinop_attribute {
  int64_t i;           /* int; bool as 0 or 1 */
  double f;            /* float, rounded to fp32: ONNX has no other */
  const char* s;       /* str, NUL-terminated */
  size_t s_size;       /* its length in bytes */
  const int64_t* ints; /* int[] */
  size_t count;        /* its number of entries */
} twinop_attribute;

/* Works on the range [begin, end); may run on several threads at once. */
typedef void (*twinop_range)(int64_t begin, int64_t end, void* argument);

/* Where a call runs. */
typedef struct twinop_context {
  int32_t device_type;
  int32_t device_index;
  void* stream; /* cudaStream_t; null on the CPU */
  /* Splits [0, count) into ranges of at least `grain` and runs them on the framework's threads. */
  void (*parallel_for)(void* pool, int64_t count, int64_t grain, twinop_range range,
                       void* argument);
  void* pool;
} twinop_context;

typedef struct twinop_call {
  const TWINOP_TYPE(twinop::Tensor, twinop_tensor) * inputs; /* in the schema's order */
  TWINOP_TYPE(twinop::Tensor, twinop_tensor) * outputs;      /* allocated by the caller */
  const TWINOP_TYPE(twinop::Attribute, twinop_attribute) * attributes;
  void* scratch; /* twinop_op.scratch_size bytes; aligned to 64 bytes, on CUDA to 256 */
  void* state;   /* what twinop_op.create made; null where the op has no state */
  const TWINOP_TYPE(twinop::Context, twinop_context) * context;
  size_t input_count; /* more than the schema lists where the last input repeats (Tensor[]) */
  int64_t* counts; /* the launcher writes here the sizes that come from data (twinop_op.sizes), in
                      the device's memory; null: it writes none */
} twinop_call;

/* Receives the text of a failure. The text is valid during the call only. The caller of the
 * functions below owns the structure and may extend it. */
typedef struct twinop_error {
  void (*set)(struct twinop_error* self, const char* text, size_t size);
} twinop_error;

/* Functions return 0 for success. Any other value is a failure, whose text they passed to
 * error->set. */

/* Queues the work and returns. It neither allocates device memory nor synchronizes. */
typedef int32_t (*twinop_launch)(const twinop_call* call, twinop_error* error);

/* One op. Texts are NUL-terminated and never null. kernels/record/record.h documents them. */
typedef struct twinop_op {
  size_t struct_size; /* sizeof(twinop_op) when the library was compiled */
  const char* schema;
  const char* dtypes;
  const char* shapes;
  const char* input_shapes;
  const char* limits;
  const char* in_place;
  const char* choices;
  const char* rows;
  const char* layout; /* "elementwise" or "contiguous" */
  const char*
      memory; /* inputs in host memory, outputs that may be absent: "n = host; s = optional" */
  twinop_launch cpu; /* null: the op does not run on this device */
  twinop_launch cuda;
  /* Computes the bytes of scratch memory that a call needs from the shapes of its inputs, its
   * attributes, the addresses of its tensors and its device; null: none. It reads no data. */
  int32_t (*scratch_size)(const twinop_call* call, int64_t* bytes, twinop_error* error);
  /* Makes the state of one kernel; null: the op has none. A kernel is a node of a session or, in
   * torch, one combination of attributes and device. `call` has the attributes, the context without
   * a stream, and the constant inputs, in the memory in which a launch gets them. Other inputs are
   * not present; where the runtime knows their dtypes, they have these. */
  int32_t (*create)(const twinop_call* call, void** state, twinop_error* error);
  void (*destroy)(void* state);
  /* Gives the op's function body as an ONNX model, for the CPU of ONNX Runtime where `cpu` is null;
   * null: the op has none. `call` has the attributes, and the dtypes and ranks of the inputs that
   * are present. The model has the function <domain>.Custom<Op>, and a graph without nodes whose
   * inputs and outputs have the schema's names. The adapter adds the node that calls the function
   * with the attributes, so one model serves all their values. The bytes stay valid while the
   * library is loaded. Calls that one model serves get the same address. */
  int32_t (*body)(const twinop_call* call, const void** model, size_t* size, twinop_error* error);
  /* Not 0: the `body` is another model: for this call's attributes, with the nodes and the outputs
   * of its graph. Nodes may be ops of the library. The adapter adds the inputs, and runs it on
   * pieces of the outputs. 1: every row of the outputs comes from a row x[i, :] of the first input,
   * and from the row of each input whose required shape begins with x[:-1]. The model's tensors
   * have two dimensions. Inputs that are constant become initializers, which ONNX Runtime packs for
   * its own kernels. 2: every part y[i] of the outputs comes from x[i], and from the part of each
   * input that has as many; the work on a part is its elements times x's second dimension. */
  int32_t row_body; /* `call` has the data of constants, and sizes: null or -1 where not known */
  /* Sizes of outputs that come from the data, with their bounds: "n <= x[0]"; null or "": none. The
   * launcher writes them to call->counts. The caller reads them on the stream, and waits for it. */
  const char* sizes;
  /* Not 0: the launcher runs twice with one scratch memory: first with `counts`, then without, and
   * with outputs of these sizes. 0: it runs once, with outputs of the largest sizes. */
  int32_t two_pass;
} twinop_op;

/* What a library holds. */
typedef struct twinop_table {
  uint32_t abi_version; /* of all these structures; stays the first field */
  uint32_t struct_size; /* sizeof(twinop_table) when the library was compiled */
  const char* twinop_version;
  const char* domain;
  int32_t domain_version;
  const char* cuda_archs; /* of the kernels: "90,100-virtual", "80:90" or "none" */
  size_t op_count;
  const twinop_op* const* ops;
} twinop_table;

/* Returns the table in the wanted ABI version, or in the library's own if it has no other. */
typedef const twinop_table* (*twinop_library_function)(uint32_t wanted_abi);

#if defined(__GNUC__)
__attribute__((visibility("default")))
#endif
const twinop_table* twinop_library(uint32_t wanted_abi);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* TWINOP_KERNELS_ABI_H_ */
