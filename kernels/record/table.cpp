#include "twinop/record/table.h"

#include <cstddef>

namespace twinop {

Status CheckTable(const twinop_table* table, const char* reader) {
  if (table == nullptr) return Status::Error("the library has no table of ops. Build it again");
  if (table->abi_version == TWINOP_ABI_VERSION) return {};
  return Status::Error("the library's ops have version " + std::to_string(table->abi_version) +
                       " of twinop's binary interface, " + reader + " reads version " +
                       std::to_string(TWINOP_ABI_VERSION) +
                       ". Build the library again with this twinop (" TWINOP_VERSION
                       "), or use the twinop that built it");
}

Record ReadRecord(const twinop_table& table, const twinop_op& op) {
  Record record(op.schema);
  record.dtypes_text = op.dtypes;
  record.shapes_text = op.shapes;
  record.input_shapes_text = op.input_shapes;
  record.limits_text = op.limits;
  record.in_place_text = op.in_place;
  record.choices_text = op.choices;
  record.rows_text = op.rows;
  record.memory_text = op.memory;
  if (op.struct_size > offsetof(twinop_op, two_pass)) {
    if (op.sizes != nullptr) record.sizes_text = op.sizes;
    record.two_pass = op.two_pass != 0;
  }
  record.is_elementwise = std::string_view(op.layout) == "elementwise";
  record.ReadTexts();
  record.cpu_launch = op.cpu;
  record.cuda_launch = op.cuda;
  record.domain = table.domain;
  record.scratch_size = op.scratch_size;
  record.create_state = op.create;
  record.destroy_state = op.destroy;
  // A function body has a fixed number of inputs.
  if (op.struct_size > offsetof(twinop_op, body) && !record.schema.HasRepeatedInput())
    record.body_model = op.body;
  if (op.struct_size > offsetof(twinop_op, row_body)) record.body_pieces = op.row_body;
  return record;
}

}  // namespace twinop
