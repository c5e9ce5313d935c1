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
enum class Kind : int32_t;
struct Tensor;
struct Attribute;
struct Context;
}  // namespace twinop
#define TWINOP_TYPE(cpp, c) cpp
extern "C" {
#else
#define TWINOP_TYPE(cpp, c) c
#endif

/* Changes when a caller of the previous version would misread a structure, or a tool the texts in
 * the file (kernels/record/json.h). A field that is added at the end of twinop_op or twinop_table
 * does not change it: struct_size says whether it is there. */
#define TWINOP_ABI_VERSION 3

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
  size_t input_count;
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

/* What an op is: its arguments, dtypes, shapes and limits, as its library's compiler parsed them
 * from the texts of its record (kernels/record/record.h). A name is NUL-terminated. A text is a
 * part of the record's texts. Only messages and torch, which has the schema, read texts. */
enum {
  TWINOP_MAX_ARGUMENTS = 16, /* of one op, tensors and attributes together */
  TWINOP_MAX_OUTPUTS = 8,
  TWINOP_MAX_COMBINATIONS = 16,
  TWINOP_MAX_LIST = 8, /* entries of an int[] attribute: axes, pads, strides */
  TWINOP_MAX_LIMITS = 48,
  TWINOP_MAX_NAME = 48,
  TWINOP_MAX_NODES = 96,
  TWINOP_MAX_SIZES = 4
};

typedef struct twinop_text {
  const char* data;
  size_t size;
} twinop_text;

/* Kinds of arguments: Tensor, Tensor?, int, float, bool, str, int[]. */
enum {
  TWINOP_TENSOR = 0,
  TWINOP_OPTIONAL_TENSOR = 1,
  TWINOP_INT = 3,
  TWINOP_FLOAT = 4,
  TWINOP_FLAG = 5,
  TWINOP_STR = 6,
  TWINOP_INT_LIST = 7
};

typedef struct twinop_argument {
  char name[TWINOP_MAX_NAME];
  TWINOP_TYPE(twinop::Kind, int32_t) kind;
  int32_t is_written;     /* Tensor(a!): an output <name>_out has its memory */
  int32_t on_host;        /* it lies in host memory on every device */
  int32_t shape;          /* that it must have: a node; -1: any */
  twinop_text shape_text; /* the same for messages */
  int32_t has_default;
  int64_t default_int; /* bool as 0 or 1 */
  double default_float;
  int64_t default_ints[TWINOP_MAX_LIST];
  size_t default_count;     /* of default_ints */
  twinop_text default_text; /* of a str; of other kinds as written, for the schema of torch */
} twinop_argument;

typedef struct twinop_output {
  char name[TWINOP_MAX_NAME];
  int32_t shape; /* a node */
  twinop_text shape_text;
  int32_t in_place;    /* the input that it may overwrite or, if written, is; -1: none */
  int32_t is_optional; /* the launcher does not write it where its data is null */
} twinop_output;

/* An expression is a tree of nodes. Links to nodes that there are not are -1. */
enum {
  /* shapes */
  TWINOP_SHAPE = 0,     /* of the input `index` */
  TWINOP_SLICE = 1,     /* its dimensions from a to b */
  TWINOP_LIST = 2,      /* the size a, then the list b */
  TWINOP_CONCAT = 3,    /* a + b */
  TWINOP_BROADCAST = 4, /* of a and b */
  /* sizes */
  TWINOP_NUMBER = 5,    /* value */
  TWINOP_ATTRIBUTE = 6, /* of the int or bool `index` */
  TWINOP_ENTRY = 7,     /* the entry a of the int[] `index` */
  TWINOP_SIZE = 8,      /* the size `index` of those that come from the data */
  TWINOP_DIMENSION = 9, /* the size of the dimension a of the input `index` */
  TWINOP_LEN = 10,      /* of the shape a */
  TWINOP_NUMEL = 11,
  TWINOP_ADD = 12,
  TWINOP_SUBTRACT = 13,
  TWINOP_MULTIPLY = 14,
  TWINOP_DIVIDE = 15,
  TWINOP_IF = 16 /* a if the str `index` is `text`, else b */
};

typedef struct twinop_node {
  int8_t operation, index, a, b;
  int64_t value; /* of TWINOP_SLICE and TWINOP_DIMENSION: how many dimensions the input must have */
  twinop_text text;
} twinop_node;

/* What an attribute must be: a dimension of the input `value`; a number within a bound; one of the
 * values of all its limits TWINOP_ONE_OF. */
enum {
  TWINOP_DIMENSION_OF = 0,
  TWINOP_ABOVE = 1,
  TWINOP_AT_LEAST = 2,
  TWINOP_BELOW = 3,
  TWINOP_AT_MOST = 4,
  TWINOP_ONE_OF = 5
};

typedef struct twinop_limit {
  int32_t attribute, rule;
  int64_t value;    /* of an int */
  double number;    /* of a float */
  twinop_text text; /* of a str; of other kinds as written, for messages */
} twinop_limit;

/* A size of outputs that comes from the data. The launcher writes these to call->counts. The caller
 * reads them on the stream, and waits for them. */
typedef struct twinop_size {
  char name[TWINOP_MAX_NAME];
  int32_t bound; /* a node, the shape of this one size; -1: none */
  twinop_text bound_text;
} twinop_size;

/* Where rows lie. The launcher reads rows which may be at any distance from each other. */
typedef struct twinop_rows {
  int32_t given;
  int32_t to_the_end; /* a row is all dimensions from this one on */
  int32_t attribute;  /* the dimension is its value; -1: it is `value` */
  int64_t value;
} twinop_rows;

typedef struct twinop_op {
  size_t struct_size; /* sizeof(twinop_op) when the library was compiled */
  const char* schema; /* in torch's language */
  const char* dtypes; /* the combinations, for messages */
  const char* domain; /* the library's */
  char name[TWINOP_MAX_NAME];
  char onnx_name[TWINOP_MAX_NAME];
  twinop_argument arguments[TWINOP_MAX_ARGUMENTS]; /* inputs, then attributes */
  size_t input_count;
  size_t attribute_count;
  twinop_output outputs[TWINOP_MAX_OUTPUTS]; /* those returned, then the written inputs */
  size_t output_count;
  size_t returned_count;
  /* The element types of all tensors in each allowed combination. */
  TWINOP_TYPE(twinop::DType, int32_t) input_types[TWINOP_MAX_COMBINATIONS][TWINOP_MAX_ARGUMENTS];
  TWINOP_TYPE(twinop::DType, int32_t) output_types[TWINOP_MAX_COMBINATIONS][TWINOP_MAX_OUTPUTS];
  size_t combination_count;
  twinop_limit limits[TWINOP_MAX_LIMITS];
  size_t limit_count;
  twinop_node nodes[TWINOP_MAX_NODES];
  size_t node_count;
  twinop_size sizes[TWINOP_MAX_SIZES];
  size_t size_count;
  int32_t is_elementwise;
  twinop_rows rows;
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
