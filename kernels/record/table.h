// Reads a library's table (kernels/abi.h). Both adapters do so when a library is loaded.
#pragma once

#include "twinop/abi.h"
#include "twinop/record/record.h"

namespace twinop {

// Checks that the table has the ABI version of this code. The message names `reader`, the adapter.
Status CheckTable(const twinop_table* table, const char* reader);

// Returns the record of an op of the table, whose texts it refers to. Throws const char* if they do
// not parse.
Record ReadRecord(const twinop_table& table, const twinop_op& op);

}  // namespace twinop
